"""Exported checkpoints: their contents, what they leave out, and which files are refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from meshpoint.errors import ConfigurationError
from meshpoint.exec import checkpoint_file
from meshpoint.exec.checkpoint_file import (
    CheckpointDocument,
    build_document,
    document_json,
    document_text,
    read_document,
)
from meshpoint.exec.importing import NOT_IN_FILE, SECRETS_REMOVED, recover_records
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.json_values import document_digest
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus

FLOW = AgentName("flow")


def create_record(name: str, result: str | None = "1", **fields: Any) -> SubtaskRecord:
    status = SubtaskStatus.COMPLETED if result is not None else SubtaskStatus.FAILED
    known_fields = {"function": f"src:{name}", "inputs": {"n": "abc"}, "seconds": 0.25}
    return SubtaskRecord(name=name, status=status, result=result, **{**known_fields, **fields})


CHECKPOINT = AgentCheckpoint(
    operation_id=TaskId("op-1"),
    agent=FLOW,
    seq=3,
    agent_version="2",
    checkpoint_time=datetime(2026, 11, 22, 2, 39, 22, 123456, tzinfo=UTC),
    subtasks=(
        create_record("fetch", '{"b":1,"a":[2.0,null]}', context='{"flags": {"seen": true}}'),
        create_record(
            "login", '{"user":"ada","key":"s3cret","db_password":"hunter2"}', secrets=("/key",)
        ),
        create_record("parse", "null"),
        create_record("rate", None),
    ),
)


def export_checkpoint(**options: Any) -> CheckpointDocument:
    return build_document(CHECKPOINT, session="rome", input_digest=document_digest(3), **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    path.write_text(document_text(export_checkpoint(include_outputs=True)))
    return path


def test_an_export_without_outputs_lists_only_the_status_of_each_step() -> None:
    document = document_json(export_checkpoint())
    assert document == {
        "format": "meshpoint-checkpoint/1",
        "agent": "flow",
        "agent_version": "2",
        "operation_id": "op-1",
        "session": "rome",
        "seq": 3,
        "created_at": "2026-11-22T02:39:22.123456+00:00",
        "input_digest": document_digest(3),
        "subtasks": [
            {
                "name": name,
                "status": status,
                "function": f"src:{name}",
                "inputs": {"n": "abc"},
                "seconds": 0.25,
            }
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


def test_an_export_with_outputs_omits_secrets(file: Path) -> None:
    text = file.read_text()
    assert "s3cret" not in text
    assert "hunter2" not in text
    document = read_document(str(file), FLOW)
    assert document.removed == ["/subtasks/1/output/key", "/subtasks/1/output/db_password"]
    assert document.subtasks[1].output == {"user": "ada", "key": None, "db_password": None}
    assert [subtask.has_output for subtask in document.subtasks] == [True, True, True, False]
    assert read_document(str(file), FLOW) == export_checkpoint(include_outputs=True)


def test_configured_keys_are_omitted_as_secrets() -> None:
    document = export_checkpoint(include_outputs=True, secret_keys=["user"])
    assert "/subtasks/1/output/user" in document.removed


def test_secrets_in_a_context_are_omitted() -> None:
    checkpoint = CHECKPOINT.model_copy(
        update={"subtasks": (create_record("a", context='{"flags":{"api_key":"s3cret"}}'),)}
    )
    document = build_document(checkpoint, include_outputs=True)
    assert document.removed == ["/subtasks/0/context/flags/api_key"]
    assert document.has_removed_secrets(0)


def test_imported_records_equal_the_exported_ones(file: Path) -> None:
    records, rerun_reasons = recover_records(read_document(str(file), FLOW), None)
    assert records == [CHECKPOINT.subtasks[0]]
    assert rerun_reasons == {
        "login": SECRETS_REMOVED,
        "parse": "after 'login', which runs again",
    }


def test_missing_outputs_come_from_the_store() -> None:
    assert recover_records(export_checkpoint(), CHECKPOINT) == (list(CHECKPOINT.subtasks), {})
    records, rerun_reasons = recover_records(export_checkpoint(), None)
    assert (records, rerun_reasons["fetch"]) == ([], NOT_IN_FILE)


@pytest.mark.parametrize(
    "change", [{"inputs": {"n": "xyz"}}, {"function": "src:other"}, {"result": None}]
)
def test_a_stored_record_is_used_only_if_it_is_the_same(change: dict[str, Any]) -> None:
    first = create_record("fetch", **{"result": "1", **change})
    records, rerun_reasons = recover_records(
        export_checkpoint(),
        CHECKPOINT.model_copy(update={"subtasks": (first, *CHECKPOINT.subtasks[1:])}),
    )
    assert (records, rerun_reasons["fetch"]) == ([], NOT_IN_FILE)


def test_a_failed_step_does_not_discard_later_steps() -> None:
    checkpoint = CHECKPOINT.model_copy(
        update={"subtasks": (create_record("a", None), create_record("b"))}
    )
    records, _ = recover_records(build_document(checkpoint, include_outputs=True), None)
    assert [item.name for item in records] == ["a", "b"]


def test_whitespace_order_and_number_formats_are_not_edits(file: Path) -> None:
    loaded = json.loads(file.read_text())
    loaded["subtasks"][0]["output"]["a"][0] = 2  # some tools write this as 2.0
    file.write_text(json.dumps(dict(sorted(loaded.items(), reverse=True))))
    assert read_document(str(file), FLOW).seq == 3


def test_a_truncated_file_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for length in {0, 1, len(content) - 1, *range(0, len(content), 97)}:
        file.write_bytes(content[:length])
        with pytest.raises(ConfigurationError, match="is not JSON, or truncated"):
            read_document(str(file), FLOW)


FIELDS: list[tuple[str | int, ...]] = [
    (field,) for field in CheckpointDocument.model_fields if field not in {"format"}
]
FIELDS += [
    ("subtasks", 0, field)
    for field in ("name", "status", "function", "inputs", "seconds", "output", "context")
]


@pytest.mark.parametrize("place", FIELDS, ids=str)
@pytest.mark.parametrize("edit", ["changed", "gone"])
def test_an_edited_field_is_detected(file: Path, place: tuple[str | int, ...], edit: str) -> None:
    loaded: Any = json.loads(file.read_text())
    *path, last = place
    owner = loaded
    for step in path:
        owner = owner[step]
    if edit == "gone":
        del owner[last]
    else:
        owner[last] = "edited" if owner[last] != "edited" else None
    file.write_text(json.dumps(loaded))
    with pytest.raises(ConfigurationError, match="was edited: its digest does not match"):
        read_document(str(file), FLOW)


def test_an_added_field_is_detected(file: Path) -> None:
    loaded = json.loads(file.read_text())
    file.write_text(json.dumps({**loaded, "more": 1}))
    with pytest.raises(ConfigurationError, match="was edited"):
        read_document(str(file), FLOW)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "is not a checkpoint"),
        ("{}", "is not a checkpoint"),
        ('{"format": "meshpoint-session/1"}', "is not a checkpoint"),
        ('{"format": "meshpoint-checkpoint/2"}', "written by a later release"),
        (f'{{"format": "meshpoint-checkpoint/{"9" * 5000}"}}', "is not a checkpoint"),
        (
            '{"format": "meshpoint-checkpoint/1", "digest": null, "seq": NaN}',
            "its digest does not match",
        ),
        (
            f'{{"format": "meshpoint-checkpoint/1", "digest": "x", "seq": '
            f"{'[' * 900}{']' * 900}}}",
            "does not match",
        ),
        ("\xff", "is not JSON"),
    ],
)
def test_unrelated_files_are_refused(file: Path, text: str, problem: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=problem) as refused:
        read_document(str(file), FLOW)
    assert str(refused.value).count("\n") == 0
    assert str(refused.value).startswith(f"--resume-from: {file} ")


def test_a_valid_file_with_the_wrong_fields_is_refused(file: Path) -> None:
    document = {
        key: value for key, value in json.loads(file.read_text()).items() if key != "digest"
    } | {"seq": "three"}
    file.write_text(json.dumps({**document, "digest": document_digest(document)}))
    with pytest.raises(ConfigurationError, match="is not a checkpoint: seq: "):
        read_document(str(file), FLOW)


def test_a_checkpoint_of_another_agent_is_refused(file: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="is a checkpoint of agent 'flow'; use a checkpoint of 'other'"
    ):
        read_document(str(file), AgentName("other"))


def test_an_endless_file_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "_MAX_BYTES", 1024 * 1024)
    with pytest.raises(ConfigurationError, match="/dev/zero cannot be read: has more than 1 MiB"):
        read_document("/dev/zero", AgentName("flow"))


def test_a_missing_file_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.json cannot be read: No such file"):
        read_document(str(tmp_path / "nothing.json"), FLOW)
