"""Output and exit code of a `meshpoint` command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from meshpoint.cli import main


@dataclass(frozen=True)
class CommandResult:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def steps(self) -> list[tuple[str, str, str | None]]:
        """Name, status and reason of each step that `meshpoint exec --json` reports."""
        return [(step["name"], step["status"], step["why"]) for step in self.json["steps"]]


Command: TypeAlias = Callable[..., CommandResult]


def run_main(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> CommandResult:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    captured = capsys.readouterr()
    return CommandResult(int(exited.value.code or 0), captured.out, captured.err)
