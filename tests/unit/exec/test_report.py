"""What `exec` reports about steps, from the events of one attempt."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.exec.report import StepLog, StepProgress, StepStatus
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

FLOW, TASK = AgentName("flow"), TaskId("op-1")
FAILURE = Failed(FailureKind.ERROR, "it broke")


class StepLogDriver:
    """Feeds the events of an attempt to a step log; each takes a second."""

    def __init__(self, planned: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.reports: list[tuple[str, StepStatus]] = []
        self.now = 0.0
        self.log = StepLog(
            FLOW,
            TASK,
            planned=planned,
            rerun_reasons={"b": "its output is not in the file"},
            secret_keys=(),
            on_change=self._record,
            clock=lambda: self.now,
        )
        self.log.add_previous(["old"])

    def _record(self, log: StepLog, step: StepProgress) -> None:
        self.reports.append((step.name, step.status))

    def emit(
        self,
        step: Step,
        phase: Phase,
        name: str,
        *,
        agent: str = FLOW,
        task: str = TASK,
        **detail: Any,
    ) -> None:
        self.now += 1
        detail = {"subtask": name, **detail}
        self.log.emit(
            Event(step, phase, AgentName(agent), ReplicaId("r"), (TaskId(task),), detail)
        )

    def start(self, name: str) -> None:
        self.emit(Step.SUBTASK, Phase.BEFORE, name)

    def complete(self, name: str) -> None:
        self.emit(Step.SUBTASK, Phase.AFTER, name)
        self.emit(Step.SAVE, Phase.AFTER, name)

    def finish(self, outcome: Outcome | None) -> dict[str, tuple[str, float | None, str | None]]:
        return {
            step.name: (step.status.value, step.seconds, step.why)
            for step in self.log.finish(outcome)
        }


@pytest.fixture
def driver() -> StepLogDriver:
    return StepLogDriver()


def test_a_step_is_completed_when_it_is_recorded(driver: StepLogDriver) -> None:
    driver.start("a")
    driver.emit(Step.SAVE, Phase.AFTER, "a")  # progress saved within the step
    assert driver.log.completed_count == 0
    driver.emit(Step.SUBTASK, Phase.AFTER, "a")
    assert driver.log.completed_count == 0
    driver.emit(Step.SAVE, Phase.AFTER, "a")
    assert driver.log.completed_count == 1
    assert driver.finish(Ok(1)) == {
        "a": ("completed", 3, None),
        "b": ("not run", None, None),
        "c": ("not run", None, None),
    }


def test_a_result_that_cannot_be_recorded_fails_its_step(driver: StepLogDriver) -> None:
    driver.start("a")
    driver.emit(Step.SUBTASK, Phase.AFTER, "a")
    assert driver.finish(FAILURE)["a"] == ("failed", 1, "it broke")
    assert driver.reports[-1] == ("a", StepStatus.FAILED)


def test_a_rerun_step_reports_the_reason(driver: StepLogDriver) -> None:
    driver.emit(Step.SUBTASK_RERUN, Phase.INFO, "a", why="its function has changed")
    for name in ("a", "b"):
        driver.start(name)
        driver.complete(name)
    statuses = driver.finish(Ok(1))
    assert statuses["a"] == ("completed", 2, "its function has changed")
    assert statuses["b"][2] == "its output is not in the file"


def test_a_step_that_waits_for_peers_counts_as_one_run_in_replays(driver: StepLogDriver) -> None:
    driver.start("a")
    driver.complete("a")
    driver.start("b")
    driver.emit(Step.SUBTASK, Phase.FAILED, "b", error="PauseSignal: ", error_type="PauseSignal")
    driver.emit(Step.SUBTASK_REUSED, Phase.INFO, "a", seconds=0.1)
    driver.start("b")
    driver.complete("b")
    statuses = driver.finish(Ok(1))
    assert (statuses["a"][0], statuses["b"][:2]) == ("completed", ("completed", 5))


def test_a_cancelled_step_is_no_longer_waiting(driver: StepLogDriver) -> None:
    driver.start("b")
    driver.emit(Step.SUBTASK, Phase.FAILED, "b", error="PauseSignal: ", error_type="PauseSignal")
    driver.start("c")
    driver.emit(
        Step.SUBTASK,
        Phase.FAILED,
        "c",
        error="CancelledError: cancelled",
        error_type="CancelledError",
    )
    statuses = driver.finish(Failed(FailureKind.CANCELLED, "cancelled on request"))
    assert (statuses["b"][0], statuses["b"][2]) == ("failed", "cancelled on request")
    assert (statuses["c"][0], statuses["c"][2]) == ("failed", "cancelled on request")


def test_a_failed_step_reports_a_masked_reason_and_can_recover(driver: StepLogDriver) -> None:
    driver.start("a")
    driver.emit(
        Step.SUBTASK,
        Phase.FAILED,
        "a",
        error="ValueError: password=hunter2",
        error_type="ValueError",
    )
    assert driver.finish(FAILURE)["a"] == ("failed", 1, "ValueError: password=***")
    driver.start("a")
    driver.complete("a")
    assert driver.finish(Ok(1))["a"] == ("completed", 4, None)


def test_reused_steps_report_their_original_duration(driver: StepLogDriver) -> None:
    driver.emit(Step.SUBTASK_REUSED, Phase.INFO, "a", seconds=12.5)
    assert driver.finish(Ok(1))["a"] == ("reused", 12.5, None)


def test_earlier_steps_are_reported_unless_the_flow_completed_without_them(
    driver: StepLogDriver,
) -> None:
    assert list(driver.finish(FAILURE)) == ["a", "b", "c", "old"]
    assert list(driver.finish(Ok(1))) == ["a", "b", "c"]


def test_events_of_other_tasks_are_ignored(driver: StepLogDriver) -> None:
    driver.emit(Step.SUBTASK, Phase.BEFORE, "x", agent="peer")
    driver.emit(Step.SUBTASK, Phase.BEFORE, "x", task="op-2")
    driver.emit(Step.END, Phase.BEFORE, "a", task="op-2")
    assert driver.reports == []


@pytest.mark.parametrize(
    ("error_type", "kind", "is_logged"),
    [
        ("ValueError", "error", True),
        ("AgentFailed", "error", False),
        ("PeerFailed", "error", False),
        ("CancelledError", "cancelled", False),
    ],
)
def test_only_an_unexpected_error_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture, error_type: str, kind: str, is_logged: bool
) -> None:
    driver = StepLogDriver()
    detail = {"kind": kind, "error_type": error_type, "traceback": "Traceback:\nodd"}
    driver.emit(Step.TASK_FAILED, Phase.INFO, "a", **detail)
    assert ("Traceback:\nodd" in caplog.text) is is_logged


def test_a_failure_without_an_exception_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    StepLogDriver().emit(Step.TASK_FAILED, Phase.INFO, "a", kind="timeout", reason="late")
    assert caplog.text == ""
