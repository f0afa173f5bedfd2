"""Checkpoints as files: names and digests of finished subtasks, and optionally their results.

    {"format": "meshpoint-checkpoint/1", "agent": …,
     "subtasks": [{"name": …, "status": …, "inputs": …}, …],
     "outputs": false, "removed": [], "digest": "sha256:…"}

The digest covers everything else, so that truncated or edited files are detected. Secrets are left
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from meshpoint.errors import ConfigurationError
from meshpoint.exec.canonical import json_digest
from meshpoint.input_files import read_bounded
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.secrets import without_secrets
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus
from meshpoint.model.typed import cause_of, first_problem

FORMAT = "meshpoint-checkpoint/1"
_FORMAT = re.compile(r"meshpoint-checkpoint/([1-9][0-9]*)")
_OPTION = "--resume-from"
_MAX_BYTES = 256 * 1024 * 1024
_EXPORT_AGAIN_FIX = "export it again"


class _ExportModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ExportedSubtask(_ExportModel):
    """One subtask. `output` and `context` (its changes to the task's context) are optional."""

    name: str
    status: SubtaskStatus
    function: str | None
    inputs: dict[str, str]
    seconds: float
    output: JsonValue = None
    context: JsonValue = None

    @property
    def has_output(self) -> bool:
        """Whether the result is included, even if it is null."""
        return "output" in self.model_fields_set


class CheckpointDocument(_ExportModel):
    """An exported checkpoint. `removed` has JSON pointers to the removed secrets."""

    format: Literal["meshpoint-checkpoint/1"]
    agent: AgentName
    agent_version: str | None
    operation_id: TaskId
    session: str | None
    seq: int
    created_at: datetime
    input_digest: str | None
    subtasks: list[ExportedSubtask]
    outputs: bool
    removed: list[str]
    digest: str

    def has_removed_secrets(self, index: int) -> bool:
        """Whether secrets were removed from the subtask at this index."""
        return any(place.startswith(f"/subtasks/{index}/") for place in self.removed)


def build_document(
    checkpoint: AgentCheckpoint,
    *,
    include_outputs: bool = False,
    secret_keys: Sequence[str] = (),
    session: str | None = None,
    input_digest: str | None = None,
) -> CheckpointDocument:
    """Build the document for exporting `checkpoint`.

    Without outputs it only lists the subtasks. A resume then takes the results from the store, or
    runs the subtasks again.

    Args:
        checkpoint: The checkpoint to export.
        include_outputs: Include the subtasks' results, except for values whose types are marked as
            `Secret` or whose keys look like secrets. They may still contain personal data.
        secret_keys: More keys whose values are left out.
        session: Id of the `meshpoint exec` session that the checkpoint belongs to.
        input_digest: Digest of the operation's input.
    """
    removed: list[str] = []
    subtasks = []
    for index, record in enumerate(checkpoint.subtasks):
        subtask: dict[str, Any] = record.model_dump(
            mode="json", include={"name", "status", "function", "inputs", "seconds"}
        )
        if include_outputs and record.result is not None:
            results, paths = _results_without_secrets(record, secret_keys)
            subtask |= results
            removed += [f"/subtasks/{index}{place}" for place in paths]
        subtasks.append(subtask)
    rest: dict[str, Any] = {
        "format": FORMAT,
        "agent": checkpoint.agent,
        "agent_version": checkpoint.agent_version,
        "operation_id": checkpoint.operation_id,
        "session": session,
        "seq": checkpoint.seq,
        "created_at": (checkpoint.checkpoint_time or datetime.now(UTC)).isoformat(),
        "input_digest": input_digest,
        "subtasks": subtasks,
        "outputs": include_outputs,
        "removed": removed,
    }
    return CheckpointDocument.model_validate({**rest, "digest": json_digest(rest)})


def _results_without_secrets(
    record: SubtaskRecord, secret_keys: Sequence[str]
) -> tuple[dict[str, JsonValue], list[str]]:
    """Return output and context of a completed subtask without secrets, and pointers to these."""
    assert record.result is not None
    output, output_paths = without_secrets(json.loads(record.result), record.secrets, secret_keys)
    results, removed = {"output": output}, [f"/output{place}" for place in output_paths]
    if record.context is not None:
        results["context"], context_paths = without_secrets(json.loads(record.context), (), secret_keys)
        removed += [f"/context{place}" for place in context_paths]
    return results, removed


def document_json(document: CheckpointDocument) -> dict[str, JsonValue]:
    """Convert `document` to JSON."""
    data: dict[str, JsonValue] = document.model_dump(mode="json", exclude_unset=True)
    return data | {"created_at": document.created_at.isoformat()}


def document_text(document: CheckpointDocument) -> str:
    """Serialize `document` for a file."""
    return json.dumps(document_json(document), ensure_ascii=False, indent=2)


def read_document(path: Path, agent: AgentName) -> CheckpointDocument:
    """Read a checkpoint of `agent` from a file.

    Raises:
        ConfigurationError: The file cannot be used. The message gives the reason.
    """
    document = _validate(_load_json(path), path)
    if document.agent != agent:
        raise _invalid_file(path, f"is a checkpoint of agent {document.agent!r}", f"use a checkpoint of {agent!r}")
    return document


def _load_json(path: Path) -> dict[str, JsonValue]:
    try:
        loaded = json.loads(read_bounded(path, _MAX_BYTES))
    except OSError as error:
        raise _invalid_file(
            path,
            f"cannot be read: {error.strerror}",
            "name a file written by `--export`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _invalid_file(path, f"is not JSON, or truncated: {error}", _EXPORT_AGAIN_FIX) from error
    if not isinstance(loaded, dict):
        raise _invalid_file(path, "is not a checkpoint", "name a file written by `--export`")
    return loaded


def _validate(loaded: dict[str, JsonValue], path: Path) -> CheckpointDocument:
    format_match = _FORMAT.fullmatch(str(loaded.get("format")))
    if format_match is None:
        raise _invalid_file(path, "is not a checkpoint", "name a file written by `--export`")
    if int(format_match[1]) > 1:
        problem = f"has format {loaded['format']}: it was written by a later release"
        raise _invalid_file(path, problem, "use that release, or export it with this one")
    rest = {key: value for key, value in loaded.items() if key != "digest"}
    digest = _digest_or_none(rest)
    if digest is None or loaded.get("digest") != digest:
        raise _invalid_file(path, "was edited: its digest does not match", _EXPORT_AGAIN_FIX)
    try:
        return CheckpointDocument.model_validate_json(json.dumps(loaded))
    except ValidationError as error:
        raise _invalid_file(path, f"is not a checkpoint: {first_problem(error)}", _EXPORT_AGAIN_FIX) from cause_of(
            error
        )


def _digest_or_none(rest: dict[str, JsonValue]) -> str | None:
    try:
        return json_digest(rest)
    except (ValueError, RecursionError):  # NaN or infinite numbers, or extreme nesting
        return None


def _invalid_file(path: Path, problem: str, fix: str) -> ConfigurationError:
    return ConfigurationError(_OPTION, f"{path} {problem}", fix)
