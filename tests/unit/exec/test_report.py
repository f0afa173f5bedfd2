"""What `exec` reports about steps, from the events of one attempt."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.exec.report import StepLog, StepProgress, StepState
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

FLOW, TASK = AgentName("flow"), TaskId("op-1")
BROKE = Failed(FailureKind.ERROR, "it broke")


class Stage:
    """Feeds the events of an attempt to a step log; each takes a second."""

    def __init__(self, planned: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.told: list[tuple[str, StepState]] = []
        self.now = 0.0
        self.log = StepLog(planned, (), self._tell, clock=lambda: self.now)
        self.log.track(FLOW, TASK, previous_steps=["old"], rerun_reasons={"b": "its output is not in the file"})

    def _tell(self, log: StepLog, step: StepProgress) -> None:
        self.told.append((step.name, step.state))

    def play(
        self, step: Step, phase: Phase, name: str, *, agent: str = FLOW, task: str = TASK, **detail: Any
    ) -> None:
        self.now += 1
        detail = {"subtask": name, **detail}
        self.log.emit(Event(step, phase, AgentName(agent), ReplicaId("r"), (TaskId(task),), detail))

    def runs(self, name: str) -> None:
        self.play(Step.SUBTASK, Phase.BEFORE, name)

    def completes(self, name: str) -> None:
        self.play(Step.SUBTASK, Phase.AFTER, name)
        self.play(Step.SAVE, Phase.AFTER, name)

    def ended(self, outcome: Outcome | None) -> dict[str, tuple[str, float | None, str | None]]:
        return {step.name: (step.status.value, step.seconds, step.why) for step in self.log.finish(outcome)}


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_step_is_completed_when_it_is_recorded(stage: Stage) -> None:
    stage.runs("a")
    stage.play(Step.SAVE, Phase.AFTER, "a")  # progress saved within the step
    assert stage.log.completed_count == 0
    stage.play(Step.SUBTASK, Phase.AFTER, "a")
    assert stage.log.completed_count == 0
    stage.play(Step.SAVE, Phase.AFTER, "a")
    assert stage.log.completed_count == 1
    assert stage.ended(Ok(1)) == {
        "a": ("completed", 3, None),
        "b": ("not run", None, None),
        "c": ("not run", None, None),
    }


def test_a_result_that_cannot_be_recorded_fails_its_step(stage: Stage) -> None:
    stage.runs("a")
    stage.play(Step.SUBTASK, Phase.AFTER, "a")
    assert stage.ended(BROKE)["a"] == ("failed", 1, "it broke")
    assert stage.told[-1] == ("a", StepState.FAILED)


def test_why_a_step_runs_again(stage: Stage) -> None:
    stage.play(Step.SUBTASK_AGAIN, Phase.NOTED, "a", why="its function has changed")
    for name in ("a", "b"):
        stage.runs(name)
        stage.completes(name)
    told = stage.ended(Ok(1))
    assert told["a"] == ("completed", 2, "its function has changed")
    assert told["b"][2] == "its output is not in the file"


def test_a_step_that_waits_for_peers_is_one_run_and_keeps_its_status_in_replays(stage: Stage) -> None:
    stage.runs("a")
    stage.completes("a")
    stage.runs("b")
    stage.play(Step.SUBTASK, Phase.FAILED, "b", error="PauseSignal: ")
    stage.play(Step.SUBTASK_REUSED, Phase.NOTED, "a", seconds=0.1)
    stage.runs("b")
    stage.completes("b")
    told = stage.ended(Ok(1))
    assert (told["a"][0], told["b"][:2]) == ("completed", ("completed", 5))


def test_a_step_is_no_longer_waiting_at_the_end(stage: Stage) -> None:
    stage.runs("b")
    stage.play(Step.SUBTASK, Phase.FAILED, "b", error="PauseSignal: ")
    stage.runs("c")
    stage.play(Step.SUBTASK, Phase.FAILED, "c", error="CancelledError: cancelled")
    told = stage.ended(Failed(FailureKind.CANCELLED, "cancelled on request"))
    assert (told["b"][0], told["b"][2]) == ("failed", "cancelled on request")
    assert (told["c"][0], told["c"][2]) == ("failed", "cancelled on request")


def test_a_failed_step_says_why_without_secrets_and_may_recover(stage: Stage) -> None:
    stage.runs("a")
    stage.play(Step.SUBTASK, Phase.FAILED, "a", error="ValueError: password=hunter2")
    assert stage.ended(BROKE)["a"] == ("failed", 1, "ValueError: password=***")
    stage.runs("a")
    stage.completes("a")
    assert stage.ended(Ok(1))["a"] == ("completed", 4, None)


def test_reused_steps_tell_how_long_they_once_took(stage: Stage) -> None:
    stage.play(Step.SUBTASK_REUSED, Phase.NOTED, "a", seconds=12.5)
    assert stage.ended(Ok(1))["a"] == ("reused", 12.5, None)


def test_steps_of_before_are_told_unless_the_flow_completed_without_them(stage: Stage) -> None:
    assert list(stage.ended(BROKE)) == ["a", "b", "c", "old"]
    assert list(stage.ended(Ok(1))) == ["a", "b", "c"]


def test_other_tasks_are_not_heard(stage: Stage) -> None:
    stage.play(Step.SUBTASK, Phase.BEFORE, "x", agent="peer")
    stage.play(Step.SUBTASK, Phase.BEFORE, "x", task="op-2")
    stage.play(Step.END, Phase.BEFORE, "a", task="op-2")
    assert stage.told == []
