"""`checkpoints show` on operations with a working memory in the database."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from command_result import Command, CommandResult, run_main
from meshpoint import Failed, agent
from meshpoint.local import local_mesh
from meshpoint.model.context import TaskExecutionContext
from meshpoint.operations import Operations

NAMESPACE = "test"


@agent("screener")
async def screener(ctx: TaskExecutionContext, keys: int) -> None:
    await ctx.subtask("start", int, keys)
    for number in range(keys):
        await ctx.memory.set(f"page:{number}", "text")
    raise ValueError("not today")


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the screener with that many keys, and `checkpoints show` on its operation."""
    url = f"sqlite:///{tmp_path}/tasks.db"

    async def fail(keys: int) -> str:
        async with local_mesh(screener, db_url=url, namespace=NAMESPACE) as mesh:
            assert isinstance(await (await mesh.send("screener", keys)).outcome(), Failed)
        async with Operations(url, namespace=NAMESPACE) as operations:
            (operation,) = await operations.find()
            return operation.id

    def run(keys: int, *options: str, damage: str | None = None) -> CommandResult:
        operation_id = asyncio.run(fail(keys))
        if damage is not None:
            with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
                connection.execute(damage)
        place = ("--db", url, "--namespace", NAMESPACE)
        return run_main(["checkpoints", "show", operation_id, *place, *options], capsys)

    return run


def test_the_memory_is_described(show: Command) -> None:
    shown = show(3, "--json").json
    memory, last = shown["memory"], shown["checkpoints"][-1]
    assert (memory["key_count"], memory["checkpoint"], memory["hash"]) == (
        3,
        last["seq"],
        last["l1_snapshot_hash"],
    )
    age = datetime.now(UTC) - datetime.fromisoformat(memory["timestamp"])
    assert timedelta() <= age < timedelta(hours=1)


def test_the_memory_is_described_for_people(show: Command) -> None:
    assert "memory 3 keys, as of checkpoint 2," in " ".join(show(3).out.split())


def test_an_operation_without_memory_has_no_description(show: Command) -> None:
    assert show(0, "--json").json["memory"] is None


def test_a_damaged_memory_is_reported(show: Command) -> None:
    damage = "UPDATE agent_checkpoints SET l1_snapshot = x'00' WHERE l1_snapshot IS NOT NULL"
    shown = show(3, "--json", damage=damage)
    assert shown.code == 0
    assert shown.json["memory"]["problem"].startswith("the working memory in the database")
