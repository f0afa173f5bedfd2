"""Checkpoints as files: names and digests of finished subtasks, and optionally their results.

    {"format": "meshpoint-checkpoint/1", "agent": …,
     "subtasks": [{"name": …, "status": …, "inputs": …}, …],
     "outputs": false, "removed": [], "digest": "sha256:…"}

The digest covers everything else, so that truncated or edited files are detected. Secrets are left
out. With encryption keys, the file is encrypted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, JsonValue, ValidationError

from meshpoint.errors import ConfigurationError, KeyMissing
from meshpoint.files import read_bounded, read_stream, write_atomically
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.json_values import document_digest
from meshpoint.model.secrets import remove_secrets
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus
from meshpoint.ports.sealer import Place, Sealer

_FORMAT = "meshpoint-checkpoint/1"
_FORMAT_PATTERN = re.compile(r"meshpoint-checkpoint/([1-9][0-9]{0,8})")
_OPTION = "--resume-from"
_MAX_BYTES = 256 * 1024 * 1024
_EXPORT_AGAIN_FIX = "export it again"
_NAME_FILE_FIX = "name a file written by `--export`"


class ExportedSubtask(BaseModel, extra="forbid", frozen=True):
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


class CheckpointDocument(BaseModel, extra="forbid", frozen=True):
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
            results, paths = _without_secrets(record, record.result, secret_keys)
            subtask |= results
            removed += [f"/subtasks/{index}{place}" for place in paths]
        subtasks.append(subtask)
    rest: dict[str, Any] = {
        "format": _FORMAT,
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
    return CheckpointDocument.model_validate({**rest, "digest": document_digest(rest)})


def _without_secrets(
    record: SubtaskRecord, result: str, secret_keys: Sequence[str]
) -> tuple[dict[str, JsonValue], list[str]]:
    """Return output and context of a completed subtask without secrets, and pointers to these."""
    output, output_paths = remove_secrets(json.loads(result), record.secrets, secret_keys)
    results, removed = {"output": output}, [f"/output{place}" for place in output_paths]
    if record.context is not None:
        results["context"], context_paths = remove_secrets(
            json.loads(record.context), (), secret_keys
        )
        removed += [f"/context{place}" for place in context_paths]
    return results, removed


def document_json(document: CheckpointDocument) -> dict[str, JsonValue]:
    """Convert `document` to JSON."""
    data: dict[str, JsonValue] = document.model_dump(mode="json", exclude_unset=True)
    return data | {"created_at": document.created_at.isoformat()}


def document_text(document: CheckpointDocument) -> str:
    """Serialize `document` for a file."""
    return json.dumps(document_json(document), ensure_ascii=False, indent=2)


def write_document(
    document: CheckpointDocument, path: Path, option: str, fix: str, sealer: Sealer | None = None
) -> None:
    """Write `document` to a file that only its owner can read. With a sealer, it is encrypted.

    Raises:
        ConfigurationError: The file cannot be written; the message names `option` and `fix`.
    """
    from meshpoint.wiring import seal_file  # imports the engine

    content = (document_text(document) + "\n").encode()
    try:
        write_atomically(path, seal_file(sealer, content, _place(document.agent)))
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise ConfigurationError(option, problem, fix) from error


def _place(agent: AgentName) -> Place:
    return ("export.checkpoint", agent)


def read_document(
    source: str, agent: AgentName, sealer: Sealer | None = None
) -> CheckpointDocument:
    """Read a checkpoint of `agent`.

    It may also be the result of `meshpoint exec --json`, which contains the checkpoint.

    Args:
        source: The name of a file, `-` for standard input, or the JSON text itself.
        agent: The agent to resume.
        sealer: Decrypts the file.

    Raises:
        ConfigurationError: The checkpoint cannot be used. The message gives the reason.
    """
    label, content = _read_source(source)
    content = _open(label, content, agent, sealer)
    document = _validate(_find_checkpoint(_load_json(label, content), label), label)
    if document.agent != agent:
        raise _invalid_source(
            label,
            f"is a checkpoint of agent {document.agent!r}",
            f"use a checkpoint of {agent!r}",
        )
    return document


def _read_source(source: str) -> tuple[str, bytes]:
    """Return a label for the source, used in messages, and its content."""
    if source.lstrip().startswith("{"):
        return "the given JSON", source.encode("utf-8", "surrogateescape")
    label = "standard input" if source == "-" else source
    try:
        if source != "-":
            return label, read_bounded(Path(source), _MAX_BYTES)
        if sys.stdin.isatty():
            raise _invalid_source(label, "is a terminal", "pipe a checkpoint into the command")
        return label, read_stream(sys.stdin.buffer, _MAX_BYTES)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise _invalid_source(label, problem, _NAME_FILE_FIX) from error


def _open(label: str, content: bytes, agent: AgentName, sealer: Sealer | None) -> bytes:
    from meshpoint.wiring import open_file  # imports the engine

    try:
        return open_file(sealer, content, _place(agent))
    except KeyMissing as error:
        raise _invalid_source(
            label, f"is {error}", "set MESHPOINT_AGENT__ENCRYPTION_KEYS"
        ) from error
    except ValueError as error:
        problem = f"is encrypted, and was changed or is not a checkpoint of {agent!r}"
        raise _invalid_source(label, problem, _EXPORT_AGAIN_FIX) from error


def _load_json(label: str, content: bytes) -> dict[str, JsonValue]:
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON, or truncated: {error}"
        raise _invalid_source(label, problem, _EXPORT_AGAIN_FIX) from error
    if not isinstance(loaded, dict):
        raise _invalid_source(label, "is not a checkpoint", _NAME_FILE_FIX)
    return loaded


def _find_checkpoint(loaded: dict[str, JsonValue], label: str) -> dict[str, JsonValue]:
    """Return the checkpoint inside the result of an attempt, or `loaded` itself."""
    if "format" in loaded or "checkpoint" not in loaded:
        return loaded
    inner = loaded["checkpoint"]
    if not isinstance(inner, dict):
        problem = "is the result of an attempt without a checkpoint"
        raise _invalid_source(label, problem, "start the agent without --resume-from")
    return inner


def _validate(loaded: dict[str, JsonValue], label: str) -> CheckpointDocument:
    format_match = _FORMAT_PATTERN.fullmatch(str(loaded.get("format")))
    if format_match is None:
        raise _invalid_source(label, "is not a checkpoint", _NAME_FILE_FIX)
    if int(format_match[1]) > 1:
        problem = f"has format {loaded['format']}: it was written by a later release"
        raise _invalid_source(label, problem, "use that release, or export it with this one")
    rest = {key: value for key, value in loaded.items() if key != "digest"}
    digest = _digest_or_none(rest)
    if digest is None or loaded.get("digest") != digest:
        raise _invalid_source(label, "was edited: its digest does not match", _EXPORT_AGAIN_FIX)
    try:
        return CheckpointDocument.model_validate_json(json.dumps(loaded))
    except ValidationError as error:
        problem = f"is not a checkpoint: {first_problem(error)}"
        raise _invalid_source(label, problem, _EXPORT_AGAIN_FIX) from loggable_cause(error)


def _digest_or_none(rest: dict[str, JsonValue]) -> str | None:
    try:
        return document_digest(rest)
    except (ValueError, RecursionError):  # NaN or infinite numbers, or extreme nesting
        return None


def _invalid_source(label: str, problem: str, fix: str) -> ConfigurationError:
    return ConfigurationError(_OPTION, f"{label} {problem}", fix)
