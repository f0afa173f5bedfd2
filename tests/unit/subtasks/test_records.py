"""What a run keeps of its subtasks, without running any."""

from __future__ import annotations

import pytest

from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus
from meshpoint.subtasks.records import ContextChanges, RunRecords

DONE = SubtaskRecord(
    name="a", status=SubtaskStatus.COMPLETED, function="v:1", inputs={}, result="1"
)
STARTED = SubtaskRecord(name="b", status=SubtaskStatus.STARTED, function="v:1", inputs={})


@pytest.fixture
def records() -> RunRecords:
    return RunRecords(
        AgentCheckpoint(
            operation_id=TaskId("task"),
            agent=AgentName("analyst"),
            seq=1,
            subtasks=(DONE, STARTED),
            saved_progress={"b": "2"},
        )
    )


def test_a_task_without_a_checkpoint_has_no_records() -> None:
    empty = RunRecords(None)
    assert (empty.by_name, empty.saved_progress) == ({}, {})


def test_records_are_stored_apart_once_there_are_any() -> None:
    """Earlier releases read a checkpoint without records, and no other."""
    empty = RunRecords(None)
    without = AgentCheckpoint(operation_id=TaskId("task"), agent=AgentName("analyst"), seq=1)
    assert empty.with_changes(without) == without
    empty.on_stored(without)
    first = without.model_copy(update={"seq": 2, "subtasks": (DONE,)})
    assert empty.with_changes(first).records_from == 2


def test_restored_records_are_in_order_and_not_used_yet(records: RunRecords) -> None:
    assert records.by_name == {"a": DONE, "b": STARTED}
    assert list(records.by_name) == ["a", "b"]
    assert (records.requested, records.used) == (set(), set())


def test_a_subtask_that_runs_again_keeps_its_place(records: RunRecords) -> None:
    records.begin(STARTED.model_copy(update={"name": "a"}))
    assert list(records.by_name) == ["a", "b"]
    assert not records.by_name["a"].completed
    assert records.used == {"a"}


def test_invalidated_records_lose_results_and_saved_progress(records: RunRecords) -> None:
    records.invalidate({"a": "why", "b": "after 'a', which runs again"}, retry=1)
    assert (records.by_name["a"].status, records.by_name["a"].again) == ("outdated", "why")
    assert records.by_name["b"] == STARTED
    assert records.saved_progress == {}


def test_the_state_that_an_earlier_run_saved_is_not_new(records: RunRecords) -> None:
    assert not records.save_progress("b", "2")
    assert records.save_progress("b", "3")
    assert not records.save_progress("b", "2")
    assert records.save_progress("a", "2")


def test_the_changes_of_a_subtask_are_applied_to_another_context() -> None:
    ctx, restored = TaskExecutionContext(TaskId("task")), TaskExecutionContext(TaskId("task"))
    changes = ContextChanges(ctx, ctx._runtime)
    ctx.response_buffer = "before "
    changes.start()
    assert changes.take() is None
    ctx.flags["parsed"] = 3
    ctx.response_buffer += "parsed"
    text = changes.take()
    assert changes.take() is None
    restored.response_buffer = "another "
    ContextChanges(restored, restored._runtime).restore(DONE.model_copy(update={"context": text}))
    assert (restored.flags.to_plain(), restored.response_buffer) == (
        {"parsed": 3},
        "another parsed",
    )
