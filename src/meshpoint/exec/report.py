"""Track the steps of one attempt, which are the agent's subtasks, from its events."""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from meshpoint.agents.replay import PauseSignal
from meshpoint.errors import AgentFailed
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.secrets import mask_secrets

log = logging.getLogger("meshpoint.run")

_PAUSE, _CANCEL = PauseSignal.__name__, CancelledError.__name__


class StepStatus(StrEnum):
    """The status of a step. `RUNNING`, `PAUSED` and `EXECUTED` occur only during the attempt."""

    NOT_RUN = "not run"
    RUNNING = "running"
    PAUSED = "waiting for peers"
    EXECUTED = "ran"  # but its result is not recorded yet
    COMPLETED = "completed"
    REUSED = "reused"  # it did not run: the recorded result was used
    FAILED = "failed"


class StepReport(BaseModel, extra="forbid", frozen=True):
    """One step for people and scripts. `why` explains why it ran again or failed."""

    name: str
    status: StepStatus
    seconds: float | None = None
    why: str | None = None


@dataclass(slots=True)
class StepProgress:
    """One step in progress.

    `seconds` is how long a completed step took, including pauses; for a reused step, when it was
    recorded.
    """

    name: str
    status: StepStatus = StepStatus.NOT_RUN
    seconds: float | None = None
    reason: str | None = None
    started_at: float | None = None


class StepLog:
    """The `Observer` of one attempt: tracks the steps of one task.

    `rerun_reasons` explains, by step, why it must run again. `on_change` is called with each step
    whose status changed.
    """

    def __init__(
        self,
        agent: AgentName,
        task_id: TaskId,
        *,
        planned: Sequence[str],
        rerun_reasons: Mapping[str, str],
        secret_keys: Sequence[str],
        on_change: Callable[[StepLog, StepProgress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent, self._task_id = agent, task_id
        self._planned, self._rerun_reasons = planned, dict(rerun_reasons)
        self._secret_keys, self._on_change, self._clock = secret_keys, on_change, clock
        self.steps = {name: StepProgress(name) for name in planned}
        self.unserved_agents: dict[str, None] = {}
        """Called agents without a replica, in order."""

    def add_previous(self, steps: Iterable[str]) -> None:
        """Include the steps of previous attempts."""
        for name in steps:
            self.steps.setdefault(name, StepProgress(name))

    def reuse_all(self) -> None:
        """Mark all steps as reused: the operation had completed before this attempt."""
        for step in self.steps.values():
            step.status, step.reason = StepStatus.REUSED, "the operation had already completed"

    @property
    def completed_count(self) -> int:
        """Number of steps that have a result."""
        return sum(
            step.status in {StepStatus.COMPLETED, StepStatus.REUSED}
            for step in self.steps.values()
        )

    def emit(self, event: Event) -> None:
        """Update the steps of the tracked task."""
        if event.step is Step.UNDELIVERABLE:
            self.unserved_agents[str(event.detail["peer"])] = None
        if event.step is Step.TASK_FAILED:
            _log_unexpected_error(event)
        name = event.detail.get("subtask")
        is_tracked = event.agent == self._agent and self._task_id in event.task_ids
        if is_tracked and isinstance(name, str):
            step = self.steps.setdefault(name, StepProgress(name))
            previous_status = step.status
            self._apply_event(step, event)
            if step.status is not previous_status:
                self._on_change(self, step)

    def _apply_event(self, step: StepProgress, event: Event) -> None:
        match event.step, event.phase:
            case Step.SUBTASK, Phase.BEFORE:
                step.started_at = self._clock() if step.started_at is None else step.started_at
                step.status, step.reason = StepStatus.RUNNING, self._rerun_reasons.get(step.name)
            case Step.SUBTASK, Phase.AFTER:
                step.status = StepStatus.EXECUTED
            case Step.SUBTASK, Phase.FAILED:
                self._apply_failure(step, event)
            case Step.SAVE, Phase.AFTER if step.status is StepStatus.EXECUTED:
                step.status, step.seconds = StepStatus.COMPLETED, self._elapsed(step)
            case Step.SUBTASK_REUSED, Phase.INFO if step.status is not StepStatus.COMPLETED:
                seconds = event.detail.get("seconds")
                step.seconds = float(seconds) if isinstance(seconds, int | float) else None
                step.status = StepStatus.REUSED
            case Step.SUBTASK_RERUN, Phase.INFO:
                self._rerun_reasons[step.name] = str(event.detail.get("why", ""))

    def _apply_failure(self, step: StepProgress, event: Event) -> None:
        error_type = event.detail.get("error_type")
        if error_type == _PAUSE:
            step.status = StepStatus.PAUSED
        elif error_type != _CANCEL:  # a cancelled step fails with the task
            self._set_failed(step, str(event.detail.get("error", "")))

    def _set_failed(self, step: StepProgress, reason: str) -> None:
        step.status, step.seconds, step.reason = (
            StepStatus.FAILED,
            self._elapsed(step),
            mask_secrets(reason, self._secret_keys),
        )

    def _elapsed(self, step: StepProgress) -> float | None:
        return None if step.started_at is None else round(self._clock() - step.started_at, 3)

    def finish(self, outcome: Outcome | None) -> list[StepReport]:
        """Return the steps at the end of the attempt; `outcome` is `None` if interrupted."""
        reason = outcome.message if isinstance(outcome, Failed) else "interrupted"
        for step in self.steps.values():
            if step.status in {StepStatus.RUNNING, StepStatus.PAUSED, StepStatus.EXECUTED}:
                self._set_failed(step, reason)
                self._on_change(self, step)
        unstarted = [] if isinstance(outcome, Ok) else list(self.steps)
        return [
            StepReport(name=step.name, status=step.status, seconds=step.seconds, why=step.reason)
            for step in self.steps.values()
            if step.status is not StepStatus.NOT_RUN or step.name in {*self._planned, *unstarted}
        ]


def _log_unexpected_error(event: Event) -> None:
    """Log the traceback of a task whose code raised anything but an `AgentFailed`."""
    traceback, raised = event.detail.get("traceback"), event.detail.get("error_type")
    expected = {kind.__name__ for kind in _with_subclasses(AgentFailed)}
    if traceback is not None and event.detail["kind"] == "error" and raised not in expected:
        log.warning("task %s: agent code raised\n%s", event.task_ids[0], traceback)


def _with_subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)
