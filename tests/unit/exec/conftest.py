"""Runs the flow in the constant `FLOW` of a test module with `meshpoint exec`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from command_result import Command, CommandResult, run_main

from .flows import MODULE, write_flow


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The working directory, with the flow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_flow(tmp_path, request.module.FLOW)
    return tmp_path


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command, which imports the flow anew."""

    def run(*arguments: str) -> CommandResult:
        sys.modules.pop(MODULE, None)
        importlib.invalidate_caches()
        return run_main(arguments, capsys)

    return run


@pytest.fixture
def flow(cli: Command) -> Command:
    """Runs `meshpoint exec` on an agent of the flow, with JSON output."""

    def run(*arguments: str, agent: str = "flow") -> CommandResult:
        return cli("exec", f"{MODULE}:{agent}", "--json", *arguments)

    return run
