"""The rules for reuse, as a table and as properties: records and a request in, a verdict out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import Child, SubtaskRecord, SubtaskStatus
from meshpoint.subtasks.validity import (
    CurrentRun,
    FailAgain,
    Park,
    Reuse,
    Run,
    Verdict,
    describe_change,
    describe_difference,
    find_name_problem,
    find_reusable_children,
    invalidate,
    is_valid_name,
    judge,
    run_again,
)

RESULT = '{"a": [1]}'


def a_record(name: str = "b", **fields: Any) -> SubtaskRecord:
    """A completed record of attempt 0."""
    values: dict[str, Any] = {
        "status": SubtaskStatus.COMPLETED,
        "function": "v:1",
        "inputs": {"at": "x"},
        "result": RESULT,
    }
    return SubtaskRecord(name=name, **values | fields)


def a_failed_record(name: str = "b", **fields: Any) -> SubtaskRecord:
    return a_record(name, status=SubtaskStatus.FAILED, result=None, error="{}", **fields)


def a_started_record(name: str = "b", **fields: Any) -> SubtaskRecord:
    return a_record(name, status=SubtaskStatus.STARTED, result=None, **fields)


def an_outdated_record(name: str = "b", **fields: Any) -> SubtaskRecord:
    return a_record(name, status=SubtaskStatus.OUTDATED, result=None, **fields)


def a_requested_record(name: str = "b", **fields: Any) -> SubtaskRecord:
    return a_started_record(name, **fields)


def a_child(subtask: str, retry: int = 0) -> Child:
    """A peer task that `subtask` began in attempt `retry`."""
    return Child(
        id=TaskId(f"{subtask}-{retry}"),
        peer=AgentName("peer"),
        digest="",
        subtask=subtask,
        retry=retry,
    )


def a_run(retry: int = 0, generation: int = 0, **fields: Any) -> CurrentRun:
    values: dict[str, Any] = {"replays": True, "requested": {"b"}}
    return CurrentRun(retry, generation, **values | fields)


def does_not_fit(text: str) -> Any:
    raise TypeMismatch("int: not a number")


def judge_among(
    records: Sequence[SubtaskRecord],
    requested: SubtaskRecord,
    run: CurrentRun,
    read: Any = json.loads,
) -> Verdict:
    return judge({record.name: record for record in records}, requested, run, read)


CHANGED: dict[str, Any] = {"function": "v:2"}
OTHER_INPUT: dict[str, Any] = {"inputs": {"at": "y"}}
HELPER_CHANGED = "'helper', which it uses, has changed"
NO_LONGER_FITS = "its deliverable no longer fits: int: not a number"

ONE_RECORD: dict[str, tuple[SubtaskRecord, SubtaskRecord, CurrentRun, Verdict]] = {
    "unchanged": (a_record(), a_requested_record(), a_run(), Reuse(a_record(), {"a": [1]})),
    "unchanged in a later attempt": (
        a_record(),
        a_requested_record(),
        a_run(3),
        Reuse(a_record(), {"a": [1]}),
    ),
    "changed function in the same attempt": (
        a_record(),
        a_requested_record(**CHANGED),
        a_run(),
        Reuse(a_record(), {"a": [1]}),
    ),
    "changed function and input in the same attempt": (
        a_record(),
        a_requested_record(**CHANGED, **OTHER_INPUT),
        a_run(),
        Reuse(a_record(), {"a": [1]}, "input 'at' differs"),
    ),
    "changed function in a later attempt that has reused it": (
        a_record(reused_in=2),
        a_requested_record(**CHANGED),
        a_run(2, 1),
        Reuse(a_record(reused_in=2), {"a": [1]}),
    ),
    "changed function after the attempt that reused it": (
        a_record(reused_in=2),
        a_requested_record(**CHANGED),
        a_run(3),
        Run("its function has changed", {"b": "its function has changed"}),
    ),
    "changed helper in the same attempt": (
        a_record(function="src:1 uses helper=1"),
        a_requested_record(function="src:1 uses helper=2"),
        a_run(),
        Reuse(a_record(function="src:1 uses helper=1"), {"a": [1]}),
    ),
    "changed helper in a later attempt": (
        a_record(function="src:1 uses helper=1"),
        a_requested_record(function="src:1 uses helper=2"),
        a_run(1),
        Run(HELPER_CHANGED, {"b": HELPER_CHANGED}),
    ),
    "without helpers, by the previous release": (
        a_record(function="src:1"),
        a_requested_record(function="src:1 uses helper=2"),
        a_run(1),
        Reuse(a_record(function="src:1"), {"a": [1]}),
    ),
    "changed function and input": (
        a_record(),
        a_requested_record(**CHANGED, **OTHER_INPUT),
        a_run(1),
        Run("its function has changed", {"b": "its function has changed"}),
    ),
    "other input in a later attempt": (
        a_record(),
        a_requested_record(**OTHER_INPUT),
        a_run(1),
        Run("input 'at' differs", {"b": "input 'at' differs"}),
    ),
    "migrated to a new name": (
        a_record(function=None, inputs={}),
        a_requested_record(**CHANGED, **OTHER_INPUT),
        a_run(1),
        Reuse(a_record(function=None, inputs={}), {"a": [1]}),
    ),
    "migrated, with a changed function": (
        a_record(function=None),
        a_requested_record(**CHANGED),
        a_run(1),
        Reuse(a_record(function=None), {"a": [1]}),
    ),
    "migrated, with another input": (
        a_record(function=None),
        a_requested_record(**OTHER_INPUT),
        a_run(1),
        Run("input 'at' differs", {"b": "input 'at' differs"}),
    ),
    "without parameters, changed": (
        a_record(inputs={}),
        a_requested_record(inputs={}, **CHANGED),
        a_run(1),
        Run("its function has changed", {"b": "its function has changed"}),
    ),
    "with a new parameter": (
        a_record(inputs={}),
        a_requested_record(),
        a_run(1),
        Run("input 'at' is new", {"b": "input 'at' is new"}),
    ),
    "damaged": (
        a_record(result=None),
        a_requested_record(),
        a_run(),
        Run("its deliverable is missing", {"b": "its deliverable is missing"}),
    ),
    "outdated": (an_outdated_record(again="why"), a_requested_record(), a_run(), Run("why")),
    "outdated by an earlier attempt": (
        an_outdated_record(again="why", retry=1),
        a_requested_record(**CHANGED, **OTHER_INPUT),
        a_run(2),
        Run("why"),
    ),
    "started": (a_started_record(), a_requested_record(), a_run(), Run()),
    "started again": (
        a_started_record(again="why", retry=1),
        a_requested_record(),
        a_run(1),
        Run("why"),
    ),
    "started again in an earlier attempt": (
        a_started_record(again="why", retry=1),
        a_requested_record(),
        a_run(2),
        Run(),
    ),
    "started with another input": (
        a_started_record(),
        a_requested_record(**OTHER_INPUT),
        a_run(),
        Run(None, {"b": "input 'at' differs"}),
    ),
    "started by a changed function": (
        a_started_record(again="why"),
        a_requested_record(**CHANGED),
        a_run(),
        Run("why"),
    ),
    "started by a changed function of an earlier attempt": (
        a_started_record(again="why"),
        a_requested_record(**CHANGED),
        a_run(1),
        Run(None, {"b": "its function has changed"}),
    ),
    "failed before a pause": (
        a_failed_record(),
        a_requested_record(),
        a_run(0, 1),
        FailAgain(a_failed_record(), "{}"),
    ),
    "failed in this segment": (a_failed_record(), a_requested_record(), a_run(), Run()),
    "failed before a pause of the previous attempt": (
        a_failed_record(),
        a_requested_record(),
        a_run(1, 1),
        Run(),
    ),
    "failed in an earlier handler": (
        a_failed_record(),
        a_requested_record(),
        a_run(0, 1, replays=False),
        Run(),
    ),
    "failed before a pause with another input": (
        a_failed_record(),
        a_requested_record(**OTHER_INPUT),
        a_run(0, 1),
        FailAgain(a_failed_record(), "{}", "input 'at' differs"),
    ),
    "failed before a pause, with a changed function": (
        a_failed_record(),
        a_requested_record(**CHANGED),
        a_run(0, 1),
        FailAgain(a_failed_record(), "{}"),
    ),
}


@pytest.mark.parametrize(
    ("record", "requested", "run", "verdict"), ONE_RECORD.values(), ids=ONE_RECORD
)
def test_the_verdict_on_one_record(
    record: SubtaskRecord, requested: SubtaskRecord, run: CurrentRun, verdict: Verdict
) -> None:
    assert judge_among([record], requested, run) == verdict


def test_a_deliverable_that_does_not_fit_runs_again_in_a_new_attempt() -> None:
    records = [a_record("a"), a_record(), a_record("c")]
    assert judge_among(records, a_requested_record(), a_run(1), does_not_fit) == Run(
        NO_LONGER_FITS, {"b": NO_LONGER_FITS, "c": "after 'b', which runs again"}
    )


@pytest.mark.parametrize(
    "record", [a_started_record(), a_failed_record(), an_outdated_record(again="why")]
)
def test_only_the_deliverable_of_a_completed_subtask_is_read(record: SubtaskRecord) -> None:
    assert isinstance(judge_among([record], a_requested_record(), a_run(), does_not_fit), Run)


@pytest.mark.parametrize("record", [a_record(retry=1), a_record(reused_in=1)])
def test_a_deliverable_that_does_not_fit_in_one_attempt_parks_the_task(
    record: SubtaskRecord,
) -> None:
    assert judge_among([record], a_requested_record(), a_run(1), does_not_fit) == Park(
        "subtask 'b': its recorded result no longer fits: int: not a number"
    )


NEW_SUBTASKS: dict[str, tuple[CurrentRun, set[str]]] = {
    "in the first attempt": (a_run(), set()),
    "first in a new attempt": (a_run(1), {"a", "c"}),
    "after one in a new attempt": (a_run(1, requested={"a", "b"}), {"c"}),
    "after all in a new attempt": (a_run(1, requested={"a", "b", "c"}), set()),
    "after a pause of replayed code": (a_run(1, 1), {"a", "c"}),
    "in the first handler": (a_run(1, replays=False), {"a", "c"}),
    "in a later handler": (a_run(1, 1, replays=False), set()),
    "in an attempt that has reused them": (a_run(2, 1), set()),
}


@pytest.mark.parametrize(("run", "names"), NEW_SUBTASKS.values(), ids=NEW_SUBTASKS)
def test_a_new_subtask_invalidates_what_earlier_attempts_ran_after_it(
    run: CurrentRun, names: set[str]
) -> None:
    records = [a_record(name, reused_in=2) for name in "ac"]
    assert judge_among(records, a_requested_record(), run) == Run(
        None, dict.fromkeys(names, "after 'b', which is new")
    )


def test_an_incomplete_subtask_invalidates_no_other() -> None:
    records = {record.name: record for record in (a_started_record(), a_record("c"))}
    assert run_again(records, records["b"], "why", a_run(1)) == Run(None, {"b": "why"})


def test_a_record_that_this_run_has_used_stays_valid() -> None:
    records = {name: a_record(name) for name in "abcd"}
    verdict = run_again(records, records["b"], "why", a_run(1, used={"c"}))
    assert verdict == Run("why", {"b": "why", "d": "after 'b', which runs again"})


STATUSES = st.sampled_from([a_record, a_failed_record, a_started_record, an_outdated_record])
NAMES = st.text("abcdef", min_size=1, max_size=2)


@st.composite
def recorded(draw: st.DrawFn) -> list[SubtaskRecord]:
    """The records of a task in its third attempt."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    return [
        draw(STATUSES)(
            name,
            retry=draw(st.integers(0, 2)),
            generation=draw(st.integers(0, 2)),
            again=draw(st.sampled_from([None, "why"])),
        )
        for name in names
    ]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[SubtaskRecord], SubtaskRecord, CurrentRun]:
    """Records, a request that may differ from its record, and the run that makes it."""
    records = draw(recorded())
    name = draw(st.sampled_from([*(record.name for record in records), "new"]))
    changes: dict[str, Any] = draw(st.sampled_from([{}, CHANGED, OTHER_INPUT]))
    others = [record.name for record in records if record.name != name]
    earlier = draw(st.sets(st.sampled_from(others))) if others else set()
    used = draw(st.sets(st.sampled_from(sorted(earlier)))) if earlier else set()
    generation, replays = draw(st.integers(0, 3)), draw(st.booleans())
    run = CurrentRun(2, generation, replays, earlier | {name}, used)
    return records, a_requested_record(name, **changes), run


@given(requests())
def test_what_a_run_has_used_is_never_invalidated(
    request_: tuple[list[SubtaskRecord], SubtaskRecord, CurrentRun],
) -> None:
    records, requested, run = request_
    verdict = judge_among(records, requested, run)
    if isinstance(verdict, Run):
        assert not set(verdict.invalidated) & set(run.used)
        assert set(verdict.invalidated) <= {record.name for record in records}


@given(requests())
def test_a_completed_record_is_reused_if_it_is_equal_or_of_this_attempt(
    request_: tuple[list[SubtaskRecord], SubtaskRecord, CurrentRun],
) -> None:
    records, requested, run = request_
    by_name = {record.name: record for record in records}
    record = by_name.get(requested.name)
    equal = record is not None and (record.function, record.inputs) == (
        requested.function,
        requested.inputs,
    )
    verdict = judge_among(records, requested, run)
    assert isinstance(verdict, Reuse) == (
        record is not None and record.completed and (equal or record.retry == run.retry)
    )


@given(requests())
def test_after_it_is_applied_a_verdict_stays_the_same(
    request_: tuple[list[SubtaskRecord], SubtaskRecord, CurrentRun],
) -> None:
    """A replica that crashes between the verdict and the run finds the same reason again."""
    records, requested, run = request_
    verdict = judge_among(records, requested, run)
    if isinstance(verdict, Run):
        applied = [
            invalidate(record, verdict.invalidated[record.name], run.retry)
            if record.name in verdict.invalidated
            else record
            for record in records
        ]
        repeated = judge_among(applied, requested, run)
        assert isinstance(repeated, Run)
        assert repeated.again == verdict.again


@given(recorded(), st.integers(0, 3))
def test_an_invalidated_record_has_no_result_and_runs_again(
    records: list[SubtaskRecord], retry: int
) -> None:
    for record in records:
        after = invalidate(record, "changed", retry)
        if record.completed:
            assert (after.status, after.again) == (SubtaskStatus.OUTDATED, "changed")
            assert (after.retry, after.seconds) == (retry, 0.0)
            assert (after.result, after.context, after.secrets) == (None, None, ())
            assert find_reusable_children([a_child(record.name)], [after], retry + 1) == []
        else:
            assert after is record


@pytest.mark.parametrize(
    ("record", "is_reusable"),
    [
        (a_record(), False),
        (an_outdated_record(again="why"), False),
        (a_started_record(again="why", retry=1), False),
        (a_started_record(again="why"), True),
        (a_started_record(retry=1), True),
        (a_failed_record(), True),
    ],
)
def test_a_resumed_subtask_reuses_its_peers_tasks_unless_it_was_completed(
    record: SubtaskRecord, is_reusable: bool
) -> None:
    child = a_child(record.name)
    assert find_reusable_children([child], [record], 1) == [child] * is_reusable


def test_the_latest_call_of_earlier_attempts_is_reused_first() -> None:
    children = [a_child("b", retry) for retry in (0, 2, 1, 3)]
    reusable = find_reusable_children(children, [], 3)
    assert [child.retry for child in reusable] == [2, 1, 0]


NAME_PROBLEMS: dict[str, tuple[str, str | None, CurrentRun, str | None]] = {
    "new": ("c", None, a_run(), None),
    "recorded by the same handler": ("b", None, a_run(requested=(), replays=False), None),
    "recorded before a pause of replayed code": ("b", None, a_run(0, 1, requested=()), None),
    "recorded in an earlier attempt": (
        "b",
        None,
        a_run(1, 1, requested=(), replays=False),
        None,
    ),
    "invalid": ("", None, a_run(), "'' is not a valid subtask name"),
    "nested": ("c", "b", a_run(), "subtask 'c' begins inside subtask 'b'"),
    "requested twice": ("b", None, a_run(), "two subtasks of this run are called 'b'"),
    "recorded by an earlier handler": (
        "b",
        None,
        a_run(0, 1, requested=(), replays=False),
        "two subtasks of this run are called 'b'",
    ),
}


@pytest.mark.parametrize(
    ("name", "outer", "run", "start"), NAME_PROBLEMS.values(), ids=NAME_PROBLEMS
)
def test_name_problems(name: str, outer: str | None, run: CurrentRun, start: str | None) -> None:
    problem = find_name_problem(name, outer, {"b": a_record()}, run)
    assert problem is None if start is None else (problem or "").startswith(start)


@pytest.mark.parametrize("status", [a_started_record, a_failed_record, an_outdated_record])
def test_an_incomplete_subtask_of_an_earlier_handler_frees_its_name(status: Any) -> None:
    run = a_run(0, 1, requested=(), replays=False)
    assert find_name_problem("b", None, {"b": status()}, run) is None


@given(st.text())
def test_a_valid_name_is_printed_as_it_is(name: str) -> None:
    if is_valid_name(name):
        assert 1 <= len(name) <= 100
        assert name == name.strip() == "".join(name.splitlines())


@pytest.mark.parametrize(
    ("recorded", "now", "description"),
    [
        ({"a": "1"}, {"a": "1"}, None),
        ({}, {}, None),
        ({"trip": "1"}, {"trip": "2"}, "input 'trip' differs"),
        ({"a": "1", "b": "1"}, {"a": "2", "b": "2"}, "inputs 'a' and 'b' differ"),
        (
            {"a": "1", "b": "1", "c": "1"},
            {"a": "2", "b": "2", "c": "2"},
            "inputs 'a', 'b' and 'c' differ",
        ),
        ({}, {"c": "1"}, "input 'c' is new"),
        ({"d": "1"}, {}, "input 'd' is gone"),
        (
            {"a": "1", "d": "1", "e": "1"},
            {"a": "2", "c": "1"},
            "input 'a' differs; input 'c' is new; inputs 'd' and 'e' are gone",
        ),
    ],
)
def test_a_difference_names_the_input(
    recorded: dict[str, str], now: dict[str, str], description: str | None
) -> None:
    assert describe_difference(recorded, now) == description


@pytest.mark.parametrize(
    ("recorded", "current"),
    [
        ("v:1 uses x", "v:1 uses y"),
        ("v:1 uses x", "v:1"),
        ("v:1", "src:12"),
        ("src:12 uses a=1", "src:12 uses  a=1"),
        ("name:len uses", "name:len uses a=1"),
    ],
)
def test_other_texts_are_compared_whole(recorded: str, current: str) -> None:
    assert describe_change(recorded, current) == "its function has changed"
    assert describe_change(recorded, recorded) is None


def test_uses_of_any_text_are_compared() -> None:
    change = describe_change("src:1 uses helper ==", "src:1 uses helper=2")
    assert change == "'' and 'helper', which it uses, have changed"
