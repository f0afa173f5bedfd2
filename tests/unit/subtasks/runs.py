"""The life of a task at the level of the runner: runs and attempts on one in-memory ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from meshpoint.model.checkpoint import Run
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SubtaskRecord
from meshpoint.ports.agent import Plan
from meshpoint.ports.observer import Steps
from meshpoint.subtasks.runner import OperationAttempt, Subtasks

TASK, AGENT = TaskId("task"), AgentName("analyst")


class Visits:
    """Names of the code that ran. Callable, so that digests of closures ignore its contents."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        self.names.append(name)

    def since(self) -> list[str]:
        """Names recorded since the previous call."""
        names, self.names = self.names, []
        return names


class Recorder:
    """Stands in for the recorder of a function agent, and lists the subtasks that were skipped."""

    replaying = False

    def __init__(self) -> None:
        self.skipped: list[str] = []

    async def ask(self, calls: Any, join: Any) -> Any:
        raise AssertionError("these tests make no peer calls")

    def skip(self, subtask: str) -> None:
        self.skipped.append(subtask)


class Book:
    """A ledger that calls `before_save` before each write, or raises `stop` instead of writing."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.saved: list[AgentCheckpoint] = []
        self.progressed: list[bool] = []
        self.before_save: Callable[[str], Any] | None = None
        self.stop: BaseException | None = None

    async def open(self, operation: Operation) -> None:
        self._stop()
        self.operations.append(operation)

    async def save(self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool) -> None:
        if self.before_save is not None:
            await self.before_save(subtask)
        self._stop()
        self.saved.append(checkpoint)
        self.progressed.append(progressed)

    def _stop(self) -> None:
        if self.stop is not None:
            raise self.stop


class Life:
    """The runs of one task. The first run starts at once.

    `again` starts another run of the same attempt, from the last saved checkpoint. `resume` starts
    a new attempt, from the failed attempt's final checkpoint.
    """

    def __init__(self, plan: Plan | None = None, *, handlers: bool = False) -> None:
        self.book, self.events = Book(), list[Event]()
        self._plan, self._handlers = plan or Plan(version="1"), handlers
        self.retry = self.generation = 0
        self.recorder = Recorder()
        self.begin(None)

    @property
    def ctx(self) -> TaskExecutionContext:
        return self.context

    def begin(self, restored: AgentCheckpoint | None) -> TaskExecutionContext:
        """Start a new run from the top with the checkpoint `restored`."""
        self.events.clear()
        self.context = TaskExecutionContext(TASK)
        if not self._handlers:
            self.recorder = Recorder()
            self.context.record_with(self.recorder)
        run = Run(TASK, AGENT, RunId("run"), fence=1, generation=self.generation)
        self.runner = Subtasks(
            self.context,
            self._plan,
            OperationAttempt(run, self.retry, restored.seq if restored else 0, {"input": 1}),
            restored,
            self.book,
            Steps(self, AGENT, ReplicaId("replica")),
            lambda: datetime(2026, 1, 1, tzinfo=UTC),
            is_operation=bool(self.book.operations),
        )
        self.context.run_subtasks_with(self.runner)
        return self.context

    def again(self, *, paused: bool = False) -> TaskExecutionContext:
        """The next run of this attempt, after a crash or after a pause."""
        self.generation += paused
        return self.begin(self.book.saved[-1] if self.book.saved else None)

    def resume(self, plan: Plan | None = None) -> TaskExecutionContext:
        """The next attempt, after this one failed."""
        last = self.runner.final_checkpoint("it failed", None)
        self.retry, self.generation = self.retry + 1, 0
        self._plan = plan or self._plan
        return self.begin(last)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def told(self, step: Step) -> dict[str, Any]:
        """The reason in the latest event of this kind for each subtask. Clears all events."""
        told = {str(event.detail["subtask"]): event.detail.get("why") for event in self.events if event.step is step}
        self.events.clear()
        return told

    def record(self, name: str, checkpoint: AgentCheckpoint | None = None) -> SubtaskRecord:
        """The record of a subtask in the last saved checkpoint."""
        (found,) = [each for each in (checkpoint or self.book.saved[-1]).subtasks if each.name == name]
        return found

    def statuses(self, checkpoint: AgentCheckpoint | None = None) -> dict[str, str]:
        """The status of each subtask, in order."""
        return {each.name: each.status.value for each in (checkpoint or self.book.saved[-1]).subtasks}


async def cancelled(task: asyncio.Task[Any]) -> bool:
    """Whether `task` was cancelled; waits until it is done."""
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()
