"""What becomes of an agent's steps, which are its subtasks, heard from the events of one attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.secrets import masked

_PAUSED = "PauseSignal:"
_STOPPED = "CancelledError:"


class StepStatus(StrEnum):
    """How a step ended."""

    COMPLETED = "completed"
    REUSED = "reused"  # its recorded result served, it did not run
    FAILED = "failed"
    NOT_RUN = "not run"


class StepReport(BaseModel):
    """One step, for people and scripts. `why`: why it ran again, or failed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: StepStatus
    seconds: float | None = None
    why: str | None = None


class Moment(StrEnum):
    """Where a step is while the attempt goes on."""

    AHEAD = "ahead"
    RUNNING = "running"
    PAUSED = "waits for its peers"
    RAN = "ran"  # its result is not recorded yet
    COMPLETED = "completed"
    REUSED = "reused"
    FAILED = "failed"


@dataclass(slots=True)
class LiveStep:
    """One step on its way. `seconds`: of a completed one, with its waiting; of a reused one, of when it ran."""

    name: str
    moment: Moment = Moment.AHEAD
    seconds: float | None = None
    why: str | None = None
    began: float | None = None


class StepLog:
    """The `Observer` of one attempt. `told` hears of each step that changed."""

    def __init__(
        self,
        planned: Sequence[str],
        secret_keys: Sequence[str],
        told: Callable[[StepLog, LiveStep], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planned, self._secret_keys, self._told, self._clock = planned, secret_keys, told, clock
        self._again: dict[str, str] = {}
        self._task: tuple[AgentName, TaskId] | None = None
        self.steps = {name: LiveStep(name) for name in planned}

    def follow(
        self,
        agent: AgentName,
        task_id: TaskId,
        *,
        earlier: Iterable[str] = (),
        again: Mapping[str, str] | None = None,
    ) -> None:
        """Listen to this task. `earlier` are the steps of its last attempt, `again` says why some run again."""
        self._task = agent, task_id
        self._again.update(again or {})
        for name in earlier:
            self.steps.setdefault(name, LiveStep(name))

    def had_completed(self) -> None:
        """The operation had its result before this attempt began: nothing runs."""
        for step in self.steps.values():
            step.moment, step.why = Moment.REUSED, "the operation had completed already"

    @property
    def done(self) -> int:
        """How many steps have their result."""
        return sum(step.moment in {Moment.COMPLETED, Moment.REUSED} for step in self.steps.values())

    def emit(self, event: Event) -> None:
        """Take note of what happens to the followed task's steps."""
        name = event.detail.get("subtask")
        if self._task is None or event.agent != self._task[0] or self._task[1] not in event.task_ids:
            return
        if isinstance(name, str):
            step = self.steps.setdefault(name, LiveStep(name))
            before = step.moment
            self._note(step, event)
            if step.moment is not before:
                self._told(self, step)

    def _note(self, step: LiveStep, event: Event) -> None:
        match event.step, event.phase:
            case Step.SUBTASK, Phase.BEFORE:
                step.began = self._clock() if step.began is None else step.began
                step.moment, step.why = Moment.RUNNING, self._again.get(step.name)
            case Step.SUBTASK, Phase.AFTER:
                step.moment = Moment.RAN
            case Step.SUBTASK, Phase.FAILED:
                self._note_failure(step, str(event.detail.get("error", "")))
            case Step.SAVE, Phase.AFTER if step.moment is Moment.RAN:
                step.moment, step.seconds = Moment.COMPLETED, self._since(step)
            case Step.SUBTASK_REUSED, Phase.NOTED if step.moment is not Moment.COMPLETED:
                seconds = event.detail.get("seconds")
                step.seconds = float(seconds) if isinstance(seconds, int | float) else None
                step.moment = Moment.REUSED
            case Step.SUBTASK_AGAIN, Phase.NOTED:
                self._again[step.name] = str(event.detail.get("why", ""))

    def _note_failure(self, step: LiveStep, error: str) -> None:
        if error.startswith(_PAUSED):
            step.moment = Moment.PAUSED
        elif not error.startswith(_STOPPED):  # a stopped one fails with the task
            self._fail(step, error)

    def _fail(self, step: LiveStep, why: str) -> None:
        step.moment, step.seconds, step.why = Moment.FAILED, self._since(step), masked(why, self._secret_keys)

    def _since(self, step: LiveStep) -> float | None:
        return None if step.began is None else round(self._clock() - step.began, 3)

    def ended(self, outcome: Outcome | None) -> list[StepReport]:
        """The steps when the attempt has come to `outcome`, or to none."""
        why = outcome.message if isinstance(outcome, Failed) else "interrupted"
        for step in self.steps.values():
            if step.moment in {Moment.RUNNING, Moment.PAUSED, Moment.RAN}:
                self._fail(step, why)
                self._told(self, step)
        ahead = [] if isinstance(outcome, Ok) else list(self.steps)
        return [
            StepReport(name=step.name, status=_STATUS[step.moment], seconds=step.seconds, why=step.why)
            for step in self.steps.values()
            if step.moment is not Moment.AHEAD or step.name in {*self._planned, *ahead}
        ]


_STATUS = {
    Moment.AHEAD: StepStatus.NOT_RUN,
    Moment.COMPLETED: StepStatus.COMPLETED,
    Moment.REUSED: StepStatus.REUSED,
    Moment.FAILED: StepStatus.FAILED,
}
