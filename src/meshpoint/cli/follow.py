"""Print the updates of a followed task as they arrive, on standard error."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

from meshpoint.cli.output import print_json, print_note
from meshpoint.model.error_text import escape_unprintable

if TYPE_CHECKING:
    from meshpoint.client.updates import Update


class UpdatePrinter:
    """Prints each update on its own line, and text as it is written.

    The names of peers precede their updates: `flights > seats: working: …`. `database_options`
    name the tasks of the mesh in printed commands.
    """

    def __init__(self, *, as_json: bool, database_options: str) -> None:
        self._as_json, self._database_options = as_json, database_options
        self._open_text: tuple[str, str | None] | None = None  # its prefix and task id

    def print_sent(self, task_id: str) -> None:
        """Print the task id, so that the reader can follow the task again."""
        if self._as_json:
            print_json({"kind": "sent", "task_id": task_id}, one_line=True)
        else:
            print_note(f"task {task_id}")

    def print(self, update: Update) -> None:
        """Print an update before the end. With JSON, on standard output."""
        if self._as_json:
            print_json(update.model_dump(mode="json"), one_line=True)
            return
        prefix = f"{' > '.join(update.path)}: " if update.path else ""
        if update.reset:
            self.end_text()
            print_note(f"{prefix}started again: what follows may repeat earlier updates")
        if update.kind == "text":
            self._print_text(update.text, prefix, update.task_id)
            return
        self.end_text()
        if update.kind == "status":
            print_note(f"{prefix}{update.state}: {_describe(update.message)}")
        elif update.kind == "artifact":
            print_note(f"{prefix}artifact: {_describe(update.artifact)}")
        elif update.kind == "question":
            prompt = f" {update.prompt}" if update.prompt else ""
            print_note(f"{prefix}question {update.name}:{prompt}")
            command = ["meshpoint", "tasks", "complete", update.task_id or "", update.question_id]
            print_note(
                f"{prefix}answer it with: {shlex.join(command)} VALUE {self._database_options}"
            )

    def _print_text(self, text: str, prefix: str, task_id: str | None) -> None:
        if self._open_text != (prefix, task_id):
            self.end_text()
            _write(f"{prefix}text: ")
            self._open_text = prefix, task_id
        _write(text)

    def end_text(self) -> None:
        """End the line of the text that was printed last."""
        if self._open_text is not None:
            self._open_text = None
            _write("\n")


def _describe(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _write(text: str) -> None:
    sys.stderr.write(escape_unprintable(text, allowed="\n\t"))
    sys.stderr.flush()
