"""Bytes and time that tasks with long histories cost: calls, subtasks, steps, turns, memory keys.

Bytes are counted from what the store's writing statements carry: ids, contexts, states, requests,
outcomes and logs, compressed as they are stored.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from statistics import median
from typing import Any

from pydantic import JsonValue
from sqlalchemy import Engine, event

from benchmarks.environment import BenchmarkServers
from benchmarks.report import Cell, Report, Table
from meshpoint import (
    Call,
    Done,
    DurableAgent,
    Outcomes,
    Paused,
    Peer,
    TaskExecutionContext,
    agent,
)
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.local import local_mesh

FEW, MANY = 50, 400
MAX_RATIO = 12
RUNS = 3
TEXT, TURN = 10_000, 2_000
KEYS, TURNS = 20, 20

_source = random.Random(7)
writer_peer = Peer("writer", int, str)


def _random_text(length: int) -> str:
    """Text that hardly compresses."""
    return _source.randbytes(length).decode("latin-1").translate(_PRINTABLE)


_PRINTABLE = {code: 33 + code % 94 for code in range(256)}


@agent("writer")
async def writer(ctx: TaskExecutionContext, length: int) -> str:
    """Answers with a text."""
    return _random_text(length)


@agent("caller")
async def caller(ctx: TaskExecutionContext, plan: list[int]) -> int:
    """Calls the writer `plan[0]` times for texts of `plan[1]` characters."""
    calls, length = plan
    return sum([len(await writer_peer(length)) for _ in range(calls)])


@agent("worker")
async def worker(ctx: TaskExecutionContext, plan: list[int]) -> int:
    """Runs `plan[0]` subtasks with results of `plan[1]` characters."""

    async def write(number: int) -> str:
        return _random_text(plan[1])

    return sum([len(await ctx.subtask(f"part {each}", write, each)) for each in range(plan[0])])


@agent("stepper")
async def stepper(ctx: TaskExecutionContext, plan: list[int]) -> int:
    """Runs `plan[0]` steps with results of `plan[1]` characters."""
    return sum([len(await ctx.step("write", _random_text, plan[1])) for _ in range(plan[0])])


class Chatter:
    """Appends a turn of `plan[1]` characters to its log at each of `plan[0]` pauses."""

    name, state_format = "chatter", "chatter/1"

    async def start(self, ctx: TaskExecutionContext, plan: list[int]) -> Paused:
        state = json.dumps(plan).encode()
        return Paused([Call("turn", "writer", 1)], state, append=_random_text(plan[1]).encode())

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[int]:
        raise NotImplementedError

    async def resume_with_log(
        self, ctx: TaskExecutionContext, state: bytes, log: Sequence[bytes], outcomes: Outcomes
    ) -> Paused | Done[int]:
        pauses, length = json.loads(state)
        if len(log) == pauses:
            return Done(len(log))
        return Paused([Call("turn", "writer", 1)], state, append=_random_text(length).encode())


@agent("keeper")
async def keeper(ctx: TaskExecutionContext, plan: list[int]) -> int:
    """Writes `plan[1]` keys of its working memory before each of `plan[0]` pauses."""
    pauses, keys = plan
    for number in range(pauses):
        for key in range(keys):
            await ctx.memory.set(f"key {key}", str(number))
        await writer_peer(1)
    return pauses


REPEATED: dict[str, DurableAgent[Any, Any]] = {
    "calls": caller,
    "subtasks": worker,
    "steps": stepper,
}
"""What a task may do many times. Eight times as many should take eight times as long."""


@dataclass(slots=True)
class Written:
    """Bytes of the statements of one task, in all and as notes of its memory's writes."""

    total: int = 0
    notes: int = 0

    def count(self, statement: str, values: object) -> None:
        """Count a writing statement and its parameters."""
        text = statement.lstrip()
        if not text.startswith(("INSERT", "UPDATE", "/* commits")):
            return
        size = _size_of(values)
        self.total += size
        if "agent_task_log" in text and text.startswith("INSERT"):
            self.notes += size
        self.notes += sum(len(each) for each in _texts(values) if '"memory_writes"' in each[:500])


def _size_of(value: object) -> int:
    match value:
        case bytes() | memoryview():
            return len(value)
        case str():
            return len(value.encode())
        case dict():
            return sum(map(_size_of, value.values()))
        case list() | tuple():
            return sum(map(_size_of, value))
        case None:
            return 0
    return 8


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _texts(each)
        case list() | tuple():
            for each in value:
                yield from _texts(each)


@contextmanager
def counted() -> Iterator[Written]:
    """Count what all stores of this process write."""
    written = Written()

    def on_execute(
        connection: object, cursor: object, statement: str, values: object, *rest: object
    ) -> None:
        written.count(statement, values)

    original = PreparedConnection.write

    @wraps(original)
    async def write(self: PreparedConnection, statement: str, *values: Any) -> Any:
        written.count(statement, values)
        return await original(self, statement, *values)

    event.listen(Engine, "before_cursor_execute", on_execute)
    PreparedConnection.write = write  # type: ignore[method-assign]  # restored below
    try:
        yield written
    finally:
        PreparedConnection.write = original  # type: ignore[method-assign]  # the original
        event.remove(Engine, "before_cursor_execute", on_execute)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One request to one agent, and the limits of what it may write.

    Its time is the median of `runs` runs.
    """

    name: str
    served: DurableAgent[Any, Any]
    plan: tuple[int, int]
    limit: int
    notes_limit: int | None = None
    runs: int = 1


def scenarios(*, quick: bool) -> list[Scenario]:
    """All scenarios. With `quick`, a tenth of the calls, with a tenth of the limits."""
    part = 10 if quick else 1
    return [
        *(
            Scenario(
                f"{count // part} {what}",
                served,
                (count // part, TEXT),
                count * 25_000 // part,
                runs=RUNS,
            )
            for what, served in REPEATED.items()
            for count in (FEW, MANY)
        ),
        Scenario(f"{TURNS} turns", Chatter(), (TURNS, TURN), 80_000),
        Scenario(
            f"{200 // part} pauses, {KEYS} keys",
            keeper,
            (200 // part, KEYS),
            10_000_000 // part,
            1_000_000 // part,
        ),
    ]


async def _run(scenario: Scenario, db_url: str) -> tuple[Written, float]:
    async with local_mesh(writer, scenario.served, db_url=db_url) as mesh:
        await mesh.call(scenario.served.name, [1, 10])
        with counted() as written:
            started = time.perf_counter()
            await mesh.call(scenario.served.name, list(scenario.plan))
            seconds = time.perf_counter() - started
    return written, seconds


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Run each scenario on each database."""
    rows: list[list[Cell]] = []
    figures: dict[str, JsonValue] = {}
    ratios: list[list[Cell]] = []
    with tempfile.TemporaryDirectory() as folder:

        async def sqlite(name: str) -> str:
            return f"sqlite:///{folder}/{name}.db"

        async def postgres(name: str) -> str:
            return await stage.database()

        databases: dict[str, Callable[[str], Awaitable[str]]] = {
            "SQLite": sqlite,
            "PostgreSQL": postgres,
        }
        for database, create in databases.items():
            seconds: dict[str, float] = {}
            for scenario in scenarios(quick=quick):
                runs = [
                    await _run(scenario, await create(f"{scenario.name} {number}"))
                    for number in range(1 if quick else scenario.runs)
                ]
                written = runs[0][0]
                seconds[scenario.name] = median(each for _, each in runs)
                notes = None if scenario.notes_limit is None else written.notes
                rows.append(
                    [
                        f"{database}: {scenario.name}",
                        written.total / 1e6,
                        scenario.limit / 1e6,
                        None if notes is None else notes / 1e6,
                        None if notes is None else (scenario.notes_limit or 0) / 1e6,
                        seconds[scenario.name],
                    ]
                )
                figures[f"{database}: {scenario.name}"] = {
                    "bytes": written.total,
                    "notes": notes,
                    "seconds": round(seconds[scenario.name], 3),
                }
            part = 10 if quick else 1
            for what in REPEATED:
                ratio = seconds[f"{MANY // part} {what}"] / seconds[f"{FEW // part} {what}"]
                ratios.append([f"{database}: {what}", ratio, MAX_RATIO])
                figures[f"{database}: {MANY // part} to {FEW // part} {what}"] = round(ratio, 2)
    tables = [_table(rows), _ratio_table(ratios)]
    return Report("history", await stage.describe("zstandard"), tables, figures)


def _ratio_table(rows: list[list[Cell]]) -> Table:
    return Table(
        "How the time of one task grows",
        ["", f"time of {MANY} / time of {FEW}", "limit"],
        rows,
        f"{MANY // FEW} is linear. Medians of {RUNS} runs; with --quick, a tenth, and one run.",
    )


def _table(rows: list[list[Cell]]) -> Table:
    return Table(
        "What one task with a long history writes",
        ["", "MB written", "limit", "MB of notes", "limit", "seconds"],
        rows,
        f"Each call, subtask and step has a text of {TEXT:,} characters, a turn one of {TURN:,}; "
        "the texts hardly compress. Counted from what the statements carry, outcomes of calls "
        "included. Notes are what the task keeps of the writes to its working memory.",
    )
