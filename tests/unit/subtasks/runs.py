"""The life of a task at the level of the runner: runs and attempts on one in-memory ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SubtaskRecord
from meshpoint.model.tasks import Run
from meshpoint.ports.agent import Plan
from meshpoint.ports.observer import Steps
from meshpoint.subtasks.runner import OperationAttempt, Subtasks

TASK, AGENT = TaskId("task"), AgentName("analyst")


class FakeCallRecorder:
    """A function agent's recorder that lists the subtasks that were skipped."""

    replaying = False
    is_own_task = True
    is_pausing = False
    has_waited = False
    position = passed = attempt = 0
    recorded_now = None

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def ask(self, calls: Any, join: Any, *, from_run: bool = False) -> Any:
        raise AssertionError("these tests make no peer calls")

    def skip_subtask(self, subtask: str) -> None:
        self.skipped.append(subtask)


class FakeSubtaskLog:
    """A ledger that calls `before_save` before each write, or raises `stop` instead of writing.

    It checks that the changed records are enough to restore each checkpoint.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.saved: list[AgentCheckpoint] = []
        self.progressed: list[bool] = []
        self.before_save: Callable[[str], Any] | None = None
        self.stop: BaseException | None = None
        self._versions: dict[str, list[tuple[int, SubtaskRecord]]] = {}

    @property
    def is_stopping(self) -> bool:
        return self.stop is not None

    async def open_operation(self, operation: Operation) -> None:
        self._raise_if_stopped()
        self.operations.append(operation)

    async def save_checkpoint(
        self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool
    ) -> None:
        if self.before_save is not None:
            await self.before_save(subtask)
        self._raise_if_stopped()
        self.check_changes(checkpoint)
        self.saved.append(checkpoint)
        self.progressed.append(progressed)

    def restart_from(self, checkpoint: AgentCheckpoint | None) -> None:
        """Note which records a new run finds."""
        records = () if checkpoint is None else checkpoint.subtasks
        self._versions = {record.name: [(0, record)] for record in records}

    def check_changes(self, checkpoint: AgentCheckpoint) -> None:
        """Add the changed records to the stored ones, and compare the result."""
        first, changed = checkpoint.records_from, checkpoint.changed
        for record in checkpoint.subtasks:
            if changed is None or record.name in changed:
                self._versions.setdefault(record.name, []).append((checkpoint.seq, record))
        starts = first in {None, checkpoint.seq}
        newest = {
            name: versions[-1][1]
            for name, versions in self._versions.items()
            if not starts or versions[-1][0] == checkpoint.seq
        }
        assert newest == {record.name: record for record in checkpoint.subtasks}

    def _raise_if_stopped(self) -> None:
        if self.stop is not None:
            raise self.stop


class AttemptHarness:
    """The runs of one task. The first run starts at once.

    `rerun` starts another run of the same attempt, from the last saved checkpoint. `resume` starts
    a new attempt, from the failed attempt's final checkpoint.
    """

    def __init__(self, plan: Plan | None = None, *, handlers: bool = False) -> None:
        self.subtask_log, self.events = FakeSubtaskLog(), list[Event]()
        self._plan, self._handlers = plan or Plan(version="1"), handlers
        self.retry = self.generation = 0
        self.recorder = FakeCallRecorder()
        self.begin(None)

    @property
    def ctx(self) -> TaskExecutionContext:
        return self.context

    def begin(self, restored: AgentCheckpoint | None) -> TaskExecutionContext:
        """Start a new run from the top with the checkpoint `restored`."""
        self.events.clear()
        self.subtask_log.restart_from(restored)
        self.context = TaskExecutionContext(TASK)
        if not self._handlers:
            self.recorder = FakeCallRecorder()
            self.context._runtime.recorder = self.recorder
        run = Run(TASK, AGENT, RunId("run"), fence=1, generation=self.generation)
        self.runner = Subtasks(
            self.context,
            self.context._runtime,
            self._plan,
            OperationAttempt(run, self.retry, restored.seq if restored else 0, {"input": 1}),
            restored,
            self.subtask_log,
            Steps(self, AGENT, ReplicaId("replica")),
            lambda: datetime(2026, 1, 1, tzinfo=UTC),
            is_operation=bool(self.subtask_log.operations),
        )
        self.context._runtime.tools = self
        return self.context

    def use_subtasks(self) -> Subtasks:
        return self.runner

    place = (0, 0)

    def now(self, pauses: int) -> Any:
        raise AssertionError("these tests do not ask for the time")

    def use_steps(self) -> Any:
        raise AssertionError("these tests use no steps")

    def use_memory(self) -> None:
        raise AssertionError("these tests use no memory")

    async def set_value(self, key: str, value: bytes) -> None:
        raise AssertionError("these tests set no values")

    def rerun(self, *, paused: bool = False) -> TaskExecutionContext:
        """The next run of this attempt, after a crash or after a pause."""
        self.generation += paused
        return self.begin(self.subtask_log.saved[-1] if self.subtask_log.saved else None)

    def resume(self, plan: Plan | None = None) -> TaskExecutionContext:
        """The next attempt, after this one failed. It starts with the tokens of this one."""
        final_checkpoint = self.runner.final_checkpoint("it failed", None)
        self.subtask_log.check_changes(final_checkpoint)
        usage = self.ctx.token_usage.snapshot()
        self.retry, self.generation = self.retry + 1, 0
        self._plan = plan or self._plan
        ctx = self.begin(final_checkpoint)
        ctx.token_usage.add(usage)
        return ctx

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def reasons(self, step: Step) -> dict[str, Any]:
        """The reason in the latest event of this kind for each subtask. Clears all events."""
        reason_by_subtask = {
            str(event.detail["subtask"]): event.detail.get("why")
            for event in self.events
            if event.step is step
        }
        self.events.clear()
        return reason_by_subtask

    def record(self, name: str, checkpoint: AgentCheckpoint | None = None) -> SubtaskRecord:
        """The record of a subtask in the last saved checkpoint."""
        (record,) = [
            candidate
            for candidate in (checkpoint or self.subtask_log.saved[-1]).subtasks
            if candidate.name == name
        ]
        return record

    def statuses(self, checkpoint: AgentCheckpoint | None = None) -> dict[str, str]:
        """The status of each subtask, in order."""
        return {
            record.name: record.status.value
            for record in (checkpoint or self.subtask_log.saved[-1]).subtasks
        }


async def was_cancelled(task: asyncio.Task[Any]) -> bool:
    """Whether `task` was cancelled; waits until it is done."""
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()
