"""`ctx.step` under `meshpoint exec`: a killed attempt keeps its steps; a new one runs them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_result import Command

from .flows import MODULE, read_effects, write_flow

FLOW = """
import os
import signal
from pathlib import Path

from meshpoint import Peer, StatefulAgent, StepFailed, agent

helper_peer = Peer("helper", int, int)


@agent("flow", version="1")
async def flow(ctx, n: int) -> list:
    stop_at("start")
    first = await ctx.step("first", add_one, n)
    try:
        await ctx.step("broken", fail)
    except StepFailed as error:
        caught = str(error)
    stop_at("before the subtask")
    part = await ctx.subtask("part", run_part, ctx, first)
    answer = await helper_peer(part)
    stop_at("after the call")
    last = await ctx.step("last", add_one, answer)
    if Path("fails").exists():
        raise RuntimeError("not today")
    return [first, part, answer, last, caught]


async def run_part(ctx, number: int) -> int:
    return await ctx.step("inner", add_one, number)


@agent("helper", version="1")
async def helper(ctx, number: int) -> int:
    return await ctx.step("help", add_one, number)


class Plain(StatefulAgent[int, None, int]):
    name = "plain"

    async def on_request(self, ctx, n: int):
        first = await ctx.step("first", add_one, n)
        stop_at("after a step")
        return self.done(await ctx.step("last", add_one, first))


def add_one(number: int) -> int:
    ran(str(number))
    return number + 1


def fail() -> None:
    ran("broken")
    raise ValueError("out of order")


def ran(effect):
    with Path("effects").open("a") as file:
        file.write(effect + "\\n")


def stop_at(place):
    killed = Path("kill")
    if killed.exists() and killed.read_text() == place:
        killed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""
_OUTPUT = [2, 3, 4, 5, "step 'broken' failed: ValueError: out of order"]
_EFFECTS = ["1", "broken", "2", "3", "4"]
_HELPER = ("--with", f"{MODULE}:helper")


def kill_attempt(folder: Path, place: str, *options: str, agent: str = "flow") -> None:
    """Run an attempt in a process that is killed at `place`."""
    (folder / "kill").write_text(place)
    command = [sys.executable, "-m", "meshpoint.cli", "exec", f"{MODULE}:{agent}", *options]
    ended = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_steps_run_once_in_an_attempt(flow: Command, folder: Path) -> None:
    done = flow("--input", "1", *_HELPER)
    assert (done.code, done.json["output"]) == (0, _OUTPUT)
    assert read_effects(folder) == _EFFECTS


@pytest.mark.parametrize(
    "places",
    [
        ["before the subtask"],
        ["after the call"],
        ["before the subtask", "after the call"],
        ["after the call", "start"],
    ],
    ids=", then ".join,
)
def test_a_killed_attempt_keeps_its_steps(flow: Command, folder: Path, places: list[str]) -> None:
    """Failures are records too."""
    for number, place in enumerate(places):
        resume = ("--resume",) if number else ()
        kill_attempt(folder, place, "--input", "1", *_HELPER, *resume)
    done = flow("--input", "1", *_HELPER, "--resume")
    assert (done.code, done.json["output"]) == (0, _OUTPUT)
    assert done.json["attempt"] == len(places) + 1
    assert read_effects(folder) == _EFFECTS


def test_an_agent_without_subtasks_keeps_its_steps(flow: Command, folder: Path) -> None:
    kill_attempt(folder, "after a step", "--input", "1", agent="Plain")
    done = flow("--input", "1", "--resume", agent="Plain")
    assert (done.code, done.json["output"]) == (0, 3)
    assert read_effects(folder) == ["1", "2"]


@pytest.mark.parametrize("change", ["flow", "input"])
def test_a_changed_attempt_runs_its_steps_again(flow: Command, folder: Path, change: str) -> None:
    """A step has no digests, so nothing shows whether its record still counts."""
    kill_attempt(folder, "after a step", "--input", "1", "--session", "one", agent="Plain")
    if change == "flow":
        write_flow(folder, FLOW.replace("number + 1", "number + 10"))
    given = "5" if change == "input" else "1"
    done = flow("--input", given, "--session", "one", agent="Plain")
    assert (done.code, done.json["output"]) == (0, 7 if change == "input" else 21)
    assert read_effects(folder) == ["1", *(["5", "6"] if change == "input" else ["1", "11"])]


def test_a_resume_after_a_failure_runs_the_steps_again(flow: Command, folder: Path) -> None:
    """But not the steps inside a subtask with a result."""
    (folder / "fails").touch()
    failed = flow("--input", "1", *_HELPER)
    assert (failed.code, failed.json["error"]["message"]) == (4, "RuntimeError: not today")
    (folder / "fails").unlink()
    done = flow("--input", "1", *_HELPER, "--resume")
    assert (done.code, done.json["output"]) == (0, _OUTPUT)
    assert read_effects(folder) == [*_EFFECTS, "1", "broken", "4"]
