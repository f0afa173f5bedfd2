"""Exported checkpoints: their contents, what they leave out, and which files are refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from meshpoint.errors import ConfigurationError
from meshpoint.exec import checkpoint_file
from meshpoint.exec.canonical import json_digest
from meshpoint.exec.checkpoint_file import (
    CheckpointDocument,
    build_document,
    document_json,
    document_text,
    read_document,
)
from meshpoint.exec.importing import NOT_IN_FILE, SECRETS_REMOVED, recover_records
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus

FLOW = AgentName("flow")


def record(name: str, result: str | None = "1", **fields: Any) -> SubtaskRecord:
    status = SubtaskStatus.COMPLETED if result is not None else SubtaskStatus.FAILED
    known = {"function": f"src:{name}", "inputs": {"n": "abc"}, "seconds": 0.25}
    return SubtaskRecord(name=name, status=status, result=result, **{**known, **fields})


CHECKPOINT = AgentCheckpoint(
    operation_id=TaskId("op-1"),
    agent=FLOW,
    seq=3,
    agent_version="2",
    checkpoint_time=datetime(2026, 11, 22, 2, 39, 22, 123456, tzinfo=UTC),
    subtasks=(
        record("fetch", '{"b":1,"a":[2.0,null]}', context='{"flags": {"seen": true}}'),
        record("login", '{"user":"ada","key":"s3cret","db_password":"hunter2"}', secrets=("/key",)),
        record("parse", "null"),
        record("rate", None),
    ),
)


def export(**options: Any) -> CheckpointDocument:
    return build_document(CHECKPOINT, session="rome", input_digest=json_digest(3), **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    path.write_text(document_text(export(include_outputs=True)))
    return path


def test_without_outputs_it_says_what_was_done_and_no_more() -> None:
    document = document_json(export())
    assert document == {
        "format": "meshpoint-checkpoint/1",
        "agent": "flow",
        "agent_version": "2",
        "operation_id": "op-1",
        "session": "rome",
        "seq": 3,
        "created_at": "2026-11-22T02:39:22.123456+00:00",
        "input_digest": json_digest(3),
        "subtasks": [
            {"name": name, "status": status, "function": f"src:{name}", "inputs": {"n": "abc"}, "seconds": 0.25}
            for name, status in [
                ("fetch", "completed"),
                ("login", "completed"),
                ("parse", "completed"),
                ("rate", "failed"),
            ]
        ],
        "outputs": False,
        "removed": [],
        "digest": document["digest"],
    }
    assert str(document["digest"]).startswith("sha256:")


def test_with_outputs_secrets_stay_out(file: Path) -> None:
    text = file.read_text()
    assert "s3cret" not in text
    assert "hunter2" not in text
    document = read_document(file, FLOW)
    assert document.removed == ["/subtasks/1/output/key", "/subtasks/1/output/db_password"]
    assert document.subtasks[1].output == {"user": "ada", "key": None, "db_password": None}
    assert [subtask.has_output for subtask in document.subtasks] == [True, True, True, False]
    assert read_document(file, FLOW) == export(include_outputs=True)


def test_further_keys_can_be_secret() -> None:
    document = export(include_outputs=True, secret_keys=["user"])
    assert "/subtasks/1/output/user" in document.removed


def test_secrets_in_a_context_stay_out_too() -> None:
    checkpoint = CHECKPOINT.model_copy(update={"subtasks": (record("a", context='{"flags":{"api_key":"s3cret"}}'),)})
    document = build_document(checkpoint, include_outputs=True)
    assert document.removed == ["/subtasks/0/context/flags/api_key"]
    assert document.has_removed_secrets(0)


def test_what_comes_back_is_what_was_recorded(file: Path) -> None:
    found = recover_records(read_document(file, FLOW), None)
    assert found.records == [CHECKPOINT.subtasks[0]]
    assert found.rerun_reasons == {"login": SECRETS_REMOVED, "parse": "after 'login', which runs again"}


def test_the_store_gives_what_the_file_has_not() -> None:
    found = recover_records(export(), CHECKPOINT)
    assert found.records == list(CHECKPOINT.subtasks)
    assert found.rerun_reasons == {}
    found = recover_records(export(), None)
    assert (found.records, found.rerun_reasons["fetch"]) == ([record("rate", None)][:0], NOT_IN_FILE)


@pytest.mark.parametrize("change", [{"inputs": {"n": "xyz"}}, {"function": "src:other"}, {"result": None}])
def test_a_record_of_the_store_serves_only_if_it_is_the_same(change: dict[str, Any]) -> None:
    first = record("fetch", **{"result": "1", **change})
    found = recover_records(export(), CHECKPOINT.model_copy(update={"subtasks": (first, *CHECKPOINT.subtasks[1:])}))
    assert found.records == []
    assert found.rerun_reasons["fetch"] == NOT_IN_FILE


def test_a_failed_step_does_not_take_those_after_it_along() -> None:
    checkpoint = CHECKPOINT.model_copy(update={"subtasks": (record("a", None), record("b"))})
    found = recover_records(build_document(checkpoint, include_outputs=True), None)
    assert [each.name for each in found.records] == ["a", "b"]


def test_white_space_order_and_number_forms_are_no_edit(file: Path) -> None:
    loaded = json.loads(file.read_text())
    loaded["subtasks"][0]["output"]["a"][0] = 2  # some tools write this as 2.0
    file.write_text(json.dumps(dict(sorted(loaded.items(), reverse=True))))
    assert read_document(file, FLOW).seq == 3


def test_a_file_cut_off_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in {0, 1, len(whole) - 1, *range(0, len(whole), 97)}:
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="is not JSON, or truncated"):
            read_document(file, FLOW)


FIELDS = [(field,) for field in CheckpointDocument.model_fields if field not in {"format"}]
FIELDS += [
    ("subtasks", 0, field) for field in ("name", "status", "function", "inputs", "seconds", "output", "context")
]


@pytest.mark.parametrize("place", FIELDS, ids=str)
@pytest.mark.parametrize("how", ["changed", "gone"])
def test_an_edited_field_is_found(file: Path, place: tuple[str | int, ...], how: str) -> None:
    loaded: Any = json.loads(file.read_text())
    *path, last = place
    owner = loaded
    for step in path:
        owner = owner[step]
    if how == "gone":
        del owner[last]
    else:
        owner[last] = "edited" if owner[last] != "edited" else None
    file.write_text(json.dumps(loaded))
    with pytest.raises(ConfigurationError, match="was edited: its digest does not match"):
        read_document(file, FLOW)


def test_an_added_field_is_an_edit(file: Path) -> None:
    loaded = json.loads(file.read_text())
    file.write_text(json.dumps({**loaded, "more": 1}))
    with pytest.raises(ConfigurationError, match="was edited"):
        read_document(file, FLOW)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "is not a checkpoint"),
        ("{}", "is not a checkpoint"),
        ('{"format": "meshpoint-session/1"}', "is not a checkpoint"),
        ('{"format": "meshpoint-checkpoint/2"}', "written by a later release"),
        ('{"format": "meshpoint-checkpoint/1", "digest": null, "seq": NaN}', "its digest does not match"),
        (f'{{"format": "meshpoint-checkpoint/1", "digest": "x", "seq": {"[" * 900}{"]" * 900}}}', "does not match"),
        ("\xff", "is not JSON"),
    ],
)
def test_other_files_are_refused(file: Path, text: str, problem: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=problem) as refused:
        read_document(file, FLOW)
    assert str(refused.value).count("\n") == 0
    assert str(refused.value).startswith(f"--resume-from: {file} ")


def test_a_well_made_file_of_another_shape_is_refused(file: Path) -> None:
    rest = {key: value for key, value in json.loads(file.read_text()).items() if key != "digest"} | {"seq": "three"}
    file.write_text(json.dumps({**rest, "digest": json_digest(rest)}))
    with pytest.raises(ConfigurationError, match="is not a checkpoint: seq: "):
        read_document(file, FLOW)


def test_a_checkpoint_of_another_agent_is_refused(file: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a checkpoint of agent 'flow'; use a checkpoint of 'other'"):
        read_document(file, AgentName("other"))


def test_a_file_without_an_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "_MAX_BYTES", 1024 * 1024)
    with pytest.raises(ConfigurationError, match="/dev/zero cannot be read: has more than 1 MiB"):
        read_document(Path("/dev/zero"), AgentName("flow"))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.json cannot be read: No such file"):
        read_document(tmp_path / "nothing.json", FLOW)
