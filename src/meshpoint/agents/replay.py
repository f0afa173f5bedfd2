"""One run of a function agent: recorded calls return their outcomes, the first new call pauses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from os.path import basename
from typing import Any, NoReturn

from pydantic import JsonValue

from meshpoint.agents.journal import JournalEntry, StoredJournal
from meshpoint.errors import AgentMisbehaved, IncompatibleState, ReplayMismatch
from meshpoint.model.calls import ALL, Call, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import UnsentCall
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.recorded_work import current_subtask
from meshpoint.model.snapshot import rewind, set_usage, snapshot
from meshpoint.model.tasks import CheckpointDict
from meshpoint.model.usage import TokenUsage
from meshpoint.model.waits import display_name, is_wait


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
        peer_artifacts: The artifacts of the peers' results in these pauses.
        has_waited: Whether it has passed or reached a wait that no peer answers.
    """

    def __init__(self, agent: str, ctx: TaskExecutionContext, stored: StoredJournal) -> None:
        self._agent, self._ctx, self._stored = agent, ctx, stored
        self._task = asyncio.current_task()
        self.passed = self.position = 0
        self.peer_artifacts: list[dict[str, JsonValue]] = []
        self.has_waited = False
        self._pauses = stored.pauses
        self.replaying = self._pauses > 0
        self._paused: Paused | None = None
        self._signal: PauseSignal | None = None
        self._swallowed_at: str | None = None
        self._violation: AgentMisbehaved | IncompatibleState | None = None
        self._closed = False
        self._live: CheckpointDict = {}
        if self.replaying:
            self._live = snapshot(ctx)
            rewind(ctx, stored.journal.context)

    @property
    def is_pausing(self) -> bool:
        """Whether the segment ends with a pause."""
        return self._paused is not None

    @property
    def is_own_task(self) -> bool:
        """Whether the caller runs in the function's own asyncio task."""
        return not self._closed and asyncio.current_task() is self._task

    def ask(
        self, calls: Sequence[UnsentCall[Any]], join: Join, *, from_run: bool = False
    ) -> list[Ok[Any] | Failed]:
        """Return the recorded outcomes of `calls`; see `CallRecorder`.

        Raises:
            PauseSignal: Nothing is recorded yet.
            ReplayMismatch: Other calls are recorded at this position.
            AgentMisbehaved: The caller is not the function itself, waiting for one thing at a
                time.
        """
        if (
            self._closed
            or self._violation is not None
            or self._paused is not None
            or self._ctx._runtime.find_open_step() is not None
            or (not from_run and asyncio.current_task() is not self._task)
        ):
            self._reject_misuse(calls)
        subtask = current_subtask()
        if self.replaying:
            if len(calls) == 1 and join is ALL and subtask is None:
                [call] = calls
                result = self._stored.find_plain(self.passed, call)
                if result is not None:
                    self._advance_plain(call.peer)
                    return [call.read(result)]
            recorded = self._recorded()
            if not recorded.records(calls, join, subtask):
                current = self._entry(_build(calls), join, subtask)
                difference = self._describe_difference(recorded, current, calls)
                self._raise_violation(self._mismatch(f"call {self.passed + 1}{difference}"))
            self._advance(recorded)
            outcomes = recorded.read_outcomes()
            return [call.read(outcome) for call, outcome in zip(calls, outcomes, strict=True)]
        requests = _build(calls)
        entry = self._entry(requests, join, subtask)
        self.has_waited |= entry.has_waits
        entry.now = self._ctx._runtime.instant
        if not self._pauses and (attempt := self.attempt):
            self._stored.journal.context["attempt"] = attempt
        self._paused = self._stored.pause(requests, join, entry)
        self._signal = PauseSignal()
        raise self._signal

    def _describe_difference(
        self, recorded: JournalEntry, current: JournalEntry, calls: Sequence[UnsentCall[Any]]
    ) -> str:
        return f": {recorded.describe_mismatch(current)}"

    def _recorded(self) -> JournalEntry:
        try:
            return self._stored.entry(self.passed)
        except IncompatibleState as error:
            self._raise_violation(error)

    def _entry(self, requests: Sequence[Call], join: Join, subtask: str | None) -> JournalEntry:
        return JournalEntry.for_calls(requests, join, self._ctx.token_usage, subtask)

    @property
    def attempt(self) -> int:
        """The attempt of the operation in which the function first started."""
        if self._pauses:
            return int(str(self._stored.journal.context.get("attempt", 0)))
        tools = self._ctx._runtime.tools
        return 0 if tools is None else tools.place[1]

    @property
    def recorded_now(self) -> datetime | None:
        """What `ctx.now()` returned before the next recorded pause, if it was used."""
        now = self._recorded().now
        return None if now is None else now.astimezone(UTC)

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
                reason = f"ended after {self.passed} of {self._pauses} recorded calls"
                raise self._mismatch(reason)
            return None
        if raised is None:
            raise self._swallowed()
        self._signal = None
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
        if self._signal is not None:
            self._swallowed_at, self._signal = _describe_place(self._signal), None
        if self.replaying:
            rewind(self._ctx, self._live)
        self._ctx._runtime.instant = None
        del self._ctx, self._task  # break reference cycles: no garbage for the collector

    def _advance(self, recorded: JournalEntry) -> None:
        self.passed += 1
        self.position += recorded.subtask is None
        self.has_waited = self.has_waited or recorded.has_waits
        self.replaying = self.passed < self._pauses
        recorded.add_artifacts_to(self.peer_artifacts)
        if self.replaying:
            usage = recorded.total_usage()
            if usage is not None or not self._ctx.token_usage.is_empty:
                set_usage(self._ctx, usage or TokenUsage())
        else:
            rewind(self._ctx, self._live)

    def _advance_plain(self, peer: str) -> None:
        """Pass a pause that `find_plain` has found. It is not the last one."""
        self.passed += 1
        self.position += 1
        if not self.has_waited and is_wait(peer):
            self.has_waited = True
        if not self._ctx.token_usage.is_empty:
            set_usage(self._ctx, TokenUsage())

    def _reject_misuse(self, calls: Sequence[UnsentCall[Any]]) -> None:
        if self._violation is not None:
            raise self._violation
        if self._closed:
            raise AgentMisbehaved(
                f"an asyncio task left behind by {self._agent} called a peer: {_LEFT_HINT}"
            )
        if self._paused is not None and not isinstance(sys.exc_info()[1], PauseSignal):
            self._raise_violation(self._swallowed())  # no `finally` is running
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
                    "peer calls run in the agent's own task: await "
                    f"ctx.gather({display_name(calls[0].peer)}(t), …); {_TIMEOUT_HINT}"
                )
            )

    def _swallowed(self) -> AgentMisbehaved:
        """The error for code that caught the pause and continued."""
        if self._signal is not None:
            self._swallowed_at = _describe_place(self._signal)
        return AgentMisbehaved(
            f"{self._agent}, {self._swallowed_at}: this except swallowed a pause: catch Exception"
        )

    def _mismatch(self, reason: str) -> ReplayMismatch:
        return ReplayMismatch(reason, f"{self._agent}: {_MISMATCH_HINT}")

    def _raise_violation(self, violation: AgentMisbehaved | IncompatibleState) -> NoReturn:
        # Kept for `finish`: agent code may catch the error, and must not return a result after it.
        self._violation = violation
        raise violation


_MISMATCH_HINT = (
    "a function agent must make the same calls on every run: either it depends on the time, "
    "random values or anything else besides its input and its peers' answers, or its code has "
    "changed and its version= has not"
)
_PAUSE_HINT = (
    "each pause unwinds the function, through `finally` and `except BaseException`; "
    "let the exception propagate, and neither fail nor call peers there"
)
_STEP_HINT = (
    "await a step before the next peer call; to call peers in recorded work, use ctx.subtask"
)
_TIMEOUT_HINT = "to limit the time, give the peer a timeout instead of using asyncio.wait_for"
_LEFT_HINT = "wait for the asyncio tasks that the function starts before it returns"


def _build(calls: Sequence[UnsentCall[Any]]) -> list[Call]:
    return [call.as_call(f"{call.peer}.{index}") for index, call in enumerate(calls)]


def _describe_place(signal: PauseSignal) -> str:
    """The line of the code that waited, in the function that caught the signal."""
    traceback = signal.__traceback__
    if traceback is None:
        return "unknown place"
    return f"{basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno}"


def _is_only_pause(raised: BaseException) -> bool:
    """Whether `raised` is the pause alone, possibly wrapped in exception groups by a TaskGroup."""
    if isinstance(raised, BaseExceptionGroup):
        return raised.split(PauseSignal)[1] is None
    return isinstance(raised, PauseSignal)
