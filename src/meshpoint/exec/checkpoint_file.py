"""A checkpoint as a file: what was done, by name and digest, and with its results only when somebody asks for them.

    {"format": "meshpoint-checkpoint/1", "agent": …, "subtasks": [{"name": …, "status": …, "inputs": …}, …],
     "outputs": false, "removed": [], "digest": "sha256:…"}

The digest is over everything else, so that a file that was cut off or edited is known for it. Secrets stay out.
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
from meshpoint.exec.canonical import digest_of
from meshpoint.input_files import read_bounded
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.secrets import without_secrets
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus
from meshpoint.model.typed import cause_of, first_problem

FORMAT = "meshpoint-checkpoint/1"
_FORMAT = re.compile(r"meshpoint-checkpoint/([1-9][0-9]*)")
_KEY = "--resume-from"
_LARGEST = 256 * 1024 * 1024  # bytes
_EXPORT_AGAIN = "export it again"


class _Exported(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ExportedSubtask(_Exported):
    """One subtask. `output` and `context` (what it changed on the task's context) are there only with outputs."""

    name: str
    status: SubtaskStatus
    function: str | None
    inputs: dict[str, str]
    seconds: float
    output: JsonValue = None
    context: JsonValue = None

    @property
    def has_output(self) -> bool:
        """Whether its result is here, be it null."""
        return "output" in self.model_fields_set


class Document(_Exported):
    """An exported checkpoint. `removed` are the places in it where a secret was, as JSON pointers."""

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

    def stripped(self, index: int) -> bool:
        """Whether something was removed from the subtask at this place."""
        return any(place.startswith(f"/subtasks/{index}/") for place in self.removed)


def exported(
    checkpoint: AgentCheckpoint,
    *,
    include_outputs: bool = False,
    secret_keys: Sequence[str] = (),
    session: str | None = None,
    input_digest: str | None = None,
) -> Document:
    """`checkpoint` to be written to a file.

    Without outputs it says what was done, and a resume finds the results in the store or runs the subtasks again.

    Args:
        checkpoint: what is exported.
        include_outputs: with the subtasks' results, less what their types mark as `Secret` and what stands under a
            key that looks like one. They may still hold personal data.
        secret_keys: further keys whose values stay out.
        session: the one of `meshpoint exec` that it belongs to.
        input_digest: that of the operation's input.
    """
    removed: list[str] = []
    subtasks = []
    for index, record in enumerate(checkpoint.subtasks):
        subtask: dict[str, Any] = record.model_dump(
            mode="json", include={"name", "status", "function", "inputs", "seconds"}
        )
        if include_outputs and record.result is not None:
            results, places = _results(record, secret_keys)
            subtask |= results
            removed += [f"/subtasks/{index}{place}" for place in places]
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
    return Document.model_validate({**rest, "digest": digest_of(rest)})


def _results(record: SubtaskRecord, secret_keys: Sequence[str]) -> tuple[dict[str, JsonValue], list[str]]:
    """The output and the context of a completed subtask without their secrets, and where those were."""
    assert record.result is not None
    output, in_output = without_secrets(json.loads(record.result), record.secrets, secret_keys)
    results, places = {"output": output}, [f"/output{place}" for place in in_output]
    if record.context is not None:
        results["context"], in_context = without_secrets(json.loads(record.context), (), secret_keys)
        places += [f"/context{place}" for place in in_context]
    return results, places


def plain(document: Document) -> dict[str, JsonValue]:
    """`document` as JSON."""
    told: dict[str, JsonValue] = document.model_dump(mode="json", exclude_unset=True)
    return told | {"created_at": document.created_at.isoformat()}


def written(document: Document) -> str:
    """`document` as the text of a file."""
    return json.dumps(plain(document), ensure_ascii=False, indent=2)


def read(path: Path, agent: AgentName) -> Document:
    """The checkpoint of `agent` in a file.

    Raises:
        ConfigurationError: it cannot be used; says why.
    """
    document = _checked(_loaded(path), path)
    if document.agent != agent:
        raise _refused(path, f"is a checkpoint of agent {document.agent!r}", f"name one of {agent!r}")
    return document


def _loaded(path: Path) -> dict[str, JsonValue]:
    try:
        loaded = json.loads(read_bounded(path, _LARGEST))
    except OSError as error:
        raise _refused(
            path,
            f"cannot be read: {error.strerror}",
            "name a file that `--export` has written",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is not JSON, or cut off: {error}", _EXPORT_AGAIN) from error
    if not isinstance(loaded, dict):
        raise _refused(path, "is no checkpoint", "name a file that `--export` has written")
    return loaded


def _checked(loaded: dict[str, JsonValue], path: Path) -> Document:
    written_as = _FORMAT.fullmatch(str(loaded.get("format")))
    if written_as is None:
        raise _refused(path, "is no checkpoint", "name a file that `--export` has written")
    if int(written_as[1]) > 1:
        problem = f"has format {loaded['format']}: it was written by a later release"
        raise _refused(path, problem, "use that release, or export it with this one")
    rest = {key: value for key, value in loaded.items() if key != "digest"}
    digest = _digest(rest)
    if digest is None or loaded.get("digest") != digest:
        raise _refused(path, "was edited: its digest does not match", _EXPORT_AGAIN)
    try:
        return Document.model_validate_json(json.dumps(loaded))
    except ValidationError as error:
        raise _refused(path, f"is no checkpoint: {first_problem(error)}", _EXPORT_AGAIN) from cause_of(error)


def _digest(rest: dict[str, JsonValue]) -> str | None:
    try:
        return digest_of(rest)
    except (ValueError, RecursionError):  # numbers that JSON does not have, or nesting that nobody exports
        return None


def _refused(path: Path, problem: str, fix: str) -> ConfigurationError:
    return ConfigurationError(_KEY, f"{path} {problem}", fix)
