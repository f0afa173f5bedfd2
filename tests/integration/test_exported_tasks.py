"""`meshpoint tasks export` on each database, and what `replay_history` reads of it."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from command_result import CommandResult, run_main
from meshpoint import Context, Peer, Question, agent
from meshpoint.agents.function import FunctionAgent
from meshpoint.local import local_mesh
from meshpoint.model.events import Phase, Step
from meshpoint.testing import ReplayDiffers, replay_history
from recorded_events import RecordedEvents

flights = Peer("flights", str, str)
approval = Question("approval", bool)
runs = list[str]()


def book(city: str) -> str:
    runs.append(city)
    return f"a seat to {city}: „1a“ "


@agent("flights")
async def fly(ctx: Context, city: str) -> str:
    return city * 3000  # so that the journal continues in the log


@agent("travel")
async def travel(ctx: Context, city: str) -> str:
    booked = await ctx.step("book", book, city)
    for leg in range(3):
        await flights(f"{city} {leg}")
        await ctx.memory.set(f"leg {leg}", booked)
    await ctx.subtask("report", book, city)
    answer = await ctx.wait_for(approval, prompt="Buy?")
    return f"{booked} {answer}"


async def pause_tasks(database_url: str, *ids: str) -> None:
    """Run tasks up to their question."""
    events = RecordedEvents()
    async with local_mesh(
        travel, fly, db_url=database_url, namespace="test", observer=events
    ) as mesh:
        for id_ in ids:
            await mesh.send(travel, "Rome", task_id=id_)
            await events.wait(Step.CHECKPOINT, Phase.AFTER, count=4, task_id=id_)
        ended = await mesh.send(fly, "Oslo", task_id="ended")
        await ended.result()


def test_an_exported_task_replays(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*arguments: str) -> CommandResult:
        options = "--db", database_url, "--namespace", "test"
        return run_main(["tasks", "export", *arguments, *options], capsys)

    asyncio.run(pause_tasks(database_url, "a/1", "b"))
    path, folder = tmp_path / "one.json", tmp_path / "all"
    done = export("a/1", "-o", str(path))
    assert (done.code, done.out.split()) == (0, ["wrote", str(path)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = json.loads(path.read_text())
    assert (data["format"], data["input"], len(data["pauses"])) == (
        "meshpoint-history/1",
        "Rome",
        4,
    )
    assert data["steps"][0]["result"] == "a seat to Rome: „1a“ "
    assert "„1a“" in path.read_text()
    runs.clear()
    replayed = asyncio.run(replay_history(travel, path))
    assert (replayed.passed, replayed.recorded) == (4, 4)
    assert replayed.stopped_at == "its last pause, which waits for 'approval'"
    assert not runs

    async def other(ctx: Context, city: str) -> str:
        await ctx.step("book", book, city)
        await flights(f"{city} 0")
        return await flights(f"{city} one")

    other.__annotations__ = {"ctx": Context, "city": str, "return": str}
    with pytest.raises(ReplayDiffers, match=r"^replay differs at call 2: flights.0 has another"):
        asyncio.run(replay_history(FunctionAgent(other, "travel"), path))

    done = export("--agent", "travel", "--state", "waiting", "-o", str(folder))
    assert (done.code, sorted(each.name for each in folder.iterdir())) == (
        0,
        ["a%2F1.json", "b.json"],
    )
    assert f"wrote 2 files to {folder}" in " ".join(done.out.split())
    printed = export("b")
    assert printed.json == json.loads((folder / "b.json").read_text()) | {
        "exported_at": printed.json["exported_at"]
    }


def test_tasks_that_cannot_be_exported(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*arguments: str) -> CommandResult:
        options = "--db", database_url, "--namespace", "test"
        return run_main(["tasks", "export", *arguments, *options], capsys)

    asyncio.run(pause_tasks(database_url, "a"))
    for arguments, code, problem in (
        (("ended",), 10, "task ended has ended as completed: its history is gone"),
        (("nobody",), 10, "there is no task nobody in the database"),
        (("a", "--agent", "travel"), 2, "--agent and --state exclude TASK_ID"),
        (("--agent", "travel"), 2, "name a TASK_ID, or use --agent and --output"),
        (("--agent", "travel", "--state", "asleep", "-o", str(tmp_path)), 2, "'asleep'"),
        (
            ("--agent", "travel", "--state", "completed", "-o", str(tmp_path)),
            2,
            "completed tasks have no history; use one of waiting",
        ),
        (("--agent", "byer", "-o", str(tmp_path)), 0, "no task of agent 'byer' is waiting or"),
        (("a", "-o", str(tmp_path / "no" / "a.json")), 1, "No such file or directory"),
    ):
        done = export(*arguments)
        assert (done.code, problem in " ".join(done.err.split())) == (code, True), done


def test_each_task_has_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if file names are too short for their ids."""
    url, ids = f"sqlite:///{tmp_path}/tasks.db", ["p" * 230 + "a", "p" * 230 + "b", ".p", "p"]
    asyncio.run(pause_tasks(url, *ids))
    options = "--agent", "travel", "-o", str(tmp_path / "all"), "--db", url, "--namespace", "test"
    assert run_main(["tasks", "export", *options], capsys).code == 0
    files = list((tmp_path / "all").iterdir())
    assert sorted(json.loads(each.read_text())["task_id"] for each in files) == sorted(ids)
