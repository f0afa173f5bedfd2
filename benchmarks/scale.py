"""Latency of a step next to a million paused tasks, and table size under churn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pydantic import JsonValue

from benchmarks.churn import churn
from benchmarks.environment import BenchmarkServers
from benchmarks.measure import interleaved
from benchmarks.paused_tasks import DUE_TASKS, STATE_BYTES, PausedTasks
from benchmarks.report import Cell, Lines, Report, Table

STEPS = ("claim", "pause", "end", "lookup", "sweep", f"expire {DUE_TASKS}")
_TASKS_PER_ROUND, _SWEEPS_PER_ROUND = 20, 4  # per round
_TARGET = 1.5


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure latency by table size, then table size over a long churn."""
    sizes, rounds = ((1_000, 10_000, 100_000), 10) if quick else ((1_000, 100_000, 1_000_000), 50)
    databases = [PausedTasks(await stage.database(), size) for size in sizes]
    try:
        await _measure(databases, rounds)
    finally:
        for database in databases:
            await database.close()
    churn_result = await churn(await stage.database(), cycles=20_000 if quick else 1_000_000)
    figures: dict[str, JsonValue] = {**_figures(databases), **churn_result.figures()}
    return Report(
        "scale",
        await stage.describe(),
        [_latency_table(databases), churn_result.table()],
        figures,
        {"latency": _plot(databases), "size": churn_result.plot()},
    )


async def _measure(databases: list[PausedTasks], rounds: int) -> None:
    for database in databases:
        await database.create(sample_size=(rounds + 1) * (_TASKS_PER_ROUND + DUE_TASKS))
        await database.run_round(_TASKS_PER_ROUND, _SWEEPS_PER_ROUND)
        database.discard_timings()
    contenders = {
        f"{crowd.size:,}": partial(crowd.run_round, _TASKS_PER_ROUND, _SWEEPS_PER_ROUND)
        for crowd in databases
    }
    await interleaved(contenders, rounds, title="scale")


def _latency_table(databases: Sequence[PausedTasks]) -> Table:
    smallest = databases[0]
    rows: list[list[Cell]] = [
        [
            step,
            database.size,
            database.percentile(step, 50),
            database.percentile(step, 99),
            database.percentile(step, 50) / smallest.percentile(step, 50),
            len(database.seconds[step]),
        ]
        for step in STEPS
        for database in databases
    ]
    return Table(
        "One step at a time, by the number of paused tasks",
        ("step", "paused tasks", "p50 ms", "p99 ms", f"p50 to that at {smallest.size:,}", "times"),
        rows,
        f"Target: the p50 of a claim at most {_TARGET} times its p50 at 1,000. Each task waits "
        f"for one call and holds {STATE_BYTES} bytes of incompressible state; "
        "a claim completes the join and reads the task. Tasks are drawn at random from the table. "
        "'sweep' is one that finds nothing, six calls of the port; "
        f"'expire {DUE_TASKS}' is a call that finds that many overdue tasks.",
    )


def _figures(databases: Sequence[PausedTasks]) -> dict[str, JsonValue]:
    smallest, largest = databases[0], databases[-1]
    claims: dict[str, JsonValue] = {
        str(database.size): round(database.percentile("claim", 50), 4) for database in databases
    }
    ratios: dict[str, JsonValue] = {
        step: round(largest.percentile(step, 50) / smallest.percentile(step, 50), 3)
        for step in STEPS
    }
    return {
        "claim p50 ms by paused tasks": claims,
        f"p50 at {largest.size} to {smallest.size}": ratios,
    }


def _plot(databases: Sequence[PausedTasks]) -> Lines:
    series = {
        step: [(float(database.size), database.percentile(step, 50)) for database in databases]
        for step in STEPS
    }
    return Lines("p50 of a step", "paused tasks", "milliseconds", series, log_x=True, log_y=True)
