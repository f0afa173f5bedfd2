"""Run an agent in memory, and check that it keeps the contract of `DurableAgent`.

There is no broker and no database: one coroutine does what a worker and its peers would do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from meshpoint.errors import IncompatibleState, InvalidInput
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.messages import validate_agent_name
from meshpoint.model.outcomes import (
    Failed,
    FailureKind,
    Ok,
    Outcome,
    Outcomes,
    decode_outcome,
    encode_outcome,
)
from meshpoint.ports.agent import DurableAgent, ReadsLog, readable_formats

Out = TypeVar("Out")

Answer = Callable[[Call], Outcome]
"""Plays all peers: returns the outcome of a call."""


async def run_agent(
    agent: DurableAgent[Any, Out],
    request: object,
    answer: Answer,
    *,
    ctx: TaskExecutionContext | None = None,
    max_pauses: int = 1000,
) -> Out:
    """Run `agent` to its end and return its output, restoring it from a checkpoint at each pause.

    Args:
        agent: the agent to run.
        request: its input, which is first converted to JSON, as on the wire.
        answer: plays the peers. It is called in call order until the join is met; the remaining
            calls are cancelled.
        ctx: the context of the first segment; by default a new one. Later segments get a context
            restored from it.
        max_pauses: number of pauses after which the run fails.

    Raises:
        AssertionError: the agent paused `max_pauses` times without ending.
        Exception: any exception of the agent.
    """
    current = ctx if ctx is not None else TaskExecutionContext(TaskId(new_id()))
    result = await agent.start(current, to_jsonable_python(request))
    log: tuple[bytes, ...] = ()
    for _ in range(max_pauses):
        if isinstance(result, Done):
            to_jsonable_python(result.output)
            return result.output
        outcomes = answered(result, answer)
        current = restored(current, result, outcomes)
        log = log_after(log, result)
        result = await resumed(agent, current, result, log, outcomes)
    raise AssertionError(f"{agent.name} has paused {max_pauses} times and is not done")


async def resumed(
    agent: DurableAgent[Any, Out],
    ctx: TaskExecutionContext,
    paused: Paused,
    log: Sequence[bytes],
    outcomes: Outcomes,
) -> Paused | Done[Out]:
    """Resume `agent` after `paused`, as an engine would. `log` includes that pause's entry."""
    if isinstance(agent, ReadsLog):
        return await agent.resume_with_log(ctx, paused.state, log, outcomes)
    assert paused.append is None, f"{agent.name} appends to a log that it cannot read"
    return await agent.resume(ctx, paused.state, outcomes)


def log_after(log: Sequence[bytes], paused: Paused) -> tuple[bytes, ...]:
    """The task's log after `paused`, where `log` is the one before."""
    return () if paused.append is None else (*log, paused.append)


def answered(paused: Paused, answer: Answer) -> Outcomes:
    """The outcomes that `paused` resumes with, each encoded and decoded as in the store.

    Calls that the join no longer needs are cancelled.
    """
    outcomes: dict[str, Outcome] = {}
    for call in paused.calls:
        succeeded = sum(isinstance(outcome, Ok) for outcome in outcomes.values())
        if paused.join.met(total=len(paused.calls), completed=len(outcomes), succeeded=succeeded):
            outcomes[call.id] = Failed(FailureKind.CANCELLED, "no longer needed")
        else:
            outcomes[call.id] = decode_outcome(encode_outcome(answer(call)))
    return Outcomes(outcomes)


def restored(
    ctx: TaskExecutionContext, paused: Paused, outcomes: Outcomes
) -> TaskExecutionContext:
    """The context as another replica restores it after `paused`, with the peers' tokens added."""
    rebuilt = TaskExecutionContext.from_checkpoint_dict(ctx.to_checkpoint_dict())
    for call in paused.calls:
        rebuilt.token_usage.merge(outcomes[call.id].usage, source=call.peer)
    return rebuilt


class DurableAgentSuite(ABC):
    """Tests that every agent must pass.

    Subclass it as `Test…` and implement `agent`, `request` and `answer`. Needs pytest-asyncio.
    """

    @abstractmethod
    def agent(self) -> DurableAgent[Any, Any]:
        """Return a new instance of the agent, as a new replica would create it."""

    @abstractmethod
    def request(self) -> JsonValue:
        """An input for which the agent pauses at least once and then ends."""

    @abstractmethod
    def answer(self, call: Call) -> Outcome:
        """The outcome of `call`. It must be the same each time."""

    def wrong_request(self) -> JsonValue:
        """An input that the agent must refuse.

        If it accepts any input, skip `test_wrong_input_is_refused`.
        """
        return {"no such field": [None]}

    async def test_name_and_formats_can_be_used(self) -> None:
        agent = self.agent()
        assert isinstance(agent, DurableAgent)
        validate_agent_name(agent.name)
        assert agent.state_format in readable_formats(agent)

    async def test_it_comes_to_an_end_in_ever_new_replicas(self) -> None:
        results = await self._segments()
        assert isinstance(results[0], Paused), "request() must make the agent pause"
        assert isinstance(results[-1], Done)

    async def test_start_is_repeatable(self) -> None:
        first = await self.agent().start(_context(), self.request())
        assert await self.agent().start(_context(), self.request()) == first

    async def test_resume_is_a_pure_function_of_state_and_outcomes(self) -> None:
        ctx, log = _context(), tuple[bytes, ...]()
        result = await self.agent().start(ctx, self.request())
        while isinstance(result, Paused):
            outcomes = answered(result, self.answer)
            ctx, twin = restored(ctx, result, outcomes), restored(ctx, result, outcomes)
            log = log_after(log, result)
            copy = replace(result, state=bytes(bytearray(result.state)))
            again = await resumed(self.agent(), twin, copy, log, outcomes)
            result = await resumed(self.agent(), ctx, result, log, outcomes)
            assert result == again
            assert ctx.to_checkpoint_dict() == twin.to_checkpoint_dict()

    async def test_one_instance_serves_tasks_side_by_side(self) -> None:
        shared = self.agent()
        ctx, other_ctx, log = _context(), _context(), tuple[bytes, ...]()
        result = await shared.start(ctx, self.request())
        await shared.start(other_ctx, self.request())
        for expected in (await self._segments())[1:]:
            assert isinstance(result, Paused)
            outcomes = answered(result, self.answer)
            ctx, log = restored(ctx, result, outcomes), log_after(log, result)
            result = await resumed(shared, ctx, result, log, outcomes)
            assert result == expected

    @pytest.mark.parametrize("kind", list(FailureKind))
    async def test_peer_failure_ends_in_result_or_exception(self, kind: FailureKind) -> None:
        def refuse(call: Call) -> Outcome:
            return Failed(kind, f"no {call.peer} today")

        try:
            await run_agent(self.agent(), self.request(), refuse)
        except (IncompatibleState, AssertionError):
            raise
        except Exception as error:
            # The exception becomes the error text of the reply, so it must not be empty.
            said = str(error)
            assert said

    @pytest.mark.parametrize(
        "state", [b"", b"{", b"{}", b"[]", b"null", b"\x80\x04N.", b"\xff\x00"]
    )
    async def test_an_unreadable_state_is_incompatible(self, state: bytes) -> None:
        result = await self.agent().start(_context(), self.request())
        assert isinstance(result, Paused)
        with pytest.raises(IncompatibleState):
            await self.agent().resume(_context(), state, answered(result, self.answer))

    async def test_a_truncated_state_is_incompatible(self) -> None:
        result = await self.agent().start(_context(), self.request())
        assert isinstance(result, Paused)
        with pytest.raises(IncompatibleState):
            await self.agent().resume(_context(), result.state[:-1], answered(result, self.answer))

    async def test_wrong_input_is_refused(self) -> None:
        with pytest.raises(InvalidInput):
            await self.agent().start(_context(), self.wrong_request())

    async def _segments(self) -> list[Paused | Done[Any]]:
        ctx, log = _context(), tuple[bytes, ...]()
        results = [await self.agent().start(ctx, self.request())]
        while isinstance(paused := results[-1], Paused):
            outcomes = answered(paused, self.answer)
            ctx, log = restored(ctx, paused, outcomes), log_after(log, paused)
            results.append(await resumed(self.agent(), ctx, paused, log, outcomes))
        return results


def _context() -> TaskExecutionContext:
    return TaskExecutionContext(TaskId("a-task-of-the-suite"))
