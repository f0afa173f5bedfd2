"""Working memory of an agent under `exec`: kept in the session, left out of exported files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from command_result import Command

from .flows import write_flow

FLOW = """
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


@pytest.fixture
def keeping(flow: Command) -> Command:
    """Runs the agent with input 3."""
    return partial(flow, "--input", "3", agent="keeping")


def mend_flow(folder: Path) -> None:
    """Let the agent succeed from now on. Its subtasks do not change, so their records count."""
    write_flow(folder, FLOW.replace("FAILS = True", "FAILS = False"))


def test_a_resumed_session_has_its_memory(keeping: Command, folder: Path) -> None:
    assert keeping().code == 4
    mend_flow(folder)
    done = keeping("--resume")
    assert (done.code, done.json["output"]) == (0, ["1", "sql", True, False])


@pytest.mark.parametrize("home_option", [[], ["--home", "elsewhere"]], ids=["here", "elsewhere"])
def test_a_session_resumed_from_a_file_reports_that_its_memory_is_missing(
    keeping: Command, folder: Path, home_option: list[str]
) -> None:
    assert keeping("--export", "kept.json", "--include-outputs").code == 4
    mend_flow(folder)
    done = keeping("--resume-from", "kept.json", *home_option)
    assert [status for _, status, _ in done.steps] == ["reused", "completed"]
    assert (done.code, done.json["output"]) == (0, [None, "none", False, True])
