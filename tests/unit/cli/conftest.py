from pathlib import Path

import pytest

from command_result import Command, CommandResult, run_main


@pytest.fixture
def run_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `meshpoint tasks` on a SQLite database of the test."""

    def run(*arguments: str) -> CommandResult:
        url = f"sqlite:///{tmp_path}/tasks.db"
        return run_main(["tasks", *arguments, "--db", url, "--namespace", "test"], capsys)

    return run
