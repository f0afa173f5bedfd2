"""Working memory of an agent under `exec`: kept in the session, left out of exported files."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshpoint.cli import main

KEEPING = """
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
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Exec:
    """Runs `meshpoint exec` on the agent with input 3; returns exit code and printed JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "tested_keeping.py").write_text(KEEPING)

    def run(*arguments: str) -> tuple[int, Any]:
        sys.modules.pop("tested_keeping", None)
        importlib.invalidate_caches()
        with pytest.raises(SystemExit) as exited:
            main(("exec", "tested_keeping:keeping", "--json", "--input", "3", *arguments))
        return int(exited.value.code or 0), json.loads(capsys.readouterr().out)

    return run


def mend(folder: Path) -> None:
    """Let the agent succeed from now on. Its subtasks do not change, so their records count."""
    (folder / "tested_keeping.py").write_text(KEEPING.replace("FAILS = True", "FAILS = False"))


def test_a_resumed_session_has_the_memory_that_it_had(keeping: Exec, tmp_path: Path) -> None:
    assert keeping()[0] == 4
    mend(tmp_path)
    code, done = keeping("--resume")
    assert (code, done["output"]) == (0, ["1", "sql", True, False])


@pytest.mark.parametrize("where", [[], ["--home", "elsewhere"]], ids=["here", "elsewhere"])
def test_a_file_has_no_memory_and_the_agent_is_told_so(keeping: Exec, tmp_path: Path, where: list[str]) -> None:
    assert keeping("--export", "kept.json", "--include-outputs")[0] == 4
    mend(tmp_path)
    code, done = keeping("--resume-from", "kept.json", *where)
    assert [step["status"] for step in done["steps"]] == ["reused", "completed"]
    assert (code, done["output"]) == (0, [None, "none", False, True])
