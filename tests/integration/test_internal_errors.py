"""A bug in Meshpoint's own code, on real servers, costs no replica, request or task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from live import RunningWorker, open_broker, serve_agent

from fake_peer import FakePeer
from meshpoint import FIRST, Call, Done, Paused, TaskExecutionContext
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.request_answers import RequestAnswers
from meshpoint.engine.request_consumer import RequestConsumer
from meshpoint.engine.segment import Segment
from meshpoint.engine.settlement import Settlement
from meshpoint.engine.sweeper import Sweeper
from meshpoint.model.bodies import RequestBody, parse_body
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import nested_queue, request_queue, response_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcomes
from meshpoint.model.tasks import CancelNotice

FRONT = AgentName("front")
EARLY = range(4)
"""Inputs of the tasks that wait for the peer when the bug occurs."""
SPARE = 100
gates: list[asyncio.Event] = []


class Front:
    """Calls its peer twice and takes the first answer.

    A negative number holds the slot until the gate opens.
    """

    name, state_format = FRONT, "front/1"

    async def start(self, ctx: TaskExecutionContext, number: int) -> Paused | Done[int]:
        if number >= 0:
            calls = [Call("one", "peer", number), Call("other", "peer", SPARE + number)]
            return Paused(calls, b"", FIRST)
        await gates[-1].wait()
        return Done(number)

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Done[Any]:
        return Done(
            next(outcome.value for outcome in outcomes.values() if isinstance(outcome, Ok))
        )


class Bug:
    """An internal method that raises for the next `left` calls."""

    def __init__(
        self, patch: pytest.MonkeyPatch, owner: type, method: str, should_fail: Callable[..., bool]
    ) -> None:
        self.left = 0
        self.exhausted = asyncio.Event()
        original = getattr(owner, method)

        async def broken(*args: Any, **options: Any) -> Any:
            if self.left and should_fail(*args):
                self.left -= 1
                if not self.left:
                    self.exhausted.set()
                raise RuntimeError("a bug")
            return await original(*args, **options)

        patch.setattr(owner, method, broken)


@dataclass
class Scenario:
    """One replica with one slot, its requester, its peer, and tasks that wait for the peer."""

    running_worker: RunningWorker
    client: FakePeer
    peer: FakePeer
    early_ids: list[TaskId]
    arm: Callable[[], None]

    async def answer(self, number: int) -> None:
        """Answer the call with this input."""
        await self.peer.wait_until(lambda: self._find_call(number) is not None)
        call = self._find_call(number)
        assert call is not None
        await self.peer.respond(call, 10 * number)

    def _find_call(self, number: int) -> Any:
        matching_calls = [
            each
            for each in self.peer.requests
            if parse_body(RequestBody, each.body).message.parts[0].data == number
        ]
        return matching_calls[0] if matching_calls else None

    def called_task_id(self, number: int) -> str:
        """Id of the peer's task for this input."""
        found: str = self._find_call(number).correlation_id
        return found


async def take_slot_for_request(scenario: Scenario) -> None:
    """Two requests take their slot when tasks may just have become ready."""
    acquire_slot = RequestConsumer.acquire_slot

    async def acquire_when_tasks_are_ready(
        self: RequestConsumer, segment: Segment, *, nowait: bool = False
    ) -> bool:
        self._tasks.tasks_ready.set()
        return await acquire_slot(self, segment, nowait=nowait)

    gates.append(asyncio.Event())
    gates[-1].set()
    scenario.arm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestConsumer, "acquire_slot", acquire_when_tasks_are_ready)
        for number in (-1, -2):
            task_id = await scenario.client.ask(FRONT, number)
            assert await scenario.client.first_reply(task_id) == Ok(number)


async def make_tasks_ready(scenario: Scenario) -> None:
    """Two tasks become ready while another one holds the only slot, which then becomes free."""
    gates.append(asyncio.Event())
    holding = await scenario.client.ask(FRONT, -1)
    await scenario.running_worker.events.wait(Step.SEGMENT, Phase.BEFORE, task_id=holding)
    scenario.arm()
    for number in (0, 1):
        await scenario.answer(number)
        await scenario.running_worker.events.wait(
            Step.CLAIM, Phase.AFTER, task_id=scenario.early_ids[number]
        )
    gates[-1].set()
    assert await scenario.client.first_reply(holding) == Ok(-1)
    for number in (0, 1):
        assert await scenario.client.first_reply(scenario.early_ids[number]) == Ok(10 * number)


async def resend_requests(scenario: Scenario) -> None:
    scenario.arm()
    for number in (0, 1):
        await scenario.client.ask(FRONT, number, task_id=scenario.early_ids[number])
    for number in (0, 1):
        await scenario.running_worker.events.wait(
            Step.ACK, Phase.AFTER, 2, scenario.early_ids[number]
        )


async def send_expired_requests(scenario: Scenario) -> None:
    scenario.arm()
    for task_id in [await scenario.client.ask(FRONT, 1, deadline=1) for _ in range(2)]:
        reply = await scenario.client.first_reply(task_id)
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.TIMEOUT


async def cancel_obsolete_calls(scenario: Scenario) -> None:
    """The first answers to two tasks make their other calls obsolete."""
    scenario.arm()
    for number in (0, 1):
        await scenario.answer(number)
        assert await scenario.client.first_reply(scenario.early_ids[number]) == Ok(10 * number)
    obsolete_ids = {scenario.called_task_id(SPARE + number) for number in (0, 1)}
    await scenario.peer.wait_until(lambda: obsolete_ids <= set(scenario.peer.cancels()))


def _always(*_: Any) -> bool:
    return True


def _contains_cancel(*args: Any) -> bool:
    return any(isinstance(item, CancelNotice) for item in args[-1])


@pytest.fixture
async def client_and_peer(
    amqp_url: str, namespace: str
) -> AsyncIterator[tuple[FakePeer, FakePeer]]:
    async with open_broker(amqp_url, namespace) as broker:
        yield await FakePeer(broker, "client").open(), await FakePeer(broker, "peer").open()


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("owner", "method", "is_affected", "trigger"),
    [
        pytest.param(Sweeper, "acquire_ready", _always, make_tasks_ready, id="ready tasks"),
        pytest.param(
            Sweeper, "acquire_ready", _always, take_slot_for_request, id="a slot for a request"
        ),
        pytest.param(
            Publisher, "wake_others", _always, make_tasks_ready, id="news of ready tasks"
        ),
        pytest.param(
            RequestAnswers,
            "handle_existing",
            _always,
            resend_requests,
            id="requests that come again",
        ),
        pytest.param(RequestAnswers, "settle", _always, resend_requests, id="requests to settle"),
        pytest.param(
            RequestAnswers, "refuse", _always, send_expired_requests, id="requests to refuse"
        ),
        pytest.param(
            Settlement, "send", _contains_cancel, cancel_obsolete_calls, id="cancels to send"
        ),
    ],
)
async def test_a_replica_survives_an_internal_error_and_answers_every_request(
    client_and_peer: tuple[FakePeer, FakePeer],
    amqp_url: str,
    namespace: str,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    is_affected: Callable[..., bool],
    trigger: Callable[[Scenario], Awaitable[None]],
    times: int,
) -> None:
    client, peer = client_and_peer
    bug = Bug(monkeypatch, owner, method, is_affected)
    async with serve_agent(
        Front(), amqp_url, namespace, postgres_url, max_concurrency=1
    ) as running_worker:
        early_ids = [await client.ask(FRONT, number) for number in EARLY]
        scenario = Scenario(
            running_worker, client, peer, early_ids, partial(setattr, bug, "left", times)
        )
        for task_id in early_ids:  # they wait for the peer, and their requests are acked
            await running_worker.events.wait(Step.ACK, Phase.AFTER, task_id=task_id)
        await _await_while_alive(running_worker, trigger(scenario))
        await _await_while_alive(running_worker, bug.exhausted.wait())

        for number, task_id in enumerate(early_ids):
            await scenario.answer(number)
            assert await _await_while_alive(running_worker, client.first_reply(task_id)) == Ok(
                10 * number
            )
        late_id = await client.ask(FRONT, 7)
        await _await_while_alive(running_worker, scenario.answer(7))
        assert await _await_while_alive(running_worker, client.first_reply(late_id)) == Ok(70)
        for task_id in [*early_ids, late_id]:
            assert len({repr(item) for item in client.replies(task_id)}) == 1
    for address in (request_queue(FRONT), nested_queue(FRONT), response_queue(FRONT)):
        assert await client.depth(address) == 0, "unsettled messages are left"


async def _await_while_alive(running_worker: RunningWorker, step: Any) -> Any:
    """Wait for `step`; if the replica ends meanwhile, raise its error."""
    task = asyncio.ensure_future(step)
    try:
        await asyncio.wait({task, running_worker.task}, return_when=asyncio.FIRST_COMPLETED)
        if running_worker.task.done():
            await running_worker.task
            pytest.fail("the replica ended")
        assert task.done(), "the step timed out"
        return task.result()
    finally:
        task.cancel()
