"""Working memory of an agent under `exec`: kept in the session, left out of exported files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_result import run_main

MEMORY_FLOW = """
from meshpoint import agent


@agent("keeping", version="1", subtasks=["write", "read"])
async def keeping(ctx, n: int) -> list:
    async def write() -> int:
        await ctx.memory.set("x", "1")
        return n

    async def read() -> list:
        found = await ctx.memory.get("x")
        how = ctx.memory.recovery
        if FAILS:
            raise RuntimeError("not today")
        return [found and found.decode(), how.source.value, how.verified, how.behind]

    await ctx.subtask("write", write)
    return await ctx.subtask("read", read)


FAILS = True
"""

Exec = Callable[..., tuple[int, Any]]


@pytest.fixture
def run_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Exec:
    """Runs `meshpoint exec` on the agent with input 3; returns exit code and printed JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "tested_keeping.py").write_text(MEMORY_FLOW)

    def run(*arguments: str) -> tuple[int, Any]:
        sys.modules.pop("tested_keeping", None)
        importlib.invalidate_caches()
        command = ("exec", "tested_keeping:keeping", "--json", "--input", "3", *arguments)
        result = run_main(command, capsys)
        return result.code, result.json

    return run


def mend_flow(folder: Path) -> None:
    """Let the agent succeed from now on. Its subtasks do not change, so their records count."""
    (folder / "tested_keeping.py").write_text(MEMORY_FLOW.replace("FAILS = True", "FAILS = False"))


def test_a_resumed_session_has_its_memory(run_flow: Exec, tmp_path: Path) -> None:
    assert run_flow()[0] == 4
    mend_flow(tmp_path)
    code, done = run_flow("--resume")
    assert (code, done["output"]) == (0, ["1", "sql", True, False])


@pytest.mark.parametrize("home_option", [[], ["--home", "elsewhere"]], ids=["here", "elsewhere"])
def test_a_session_resumed_from_a_file_reports_that_its_memory_is_missing(
    run_flow: Exec, tmp_path: Path, home_option: list[str]
) -> None:
    assert run_flow("--export", "kept.json", "--include-outputs")[0] == 4
    mend_flow(tmp_path)
    code, done = run_flow("--resume-from", "kept.json", *home_option)
    assert [step["status"] for step in done["steps"]] == ["reused", "completed"]
    assert (code, done["output"]) == (0, [None, "none", False, True])
