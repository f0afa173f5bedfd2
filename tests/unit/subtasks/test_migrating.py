"""Migrations bring checkpoints of earlier versions to the current one."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpoint.errors import ConfigurationError, IncompatibleState
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, Migration, SubtaskRecord, SubtaskStatus
from meshpoint.subtasks.migrating import migrate_checkpoint, migrates, validate_migrations

Change = Callable[[dict[str, Any]], Any]

PARSED = SubtaskRecord(
    name="10k_parsing",
    status=SubtaskStatus.COMPLETED,
    function="src:1",
    inputs={"filing": "f1"},
    seconds=12.5,
    retry=1,
    result='{"b": 1e16,"a":"\\u0000","token":"hunter2"}',
    context='{"flags":{"parsed":true}}',
    secrets=("/token",),
)
RATIOS = SubtaskRecord(
    name="ratio_calculation",
    status=SubtaskStatus.COMPLETED,
    function="v:2",
    inputs={"rows": "r1"},
    seconds=1.0,
    result="[1.5,2]",
)
BEGUN = SubtaskRecord(
    name="summary", status=SubtaskStatus.FAILED, function="src:3", inputs={"style": "s1"}
)

BEFORE = AgentCheckpoint(
    operation_id=TaskId("op-1"),
    agent=AgentName("analyst"),
    seq=7,
    subject="ACME",
    planned=("10k_parsing", "ratio_calculation", "summary", "review"),
    subtasks=(PARSED, RATIOS, BEGUN),
    saved_progress={"summary": '{"page": 3}'},
    current_subtask="summary",
    agent_config={"type": "analysis"},
    agent_version="1.0",
    retry_count=2,
    failure_reason="it failed",
    checkpoint_time=datetime(2024, 5, 1, tzinfo=UTC),
)


def migrate(change: Change, before: AgentCheckpoint = BEFORE) -> AgentCheckpoint:
    """`before`, migrated by `change` from 1.0 to 1.1."""
    return migrate_checkpoint(before, "1.1", [migrates("1.0", "1.1")(change)])


def unchanged(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint


def changed_checkpoint(**changes: Any) -> Change:
    return lambda checkpoint: checkpoint | changes


def rename_subtask(checkpoint: dict[str, Any]) -> dict[str, Any]:
    checkpoint["completed_subtasks"][0] = "filing"
    checkpoint["interim_results"]["filing"] = checkpoint["interim_results"].pop("10k_parsing")
    return checkpoint


def test_a_migration_sees_the_public_form() -> None:
    seen: list[dict[str, Any]] = []

    def capture(checkpoint: dict[str, Any]) -> dict[str, Any]:
        seen.append(json.loads(json.dumps(checkpoint)))
        return checkpoint

    migrate(capture)
    assert seen == [
        {
            "completed_subtasks": ["10k_parsing", "ratio_calculation"],
            "pending_subtasks": ["summary", "review"],
            "interim_results": {
                "10k_parsing": {"b": 1e16, "a": "\0", "token": "hunter2"},
                "ratio_calculation": [1.5, 2],
            },
            "saved_progress": {"summary": {"page": 3}},
            "subject": "ACME",
            "agent_config": {"type": "analysis"},
            "agent_version": "1.0",
            "retry_count": 2,
        }
    ]


def test_what_a_migration_does_not_change_stays_identical() -> None:
    after = migrate(unchanged)
    accepted = [record.model_copy(update={"function": None}) for record in (PARSED, RATIOS)]
    assert after == BEFORE.model_copy(
        update={"agent_version": "1.1", "subtasks": (*accepted, BEGUN)}
    )


def test_a_migrated_checkpoint_shares_no_records() -> None:
    before = BEFORE.model_copy(update={"records_from": 3})
    assert migrate(unchanged, before).records_from is None
    assert migrate_checkpoint(before, "1.0", []).records_from == 3


def test_the_stored_checkpoint_is_not_changed() -> None:
    stored = BEFORE.model_dump_json()

    def mutate(checkpoint: dict[str, Any]) -> dict[str, Any]:
        checkpoint["interim_results"]["10k_parsing"]["b"] = 0
        checkpoint["agent_config"]["type"] = "other"
        checkpoint["saved_progress"]["summary"]["page"] = 4
        return checkpoint

    after = migrate(mutate)
    assert BEFORE.model_dump_json() == stored
    assert json.loads(after.subtasks[0].result or "")["b"] == 0
    assert after.agent_config == {"type": "other"}
    assert after.saved_progress == {"summary": '{"page":4}'}


def test_a_checkpoint_of_this_version_or_of_none_is_unchanged() -> None:
    unversioned = BEFORE.model_copy(update={"agent_version": None})
    assert migrate_checkpoint(BEFORE, "1.0", []) is BEFORE
    assert migrate_checkpoint(unversioned, "1.1", []) is unversioned
    assert migrate_checkpoint(BEFORE, None, []) is BEFORE


def test_a_renamed_subtask_keeps_its_record_and_accepts_any_inputs() -> None:
    after = migrate(rename_subtask)
    expected = PARSED.model_copy(update={"name": "filing", "function": None, "inputs": {}})
    assert after.subtasks == (expected, RATIOS.model_copy(update={"function": None}), BEGUN)
    assert after.progress.completed == ("filing", "ratio_calculation")


def test_a_renamed_subtask_with_another_result_is_matched_by_position() -> None:
    results = {"filing": {"rows": []}, "ratio_calculation": [1.5, 2]}
    after = migrate(changed_checkpoint(completed_subtasks=list(results), interim_results=results))
    assert (after.subtasks[0].context, after.subtasks[0].seconds) == (
        PARSED.context,
        PARSED.seconds,
    )
    assert (after.subtasks[0].inputs, after.subtasks[0].secrets) == ({}, ())
    longer = results | {"more": 1}
    after = migrate(changed_checkpoint(completed_subtasks=list(longer), interim_results=longer))
    assert after.subtasks[0].context is None


def test_a_changed_result_keeps_its_inputs_and_context() -> None:
    after = migrate(
        changed_checkpoint(interim_results={"10k_parsing": {"rows": [1]}, "ratio_calculation": []})
    )
    expected = PARSED.model_copy(
        update={"function": None, "result": '{"rows":[1]}', "secrets": ()}
    )
    assert after.subtasks[0] == expected
    assert after.subtasks[1].result == "[]"


def test_an_added_subtask_is_complete_for_any_inputs() -> None:
    def add(checkpoint: dict[str, Any]) -> dict[str, Any]:
        checkpoint["completed_subtasks"].append("rating")
        checkpoint["pending_subtasks"].insert(0, "checks")
        checkpoint["interim_results"]["rating"] = {"grade": "Ä"}
        checkpoint["saved_progress"]["checks"] = [1]
        return checkpoint

    after = migrate(add)
    added = SubtaskRecord(
        name="rating",
        status=SubtaskStatus.COMPLETED,
        function=None,
        inputs={},
        result='{"grade":"Ä"}',
    )
    assert after.subtasks[2] == added
    assert after.progress.pending == ("checks", "summary", "review")
    assert after.saved_progress == {"summary": '{"page": 3}', "checks": "[1]"}


def test_a_dropped_subtask_loses_its_record() -> None:
    dropped = {
        "completed_subtasks": ["ratio_calculation"],
        "interim_results": {"ratio_calculation": [1.5, 2]},
        "pending_subtasks": ["10k_parsing"],
        "saved_progress": {},
    }
    after = migrate(changed_checkpoint(**dropped))
    assert [record.name for record in after.subtasks] == ["ratio_calculation"]
    assert after.planned == ("ratio_calculation", "10k_parsing")
    assert after.current_subtask is None


@pytest.mark.parametrize(
    ("results", "name", "places"),
    [
        ({"10k_parsing": {"login": {"key": "hunter2"}}}, "10k_parsing", ("/login/key",)),
        ({"10k_parsing": {"token": "Bearer hunter2"}}, "10k_parsing", ("/token",)),
        ({"10k_parsing": {"auth": "Bearer hunter2"}}, "10k_parsing", ("/auth",)),
        ({"10k_parsing": "hunter2"}, "10k_parsing", ("",)),
        ({"10k_parsing": {"token": "other"}}, "10k_parsing", ("/token",)),
        ({"10k_parsing": 1, "login": ["a", "hunter2"]}, "login", ("/1",)),
    ],
)
def test_a_secret_stays_secret_wherever_a_migration_moves_it(
    results: dict[str, Any], name: str, places: tuple[str, ...]
) -> None:
    done = {**results, "ratio_calculation": []}
    after = migrate(changed_checkpoint(interim_results=done, completed_subtasks=list(done)))
    [record] = [item for item in after.subtasks if item.name == name]
    assert record.secrets == places


def recording_migrations(*links: tuple[str, str]) -> tuple[list[Migration], list[str]]:
    """Migrations that record their order and the version each of them received."""
    applied: list[str] = []

    def migration(start: str, end: str) -> Migration:
        def apply(checkpoint: dict[str, Any]) -> dict[str, Any]:
            applied.append(f"{checkpoint['agent_version']} -> {end}")
            return checkpoint | {"agent_version": "whatever"}

        return migrates(start, end)(apply)

    return [migration(*link) for link in links], applied


def test_a_chain_of_migrations_is_applied_in_order() -> None:
    migrations, applied = recording_migrations(("1.1", "1.2"), ("1.2", "2"), ("1.0", "1.1"))
    assert migrate_checkpoint(BEFORE, "2", migrations).agent_version == "2"
    assert applied == ["1.0 -> 1.1", "1.1 -> 1.2", "1.2 -> 2"]


def test_the_first_of_the_shortest_paths_is_applied() -> None:
    migrations, applied = recording_migrations(
        ("1.0", "a"), ("a", "b"), ("b", "2"), ("1.0", "d"), ("1.0", "c"), ("c", "2"), ("d", "2")
    )
    migrate_checkpoint(BEFORE, "2", migrations)
    assert applied == ["1.0 -> d", "d -> 2"]


@pytest.mark.parametrize(
    ("links", "to", "problem"),
    [
        ([], "1.2", r'no migrations are defined; write @migrates\("1.0", "1.2"\)'),
        ([("1.0", "1.1")], "1.2", r'available: 1.0 -> 1.1; write @migrates\("1.1", "1.2"\)'),
        ([("1.1", "1.2")], "1.2", r'available: 1.1 -> 1.2; write @migrates\("1.0", "1.1"\)'),
        (
            [("1.0", "1.1"), ("1.2", "1.3"), ("1.3", "2")],
            "2",
            r'available: 1.0 -> 1.1, 1.2 -> 1.3, 1.3 -> 2; write @migrates\("1.1", "1.2"\)',
        ),
        ([("0.9", "1.0")], "0.9", r'available: 0.9 -> 1.0; write @migrates\("1.0", "0.9"\)'),
    ],
)
def test_a_missing_link_is_named(links: list[tuple[str, str]], to: str, problem: str) -> None:
    migrations, applied = recording_migrations(*links)
    with pytest.raises(
        IncompatibleState,
        match=f"agent 'analyst': no migration leads from 1.0 to {to}; {problem}$",
    ):
        migrate_checkpoint(BEFORE, to, migrations)
    assert applied == []


def add_subtask_progress(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The example of the source document."""
    if "subtask_progress" not in checkpoint:
        checkpoint["subtask_progress"] = {  # noqa: C420  # as the document writes it
            task: 1.0 for task in checkpoint["completed_subtasks"]
        }
    return checkpoint


def test_a_migration_may_add_keys() -> None:
    migrated = migrate(add_subtask_progress)
    assert migrated.extra == {"subtask_progress": {"10k_parsing": 1.0, "ratio_calculation": 1.0}}
    assert (migrated.agent_version, migrated.progress) == ("1.1", BEFORE.progress)


def test_later_migrations_receive_added_keys() -> None:
    seen: list[Any] = []

    def look(checkpoint: dict[str, Any]) -> dict[str, Any]:
        seen.append(checkpoint.pop("subtask_progress"))
        return checkpoint | {"other": "\0", "none": None}

    steps = [migrates("1.0", "1.1")(add_subtask_progress), migrates("1.1", "1.2")(look)]
    migrated = migrate_checkpoint(BEFORE, "1.2", steps)
    stored = migrate(add_subtask_progress)
    assert migrate_checkpoint(stored, "1.2", steps) == migrated
    assert seen == [stored.extra["subtask_progress"]] * 2
    assert migrated.extra == {"other": "\0", "none": None}


def raise_error(checkpoint: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("rows")


def without_saved(checkpoint: dict[str, Any]) -> dict[str, Any]:
    del checkpoint["saved_progress"]
    return checkpoint


RESULTS = {"10k_parsing": 1, "ratio_calculation": 2}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (raise_error, "KeyError: 'rows'"),
        (lambda checkpoint: None, "it returned None; return the dict"),
        (lambda checkpoint: [], "valid dict"),
        (without_saved, "saved_progress: Field required"),
        (changed_checkpoint(added=object()), "added"),
        (
            changed_checkpoint(completed_subtasks="10k_parsing"),
            "completed_subtasks: Input should be a valid list",
        ),
        (changed_checkpoint(retry_count="2"), "retry_count: Input should be a valid integer"),
        (
            changed_checkpoint(interim_results=RESULTS | {"x": 1}),
            "'x' is in interim_results but not in completed_subtasks",
        ),
        (
            changed_checkpoint(interim_results={"10k_parsing": 1}),
            "'ratio_calculation' is completed without an entry in interim_results",
        ),
        (
            changed_checkpoint(saved_progress={"x": 1}),
            "'x' is in saved_progress but is not a subtask",
        ),
        (
            changed_checkpoint(pending_subtasks=["10k_parsing", "summary"]),
            "'10k_parsing' is listed twice",
        ),
        (
            changed_checkpoint(
                interim_results=RESULTS | {"10k_parsing": datetime(2024, 1, 1, tzinfo=UTC)}
            ),
            "checkpoint.interim_results.10k_parsing: datetime is not JSON",
        ),
        (
            changed_checkpoint(agent_config={"a": float("nan")}),
            "checkpoint.agent_config.a: nan is not JSON",
        ),
    ],
)
def test_a_faulty_migration_is_named_with_its_error(change: Change, problem: str) -> None:
    change.__name__ = "rework"
    with pytest.raises(
        IncompatibleState, match=rf"^agent 'analyst': migration rework \(1.0 -> 1.1\): .*{problem}"
    ):
        migrate(change)


def test_consistent_migrations_are_kept_in_order() -> None:
    migrations, _ = recording_migrations(("1", "2"), ("2", "3"), ("1", "3"))
    assert validate_migrations(migrations) == tuple(migrations)
    assert validate_migrations([]) == ()


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        ([("1", "2"), ("1", "2")], "two of them lead from 1 to 2"),
        ([("1", "1")], "cycle: 1 -> 1"),
        (
            [("1", "2"), ("2", "3"), ("3", "1")],
            "cycle: (1 -> 2 -> 3 -> 1|2 -> 3 -> 1 -> 2|3 -> 1 -> 2 -> 3)",
        ),
    ],
)
def test_inconsistent_migrations_are_refused(links: list[tuple[str, str]], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        validate_migrations(recording_migrations(*links)[0])


def test_a_function_without_its_versions_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="'rename_subtask' is not a migration; decorate it with @migrates"
    ):
        validate_migrations([rename_subtask])  # type: ignore[list-item]  # wrong on purpose


def test_a_migration_can_be_called_as_a_function() -> None:
    assert migrates("1", "2")(unchanged)({"a": 1}) == {"a": 1}


names = st.lists(st.text("abc", min_size=1, max_size=2), unique=True, max_size=5)


@given(names, st.data())
def test_any_valid_change_gives_a_checkpoint_with_the_same_content(
    listed: list[str], data: st.DataObject
) -> None:
    done = listed[: data.draw(st.integers(0, len(listed)))]
    waiting = listed[len(done) :]
    results = {name: data.draw(st.none() | st.integers() | st.text("xy")) for name in done}
    change = changed_checkpoint(
        completed_subtasks=done,
        pending_subtasks=waiting,
        interim_results=results,
        saved_progress={},
    )
    after = migrate(change)
    seen: list[dict[str, Any]] = []

    def capture(checkpoint: dict[str, Any]) -> dict[str, Any]:
        seen.append(checkpoint)
        return checkpoint

    remigrated = migrate_checkpoint(after, "1.2", [migrates("1.1", "1.2")(capture)])
    assert seen[0]["completed_subtasks"] == done
    assert seen[0]["pending_subtasks"] == waiting
    assert seen[0]["interim_results"] == results
    assert remigrated == after.model_copy(update={"agent_version": "1.2"})
