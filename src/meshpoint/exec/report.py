"""Track the steps of one attempt, which are the agent's subtasks, from its events."""

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

_PAUSE_PREFIX = "PauseSignal:"
_CANCEL_PREFIX = "CancelledError:"


class StepStatus(StrEnum):
    """The final status of a step."""

    COMPLETED = "completed"
    REUSED = "reused"  # it did not run: the recorded result was used
    FAILED = "failed"
    NOT_RUN = "not run"


class StepReport(BaseModel):
    """One step for people and scripts. `why` explains why it ran again or failed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: StepStatus
    seconds: float | None = None
    why: str | None = None


class StepState(StrEnum):
    """The state of a step during the attempt."""

    PENDING = "ahead"
    RUNNING = "running"
    PAUSED = "waiting for peers"
    EXECUTED = "ran"  # but its result is not recorded yet
    COMPLETED = "completed"
    REUSED = "reused"
    FAILED = "failed"


@dataclass(slots=True)
class StepProgress:
    """One step in progress.

    `seconds` is how long a completed step took, including pauses; for a reused step, when it was
    recorded.
    """

    name: str
    state: StepState = StepState.PENDING
    seconds: float | None = None
    reason: str | None = None
    started_at: float | None = None


class StepLog:
    """The `Observer` of one attempt. `on_change` is called with each step whose state changed."""

    def __init__(
        self,
        planned: Sequence[str],
        secret_keys: Sequence[str],
        on_change: Callable[[StepLog, StepProgress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planned, self._secret_keys, self._on_change, self._clock = planned, secret_keys, on_change, clock
        self._rerun_reasons: dict[str, str] = {}
        self._task: tuple[AgentName, TaskId] | None = None
        self.steps = {name: StepProgress(name) for name in planned}

    def track(
        self,
        agent: AgentName,
        task_id: TaskId,
        *,
        previous_steps: Iterable[str] = (),
        rerun_reasons: Mapping[str, str] | None = None,
    ) -> None:
        """Report on this task.

        Args:
            agent: Agent of the task.
            task_id: Id of the task.
            previous_steps: Names of the steps of its previous attempts.
            rerun_reasons: By step, why it must run again.
        """
        self._task = agent, task_id
        self._rerun_reasons.update(rerun_reasons or {})
        for name in previous_steps:
            self.steps.setdefault(name, StepProgress(name))

    def reuse_all(self) -> None:
        """Mark all steps as reused: the operation had completed before this attempt."""
        for step in self.steps.values():
            step.state, step.reason = StepState.REUSED, "the operation had already completed"

    @property
    def completed_count(self) -> int:
        """Number of steps that have a result."""
        return sum(step.state in {StepState.COMPLETED, StepState.REUSED} for step in self.steps.values())

    def emit(self, event: Event) -> None:
        """Update the steps of the tracked task."""
        name = event.detail.get("subtask")
        if self._task is None or event.agent != self._task[0] or self._task[1] not in event.task_ids:
            return
        if isinstance(name, str):
            step = self.steps.setdefault(name, StepProgress(name))
            previous_state = step.state
            self._apply_event(step, event)
            if step.state is not previous_state:
                self._on_change(self, step)

    def _apply_event(self, step: StepProgress, event: Event) -> None:
        match event.step, event.phase:
            case Step.SUBTASK, Phase.BEFORE:
                step.started_at = self._clock() if step.started_at is None else step.started_at
                step.state, step.reason = StepState.RUNNING, self._rerun_reasons.get(step.name)
            case Step.SUBTASK, Phase.AFTER:
                step.state = StepState.EXECUTED
            case Step.SUBTASK, Phase.FAILED:
                self._apply_failure(step, str(event.detail.get("error", "")))
            case Step.SAVE, Phase.AFTER if step.state is StepState.EXECUTED:
                step.state, step.seconds = StepState.COMPLETED, self._elapsed(step)
            case Step.SUBTASK_REUSED, Phase.NOTED if step.state is not StepState.COMPLETED:
                seconds = event.detail.get("seconds")
                step.seconds = float(seconds) if isinstance(seconds, int | float) else None
                step.state = StepState.REUSED
            case Step.SUBTASK_AGAIN, Phase.NOTED:
                self._rerun_reasons[step.name] = str(event.detail.get("why", ""))

    def _apply_failure(self, step: StepProgress, error: str) -> None:
        if error.startswith(_PAUSE_PREFIX):
            step.state = StepState.PAUSED
        elif not error.startswith(_CANCEL_PREFIX):  # a cancelled step fails with the task
            self._set_failed(step, error)

    def _set_failed(self, step: StepProgress, reason: str) -> None:
        step.state, step.seconds, step.reason = (
            StepState.FAILED,
            self._elapsed(step),
            masked(reason, self._secret_keys),
        )

    def _elapsed(self, step: StepProgress) -> float | None:
        return None if step.started_at is None else round(self._clock() - step.started_at, 3)

    def finish(self, outcome: Outcome | None) -> list[StepReport]:
        """Return the steps at the end of the attempt; `outcome` is `None` if interrupted."""
        reason = outcome.message if isinstance(outcome, Failed) else "interrupted"
        for step in self.steps.values():
            if step.state in {StepState.RUNNING, StepState.PAUSED, StepState.EXECUTED}:
                self._set_failed(step, reason)
                self._on_change(self, step)
        unstarted = [] if isinstance(outcome, Ok) else list(self.steps)
        return [
            StepReport(name=step.name, status=_STATUS_BY_STATE[step.state], seconds=step.seconds, why=step.reason)
            for step in self.steps.values()
            if step.state is not StepState.PENDING or step.name in {*self._planned, *unstarted}
        ]


_STATUS_BY_STATE = {
    StepState.PENDING: StepStatus.NOT_RUN,
    StepState.COMPLETED: StepStatus.COMPLETED,
    StepState.REUSED: StepStatus.REUSED,
    StepState.FAILED: StepStatus.FAILED,
}
