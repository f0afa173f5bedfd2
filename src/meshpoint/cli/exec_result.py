"""Print and export the result of `meshpoint exec`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpoint.cli.output import print_error, print_json, print_note
from meshpoint.cli.steps import print_steps
from meshpoint.errors import ConfigurationError

if TYPE_CHECKING:
    from meshpoint.exec.checkpoint_file import CheckpointDocument
    from meshpoint.exec.running import AttemptResult


def checkpoint_document(
    result: AttemptResult, secret_keys: Sequence[str], *, include_outputs: bool
) -> CheckpointDocument | None:
    """Build the export of an attempt that did not complete; `None` if it has no checkpoint."""
    from meshpoint.exec.checkpoint_file import build_document

    if result.checkpoint is None:
        return None
    document = build_document(
        result.checkpoint,
        include_outputs=include_outputs,
        secret_keys=secret_keys,
        session=result.session.id,
        input_digest=result.session.input_digest,
    )
    if include_outputs:
        notice = f"{len(document.removed)} secret values were removed from the exported outputs"
        print_note(f"warning: {notice}, which may still contain personal data")
    return document


def write_export(document: CheckpointDocument | None, file: Path) -> None:
    """Write `document` to `file`, readable only by its owner.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    from meshpoint.exec.checkpoint_file import document_text
    from meshpoint.exec.files import write_atomically

    if document is None:
        print_note(f"nothing is written to {file}: there is no checkpoint to resume from")
        return
    try:
        write_atomically(file, document_text(document) + "\n")
    except OSError as error:
        problem = f"{file} cannot be written: {error.strerror}"
        raise ConfigurationError("--export", problem, "name a file in a folder that you can write to") from error
    print_note(f"wrote {file}")


def print_result(
    result: AttemptResult, document: CheckpointDocument | None, resume_command: str, *, as_json: bool
) -> None:
    """Print the output on standard output, and everything else on standard error.

    `resume_command` is the command line that resumes the session.
    """
    if as_json:
        print_json(_result_json(result, document, resume_command))
        return
    from meshpoint.model.outcomes import Ok

    print_steps(result.steps)
    match result.outcome:
        case Ok(value=value):
            print_json(value)
        case failed:
            _print_traceback(result)
            print_error(f"{result.session.agent} {result.status.value}: {failed.message}")
            print_note(f"resume with: {resume_command}")


def _print_traceback(result: AttemptResult) -> None:
    """Print the traceback of a failure, for debugging."""
    details = result.checkpoint.error_details if result.checkpoint is not None else None
    if details and result.status == "failed":
        print_note(str(details.get("traceback", "")))


def _result_json(result: AttemptResult, document: CheckpointDocument | None, resume_command: str) -> dict[str, Any]:
    from meshpoint.exec.checkpoint_file import document_json
    from meshpoint.model.outcomes import Ok

    session, outcome = result.session, result.outcome
    succeeded = isinstance(outcome, Ok)
    return {
        "success": succeeded,
        "session": session.id,
        "attempt": result.attempt_number,
        "operation_id": session.operation_id,
        "agent": session.agent,
        "status": result.status.value,
        "steps": [step.model_dump(mode="json") for step in result.steps],
        "output": outcome.value if isinstance(outcome, Ok) else None,
        "error": None if isinstance(outcome, Ok) else {"kind": outcome.kind.value, "message": outcome.message},
        "checkpoint": None if document is None else document_json(document),
        "resume": None if succeeded else resume_command,
    }
