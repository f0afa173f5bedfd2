"""One run of a function agent: recorded calls return their outcomes, the first new call pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from meshpoint.agents.journal import JournalEntry, StoredJournal
from meshpoint.errors import AgentMisbehaved, IncompatibleState, ReplayMismatch
from meshpoint.model.calls import Call, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import UnsentCall
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.recorded_work import current_subtask
from meshpoint.model.snapshot import rewind, set_usage, snapshot
from meshpoint.model.tasks import CheckpointDict
from meshpoint.model.usage import TokenUsage


class PauseSignal(BaseException):
    """Unwinds the function. It is not an `Exception`, so that `except Exception` in agent code
    does not catch it.
    """


class Replay:
    """The `CallRecorder` of one segment of a function agent.

    The context goes through the same values as in the earlier run. It starts as it was at the
    first start, at each recorded call gets the token usage it had then, and after the last one
    becomes what the checkpoint kept. So nothing that replayed code sets or counts is there twice.

    Attributes:
        replaying: Whether recorded calls are left.
        passed: Number of recorded pauses that the function has passed.
        position: The same, not counting those within subtasks.
    """

    def __init__(self, agent: str, ctx: TaskExecutionContext, stored: StoredJournal) -> None:
        self._agent, self._ctx, self._stored = agent, ctx, stored
        self._task = asyncio.current_task()
        self.passed = self.position = 0
        self.replaying = len(stored) > 0
        self._paused: Paused | None = None
        self._violation: AgentMisbehaved | IncompatibleState | None = None
        self._closed = False
        self._live: CheckpointDict = {}
        if self.replaying:
            self._live = snapshot(ctx)
            rewind(ctx, stored.journal.context)

    @property
    def is_own_task(self) -> bool:
        """Whether the caller runs in the function's own asyncio task."""
        return not self._closed and asyncio.current_task() is self._task

    async def ask(self, calls: Sequence[UnsentCall[Any]], join: Join) -> list[Ok[Any] | Failed]:
        """Return the recorded outcomes of `calls`.

        Raises:
            PauseSignal: Nothing is recorded yet.
            ReplayMismatch: Other calls are recorded at this position.
            AgentMisbehaved: The caller is not the function itself, waiting for one thing at a
                time.
        """
        self._reject_misuse()
        subtask = current_subtask()
        if self.replaying:
            recorded = self._recorded()
            if not recorded.records(calls, join, subtask):
                difference = recorded.describe_mismatch(self._entry(_build(calls), join, subtask))
                self._raise_violation(self._mismatch(f"call {self.passed + 1}: {difference}"))
            self._advance(recorded)
            outcomes = recorded.read_outcomes()
            return [call.read(outcome) for call, outcome in zip(calls, outcomes, strict=True)]
        requests = _build(calls)
        entry = self._entry(requests, join, subtask)
        self._paused = self._stored.pause(requests, join, entry)
        raise PauseSignal

    def _recorded(self) -> JournalEntry:
        try:
            return self._stored.entry(self.passed)
        except IncompatibleState as error:
            self._raise_violation(error)

    def _entry(self, requests: Sequence[Call], join: Join, subtask: str | None) -> JournalEntry:
        return JournalEntry.for_calls(requests, join, self._ctx.token_usage, subtask)

    def skip_subtask(self, subtask: str) -> None:
        """Pass the recorded calls of a subtask that is not run, since its deliverable is known."""
        while self.replaying and (recorded := self._recorded()).subtask == subtask:
            self._advance(recorded)

    def finish(self, raised: BaseException | None) -> Paused | None:
        """Return the pause that ended the run; `None` if the function returned or raised itself.

        Raises:
            AgentMisbehaved: The function swallowed the pause, or an earlier misuse error.
            ReplayMismatch: It swallowed an earlier mismatch, or ended before it had made all
                recorded calls.
        """
        if self._violation is not None:
            raise self._violation
        if self._paused is None:
            if raised is None and self.replaying:
                reason = f"ended after {self.passed} of {len(self._stored)} recorded calls"
                raise self._mismatch(reason)
            return None
        if raised is None:
            raise AgentMisbehaved(f"{self._agent} swallowed a pause: {_PAUSE_HINT}")
        if not _is_only_pause(raised):
            what = f"{type(raised).__name__}: {raised}"
            raise AgentMisbehaved(
                f"{self._agent} raised {what} while it was pausing: {_PAUSE_HINT}"
            ) from raised
        return self._paused

    def close(self) -> None:
        """End the segment: code that still holds the context can no longer call peers.

        If recorded calls are left, the context becomes what the checkpoint kept.
        """
        self._closed = True
        if self.replaying:
            rewind(self._ctx, self._live)
        del self._ctx, self._task  # break reference cycles: no garbage for the collector

    def _advance(self, recorded: JournalEntry) -> None:
        self.passed += 1
        self.position += recorded.subtask is None
        self.replaying = self.passed < len(self._stored)
        if self.replaying:
            usage = recorded.total_usage()
            if usage is not None or not self._ctx.token_usage.is_empty:
                set_usage(self._ctx, usage or TokenUsage())
        else:
            rewind(self._ctx, self._live)

    def _reject_misuse(self) -> None:
        if self._violation is not None:
            raise self._violation
        if self._closed:
            raise AgentMisbehaved(
                f"an asyncio task left behind by {self._agent} called a peer: {_GATHER_HINT}"
            )
        if self._paused is not None:
            self._raise_violation(
                AgentMisbehaved(f"{self._agent} called a peer while it was pausing: {_PAUSE_HINT}")
            )
        if (step := self._ctx._runtime.find_open_step()) is not None:
            self._raise_violation(
                AgentMisbehaved(
                    f"{self._agent} called a peer while step {step!r} was open: {_STEP_HINT}"
                )
            )
        if not self.is_own_task:
            self._raise_violation(
                AgentMisbehaved(
                    f"{self._agent} called a peer in another asyncio task: {_GATHER_HINT}"
                )
            )

    def _mismatch(self, reason: str) -> ReplayMismatch:
        return ReplayMismatch(reason, f"{self._agent}: {_MISMATCH_HINT}")

    def _raise_violation(self, violation: AgentMisbehaved | IncompatibleState) -> NoReturn:
        # Kept for `finish`: agent code may catch the error, and must not return a result after it.
        self._violation = violation
        raise violation


_MISMATCH_HINT = (
    "a function agent must make the same calls on every run: either it depends on time, chance or "
    "anything else besides its input and its peers' answers, or its code has changed and its "
    "version= has not"
)
_PAUSE_HINT = (
    "each pause unwinds the function, through `finally` and `except BaseException`; "
    "let the exception propagate, and neither fail nor call peers there"
)
_STEP_HINT = (
    "await a step before the next peer call; to call peers in recorded work, use ctx.subtask"
)
_GATHER_HINT = (
    "to wait for several calls, write `await ctx.gather(a(x), b(y))` instead of asyncio.gather, "
    "create_task or a TaskGroup; to limit the time, give the Peer a timeout instead of using "
    "asyncio.wait_for"
)


def _build(calls: Sequence[UnsentCall[Any]]) -> list[Call]:
    return [call.as_call(f"{call.peer}.{index}") for index, call in enumerate(calls)]


def _is_only_pause(raised: BaseException) -> bool:
    """Whether `raised` is the pause alone, possibly wrapped in exception groups by a TaskGroup."""
    if isinstance(raised, BaseExceptionGroup):
        return raised.split(PauseSignal)[1] is None
    return isinstance(raised, PauseSignal)
