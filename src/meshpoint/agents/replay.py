"""One run of a function agent: recorded calls are answered, the first unrecorded one ends the segment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from meshpoint.agents.journal import Journal, JournalEntry
from meshpoint.errors import AgentFailed, AgentMisbehaved, ReplayMismatch
from meshpoint.model.calls import Join, Paused
from meshpoint.model.checkpoint import Checkpoint
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.recording import UnsentCall
from meshpoint.model.snapshot import rewind, set_usage, snapshot
from meshpoint.model.subtasking import current_subtask


class PauseSignal(BaseException):
    """Unwinds the function. No `Exception`, so that `except Exception` in agent code does not take it for one."""


class Replay:
    """The `Recorder` of one segment of a function agent.

    The context goes through the same values again as in the earlier run: it begins as it first was, has at each
    recorded call the tokens it had then, and from the last one on is what the checkpoint kept. So nothing that the
    repeated part sets or counts on it is there twice.
    """

    def __init__(self, agent: str, ctx: TaskExecutionContext, journal: Journal) -> None:
        self._agent, self._ctx, self._journal = agent, ctx, journal
        self._task = asyncio.current_task()
        self._position = self._position_outside_subtasks = 0
        self._paused: Paused | None = None
        self._violation: AgentFailed | None = None
        self._closed = False
        self._live: Checkpoint = {}
        if self.replaying:
            self._live = snapshot(ctx)
            rewind(ctx, journal.context)

    @property
    def replaying(self) -> bool:
        """Whether recorded calls are left."""
        return self._position < len(self._journal.entries)

    @property
    def position(self) -> int:
        """How many recorded pauses the function has passed, but for those within subtasks."""
        return self._position_outside_subtasks

    async def ask(self, calls: Sequence[UnsentCall[Any]], join: Join) -> list[Ok[Any] | Failed]:
        """The recorded outcomes of `calls`.

        Raises:
            PauseSignal: there are none yet.
            ReplayMismatch: something else was recorded at this place.
            AgentMisbehaved: this is not the function, waiting for one thing at a time.
        """
        self._reject_misuse()
        requests = [call.as_call(f"{call.peer}.{index}") for index, call in enumerate(calls)]
        entry = JournalEntry.for_calls(requests, join, self._ctx.token_usage, current_subtask())
        if not self.replaying:
            self._paused = Paused(requests, self._journal.to_bytes_with(entry), join)
            raise PauseSignal
        recorded = self._journal.entries[self._position]
        if (difference := recorded.describe_mismatch(entry)) is not None:
            place = f"{self._agent}: call {self._position + 1}"
            self._raise_violation(ReplayMismatch(f"{place} differs: {difference}; {_MISMATCH_HINT}"))
        self._advance(recorded)
        assert recorded.outcomes is not None
        return [call.read(outcome) for call, outcome in zip(calls, recorded.outcomes, strict=True)]

    def skip(self, subtask: str) -> None:
        """Pass the recorded calls of a subtask that does not run, because its deliverable is known."""
        while self.replaying and self._journal.entries[self._position].subtask == subtask:
            self._advance(self._journal.entries[self._position])

    def finish(self, raised: BaseException | None) -> Paused | None:
        """What the run of the function came to: its pause, or None when its own result or exception counts.

        Raises:
            AgentMisbehaved: the function swallowed the pause, or a misuse it was told of.
            ReplayMismatch: it swallowed one, or ended before it had made its recorded calls.
        """
        if self._violation is not None:
            raise self._violation
        if self._paused is None:
            if raised is None and self.replaying:
                recorded = len(self._journal.entries)
                problem = f"it ended after {self._position} of {recorded} recorded calls"
                raise ReplayMismatch(f"{self._agent}: {problem}; {_MISMATCH_HINT}")
            return None
        if raised is None:
            raise AgentMisbehaved(f"{self._agent} swallowed a pause: {_PAUSE_HINT}")
        if not _is_only_pause(raised):
            what = f"{type(raised).__name__}: {raised}"
            raise AgentMisbehaved(f"{self._agent} raised {what} while it was pausing: {_PAUSE_HINT}") from raised
        return self._paused

    def close(self) -> None:
        """End the segment: who still holds the context can call no peer. The context is what it has become."""
        self._closed = True
        if self.replaying:
            rewind(self._ctx, self._live)
        del self._ctx, self._task  # which hold this recorder: garbage would wait for the collector

    def _advance(self, recorded: JournalEntry) -> None:
        self._position += 1
        self._position_outside_subtasks += recorded.subtask is None
        if self.replaying:
            set_usage(self._ctx, recorded.total_usage())
        else:
            rewind(self._ctx, self._live)

    def _reject_misuse(self) -> None:
        if self._violation is not None:
            raise self._violation
        if self._closed:
            raise AgentMisbehaved(f"a task that {self._agent} left behind called a peer: {_GATHER_HINT}")
        if self._paused is not None:
            self._raise_violation(AgentMisbehaved(f"{self._agent} called a peer while it was pausing: {_PAUSE_HINT}"))
        if asyncio.current_task() is not self._task:
            self._raise_violation(
                AgentMisbehaved(f"{self._agent} called a peer in another asyncio task: {_GATHER_HINT}")
            )

    def _raise_violation(self, violation: AgentFailed) -> NoReturn:
        # Remembered, because agent code may catch it, and must not come to a result all the same.
        self._violation = violation
        raise violation


_MISMATCH_HINT = (
    "a function agent must make the same calls whenever it runs; either it depends on time, chance or anything else "
    "outside its input and its peers' answers, or its code has changed and its version= has not"
)
_PAUSE_HINT = (
    "each pause unwinds the function, through `finally` and `except BaseException`; "
    "let the exception pass, and neither fail nor call peers there"
)
_GATHER_HINT = (
    "to wait for several, write `await ctx.gather(a(x), b(y))` instead of asyncio.gather, create_task or a "
    "TaskGroup; to limit the time, give the Peer a timeout instead of asyncio.wait_for"
)


def _is_only_pause(raised: BaseException) -> bool:
    """Whether `raised` is the pause, maybe in the groups that a TaskGroup around the call wraps it in."""
    if isinstance(raised, BaseExceptionGroup):
        return raised.split(PauseSignal)[1] is None
    return isinstance(raised, PauseSignal)
