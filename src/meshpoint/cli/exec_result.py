"""What `meshpoint exec` tells of an attempt, and what it exports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpoint.cli.output import print_error, print_json, print_note
from meshpoint.cli.steps import print_steps
from meshpoint.errors import ConfigurationError

if TYPE_CHECKING:
    from meshpoint.exec.checkpoint_file import Document
    from meshpoint.exec.running import Finished


def document_of(finished: Finished, secret_keys: Sequence[str], *, include_outputs: bool) -> Document | None:
    """The checkpoint of an attempt that did not complete, to be exported; None: it has none."""
    from meshpoint.exec.checkpoint_file import exported

    if finished.checkpoint is None:
        return None
    document = exported(
        finished.checkpoint,
        include_outputs=include_outputs,
        secret_keys=secret_keys,
        session=finished.session.id,
        input_digest=finished.session.input_digest,
    )
    if include_outputs:
        removed = f"{len(document.removed)} secret values are left out of the exported outputs"
        print_note(f"warning: {removed}, which may still hold personal data")
    return document


def export(document: Document | None, file: Path) -> None:
    """Write `document` to `file`, which only its owner can read.

    Raises:
        ConfigurationError: it cannot be written.
    """
    from meshpoint.exec.checkpoint_file import written
    from meshpoint.exec.files import write_whole

    if document is None:
        print_note(f"nothing is written to {file}: there is no checkpoint to go on from")
        return
    try:
        write_whole(file, written(document) + "\n")
    except OSError as error:
        problem = f"{file} cannot be written: {error.strerror}"
        raise ConfigurationError("--export", problem, "name a file in a folder of yours") from error
    print_note(f"wrote {file}")


def tell(finished: Finished, document: Document | None, resume: str, *, as_json: bool) -> None:
    """Print the result: the output on standard output, what else there is to know on standard error.

    `resume` is the command line that goes on.
    """
    if as_json:
        print_json(_report(finished, document, resume))
        return
    from meshpoint.model.outcomes import Ok

    print_steps(finished.steps)
    match finished.outcome:
        case Ok(value=value):
            print_json(value)
        case failed:
            _tell_where(finished)
            print_error(f"{finished.session.agent} {finished.ending.value}: {failed.message}")
            print_note(f"resume with: {resume}")


def _tell_where(finished: Finished) -> None:
    """The traceback, for whoever repairs the flow."""
    details = finished.checkpoint.error_details if finished.checkpoint is not None else None
    if details and finished.ending == "failed":
        print_note(str(details.get("traceback", "")))


def _report(finished: Finished, document: Document | None, resume: str) -> dict[str, Any]:
    from meshpoint.exec.checkpoint_file import plain
    from meshpoint.model.outcomes import Ok

    session, outcome = finished.session, finished.outcome
    succeeded = isinstance(outcome, Ok)
    return {
        "success": succeeded,
        "session": session.id,
        "attempt": finished.number,
        "operation_id": session.operation_id,
        "agent": session.agent,
        "status": finished.ending.value,
        "steps": [step.model_dump(mode="json") for step in finished.steps],
        "output": outcome.value if isinstance(outcome, Ok) else None,
        "error": None if isinstance(outcome, Ok) else {"kind": outcome.kind.value, "message": outcome.message},
        "checkpoint": None if document is None else plain(document),
        "resume": None if succeeded else resume,
    }
