"""Replay the exported history of a task with the code under test."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.agents.function import FunctionAgent
from meshpoint.agents.journal import JournalEntry, StoredJournal
from meshpoint.agents.replay import Replay
from meshpoint.engine.history import RecordedCall, TaskHistory, read_history
from meshpoint.engine.runtime import ReplicaRuntime, build_runtime
from meshpoint.engine.segment import Segment, Workspace
from meshpoint.engine.segment_runner import restore_context, resume_call
from meshpoint.engine.task_log import StepEntry, TaskLog
from meshpoint.errors import ConfigurationError, IncompatibleState
from meshpoint.model.calls import Done, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import UnsentCall
from meshpoint.model.current_context import running_context
from meshpoint.model.error_text import describe_exception
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.log_context import LogContext, current_log_context
from meshpoint.model.log_entries import LogEntries
from meshpoint.model.options import Options, StoreTimings
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.subtasks import AgentCheckpoint, Operation
from meshpoint.model.tasks import L1Snapshot, Replica, Requester, Resumable, Run
from meshpoint.model.transitions import BeginCommitted, BeginResult
from meshpoint.model.waits import display_name, is_wait
from meshpoint.ports.agent import DurableAgent, readable_formats, select_version
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.errors import ReplayDiffers
from meshpoint.testing.nondeterminism import find_nondeterminism
from meshpoint.testing.replay_check import find_difference

_OPEN = Failed(FailureKind.CANCELLED, "this call has no outcome yet")
_LOG_START = 1  # bytes in front of an entry that say what it is


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """How far the code got with a recorded history.

    Attributes:
        agent: The agent's name.
        task_id: The task.
        recorded: Number of recorded pauses.
        passed: How many of them the code has made again. Class and framework agents continue from
            their state and make none of them again.
        stopped_at: Where the replay ended, such as "step 'charge', which is not recorded".
    """

    agent: str
    task_id: str
    recorded: int
    passed: int
    stopped_at: str

    def __str__(self) -> str:
        return (
            f"{self.agent}, task {self.task_id}: {self.passed} of {self.recorded} recorded "
            f"pauses, up to {self.stopped_at}"
        )


async def replay_history(agent: DurableAgent[Any, Any], file: str | Path, /) -> ReplayReport:
    """Check that `agent` can continue a task whose history `meshpoint tasks export` has written.

        async def test_waiting_tasks_continue() -> None:
            await replay_history(travel, "history.json")

    The code runs with the recorded results of its calls, waits, steps and subtasks, its recorded
    times and its working memory. Nothing is sent or stored. The replay ends where the record
    does: at a call without an outcome, or before a step, a subtask or a call that is new. Code
    between them runs, with its effects.

    The code of a class or a framework agent continues from its state, so it only runs if all
    outcomes of the last pause are recorded. Otherwise the format of the state is checked.

    An encrypted file is decrypted with the keys in `MESHPOINT_AGENT__ENCRYPTION_KEYS` or
    `MESHPOINT_MESH__ENCRYPTION_KEYS`.

    Args:
        agent: The agent, or its versions.
        file: The file.

    Raises:
        ReplayDiffers: A replica would park the task, no version would read it, or the code fails
            before it has made all recorded calls.
        ConfigurationError: The file cannot be read or belongs to another agent.
    """
    path = Path(file)
    history = read_history(path, partial(_decrypt, agent.name))
    if history.agent != agent.name:
        problem = f"{path} is the history of a task of {history.agent!r}"
        raise ConfigurationError("history", problem, f"pass that agent instead of {agent.name!r}")
    if history.generation > 0 and history.stored_format not in readable_formats(agent):
        raise ReplayDiffers(
            f"no version of {agent.name!r} reads {history.stored_format!r}: replicas of an "
            "earlier version must finish the task"
        )
    return await _HistoryRun(select_version(agent, history.stored_format), history).run()


def _decrypt(agent: str, stored: bytes) -> bytes:
    from meshpoint.wiring import environment_sealer, open_file

    return open_file(environment_sealer(), stored, ("export.history", agent))


class _HistoryEnd(BaseException):
    """Stops the agent's code at the end of the record. Agent code must not catch it."""


class _HistoryReplay(Replay):
    """Stops at the last recorded pause if some of its calls have no outcome."""

    def __init__(
        self, agent: str, ctx: TaskExecutionContext, stored: StoredJournal, run: _HistoryRun
    ) -> None:
        super().__init__(agent, ctx, stored)
        self._history_run = run

    def ask(
        self, calls: Sequence[UnsentCall[Any]], join: Join, *, from_run: bool = False
    ) -> list[Any]:
        """Return the recorded outcomes of `calls`.

        Raises:
            _HistoryEnd: Some calls have no outcome yet.
        """
        is_last = self.replaying and self._is_last
        outcomes = super().ask(calls, join, from_run=from_run)
        run = self._history_run
        run.passed = self.passed
        if is_last and not run.history.is_complete:
            names = " and ".join(dict.fromkeys(repr(display_name(call.peer)) for call in calls))
            run.end(f"its last pause, which waits for {names}")
        return outcomes

    def has_pause_in(self, subtask: str) -> bool:
        """Whether a pause that has not been replayed yet was made in `subtask`."""
        numbers = range(self.passed, self._stored.pauses)
        return any(self._stored.entry(number).subtask == subtask for number in numbers)

    @property
    def _is_last(self) -> bool:
        return self.passed + 1 == self._stored.pauses

    def _describe_difference(
        self, recorded: JournalEntry, current: JournalEntry, calls: Sequence[UnsentCall[Any]]
    ) -> str:
        peers = [call.peer for call in recorded.calls]
        if self._is_last and peers == [call.peer for call in calls]:
            known = self._history_run.history.calls
            for before, call in zip(known, calls, strict=False):
                if is_wait(call.peer):
                    continue
                if (path := find_difference(before.input, call.input, "input")) is not None:
                    peer = f", {call.peer}" if len(calls) > 1 else ""
                    return f"{peer} ({path})"
        return super()._describe_difference(recorded, current, calls)


class _HistoryStore(InProcessStore):
    """Holds the last checkpoint of the task and its working memory."""

    def __init__(self, history: TaskHistory, clock: FakeClock) -> None:
        super().__init__(clock, timings=StoreTimings())
        self._history = history

    async def latest(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> AgentCheckpoint | None:
        """The recorded checkpoint."""
        return self._history.checkpoint

    async def l1_snapshot(
        self, task_id: TaskId, agent: AgentName | None = None
    ) -> L1Snapshot | None:
        """The recorded working memory."""
        memory = self._history.memory
        return None if memory is None else memory.to_snapshot()

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Renew every lease: no other run owns the task."""
        return []


class _HistoryRun:
    """One run of an agent's code with a recorded history.

    Attributes:
        passed: Number of recorded pauses that the code has made again.
    """

    def __init__(self, agent: DurableAgent[Any, Any], history: TaskHistory) -> None:
        self.history, self.passed = history, 0
        self._agent = self._observed(agent)
        self._journal = history.journal()
        self._stopped_at: str | None = None
        self._replay: _HistoryReplay | None = None

    @property
    def _recorded(self) -> int:
        return self.history.generation if self._journal is None else len(self._journal.entries)

    def end(self, place: str) -> None:
        """Stop the code: the record ends here."""
        self._stopped_at = self._stopped_at or place
        raise _HistoryEnd(place)

    def emit(self, event: Event) -> None:
        """Stop the code before it runs a step or a subtask without a record."""
        if event.phase is not Phase.BEFORE:
            return
        if event.step is Step.STEP:
            self.end(f"step {event.detail['name']!r}, which is not recorded")
        if event.step is Step.SUBTASK:
            name, replay = str(event.detail["subtask"]), self._replay
            if replay is None or not replay.has_pause_in(name):
                self.end(f"subtask {name!r}, which is not recorded")

    async def run(self) -> ReplayReport:
        """Run the code up to the end of the record."""
        history = self.history
        if not history.is_complete and self._journal is None:
            peers = [call for call in history.calls if call.outcome is None]
            names = " and ".join(dict.fromkeys(repr(display_name(call.peer)) for call in peers))
            return self._report(f"its last pause, which waits for {names}")
        clock = FakeClock(history.exported_at)
        runtime = build_runtime(
            self._agent,
            broker=InProcessBroker(InProcessExchange()),
            memory=_HistoryStore(history, clock),
            durable=None,
            lease_store=None,
            clock=clock,
            observer=self,
            options=Options(startup_timeout=timedelta()),
            local=InProcessWorkingMemory(clock),
        )
        run = Run(history.task_id, history.agent, RunId("replay"), 0, history.generation)
        segment = Segment(run=run, requester=Requester())
        try:
            workspace, code = await self._prepare(segment, runtime)
        except IncompatibleState as error:
            raise ReplayDiffers(_describe_mismatch(error)) from error
        try:
            return await self._run_code(workspace, code)
        finally:
            await workspace.cancel_unawaited()
            await workspace.close()

    async def _prepare(
        self, segment: Segment, runtime: ReplicaRuntime
    ) -> tuple[Workspace, Callable[[], Awaitable[Paused | Done[Any]]]]:
        """Restore the task, as a replica does.

        Raises:
            IncompatibleState: This version of the agent cannot continue it.
        """
        history, task = self.history, self._resumable(segment.run)
        segment.log = TaskLog(
            state=task.state,
            agent=LogEntries([b"\0" + each.to_bytes() for each in history.log], _LOG_START),
            notes=tuple(history.memory_writes),
            steps=[StepEntry(each.attempt, each.to_record().to_bytes()) for each in history.steps],
        )
        context, outcomes = restore_context(task, _report_nothing)
        workspace = Workspace(
            segment,
            context,
            runtime,
            partial(_open_nothing, segment.run),
            self._agent,
            history.input,
        )
        await workspace.restore_operation(runtime.in_process, task)
        if history.generation == 0:
            return workspace, partial(self._agent.start, context, copy.deepcopy(history.input))
        return workspace, resume_call(self._agent, context, task, segment.log, outcomes)

    def _resumable(self, run: Run) -> Resumable:
        history, state = self.history, b""
        if self._journal is not None:
            state = self._journal.to_bytes()
        elif history.state is not None:
            state = history.state.to_bytes()
        return Resumable(
            run=run,
            requester=Requester(),
            context=history.context,
            state=state,
            state_format=history.stored_format,
            outcomes=tuple(map(_outcome, history.calls)),
            request=None,
            attempt=1,
            checkpoint=history.operation,
            retry_count=history.attempt,
        )

    async def _run_code(
        self, workspace: Workspace, code: Callable[[], Awaitable[Paused | Done[Any]]]
    ) -> ReplayReport:
        context, history = workspace.context, self.history
        log_context = LogContext(
            history.task_id, history.agent, history.generation, workspace.context_runtime
        )
        tokens = running_context.set(context), current_log_context.set(log_context)
        try:
            with find_nondeterminism() as places:
                problem = await self._find_problem(workspace, code)
        finally:
            running_context.reset(tokens[0])
            current_log_context.reset(tokens[1])
        if problem is not None:
            raise ReplayDiffers("; ".join((problem, *places)))
        return self._report(self._stopped_at or "the end of its code")

    async def _find_problem(
        self, workspace: Workspace, code: Callable[[], Awaitable[Paused | Done[Any]]]
    ) -> str | None:
        """Run the code, and say why it does not continue the task; `None` if it does."""
        failure: BaseException | None = None
        try:
            result = await code()
            if isinstance(result, Paused):
                names = " and ".join(repr(display_name(call.peer)) for call in result.calls)
                self._stopped_at = self._stopped_at or f"a new call to {names}"
        except _HistoryEnd:
            pass
        except (Exception, GeneratorExit) as error:
            failure = error
        mismatch = workspace.find_mismatch()
        if mismatch is None and isinstance(failure, IncompatibleState):
            mismatch = failure
        if mismatch is not None:
            return _describe_mismatch(mismatch)
        if self._stopped_at is not None or failure is None:
            return None
        described = " ".join(describe_exception(failure).split())
        if self.passed < self._recorded and self._journal is not None:
            return f"replay fails after {self.passed} of {self._recorded} pauses: {described}"
        self._stopped_at = f"the end of its code: {described}"
        return None

    def _report(self, stopped_at: str) -> ReplayReport:
        history = self.history
        return ReplayReport(
            history.agent, history.task_id, self._recorded, self.passed, stopped_at
        )

    def _observed(self, agent: DurableAgent[Any, Any]) -> DurableAgent[Any, Any]:
        """A copy of a function agent whose replay ends where the record does."""
        if not isinstance(agent, FunctionAgent):
            return agent
        clone = copy.copy(agent)
        clone._build_replay = self._build_replay
        return clone

    def _build_replay(
        self, agent: str, ctx: TaskExecutionContext, journal: StoredJournal
    ) -> Replay:
        self._replay = _HistoryReplay(agent, ctx, journal, self)
        return self._replay


def _outcome(call: RecordedCall) -> tuple[str, AgentName, Any]:
    return call.id, call.peer, call.read_outcome() or _OPEN


def _describe_mismatch(error: IncompatibleState) -> str:
    reason = getattr(error, "reason", None) or str(error)
    return (
        f"replay differs at {reason}"
        if reason.startswith("call ")
        else f"replay differs: {reason}"
    )


async def _report_nothing(*_: JsonValue) -> None:
    pass


async def _open_nothing(run: Run, _: Operation | None) -> BeginResult:
    return BeginCommitted(run)
