"""Latency of restoring a checkpoint from Redis and PostgreSQL, and the cost of a failing Redis."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import JsonValue

from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, interleaved
from benchmarks.redis_failures import Phase, restore_through_failures
from benchmarks.report import Bars, Cell, Report, Table
from benchmarks.restorer import (
    AFTER_FLUSH,
    FROM_POSTGRESQL,
    FROM_REDIS,
    SAVE,
    SAVE_AND_CACHE,
    Restorer,
)

SIZES = {"5 KB": 5_000, "1 MB": 1_000_000}


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Restore from every source in turn, then with Redis in every failed state."""
    rounds, operations = (5, {"5 KB": 40, "1 MB": 8}) if quick else (30, {"5 KB": 100, "1 MB": 20})
    measured: dict[str, tuple[Restorer, Medians]] = {}
    phases: dict[str, list[Phase]] = {}
    for size, number_of_bytes in SIZES.items():
        restorer = Restorer(await stage.database(), (await stage.redis()).url, number_of_bytes)
        await restorer.open(operations[size])
        try:
            measured[size] = restorer, await _measure(restorer, rounds, size)
            phases[size] = await restore_through_failures(restorer, await stage.redis())
        finally:
            await restorer.close()
    return Report(
        "restore",
        await stage.describe("redis", "zstandard"),
        [_latency_table(measured), _save_table(measured), _failure_table(phases)],
        _figures(measured, phases),
        {"median": _plot(measured)},
    )


async def _measure(restorer: Restorer, rounds: int, title: str) -> Medians:
    contenders = {
        name: partial(restorer.run_round, name)
        for name in (FROM_REDIS, FROM_POSTGRESQL, AFTER_FLUSH, SAVE, SAVE_AND_CACHE)
    }
    await interleaved(contenders, 1, title=f"{title}, warm-up")
    restorer.discard_timings()
    medians = await interleaved(contenders, rounds, title=title)
    await restorer.count_requests()
    return medians


def _latency_table(measured: dict[str, tuple[Restorer, Medians]]) -> Table:
    rows: list[list[Cell]] = []
    for size, (restorer, medians) in measured.items():
        for name in (FROM_REDIS, FROM_POSTGRESQL, AFTER_FLUSH):
            faster = medians.ratio(name, FROM_POSTGRESQL)
            rows.append(
                [
                    f"{size} {name}",
                    restorer.percentile(name, 50),
                    restorer.percentile(name, 99),
                    None if name == FROM_POSTGRESQL else faster.median,
                    None if name == FROM_POSTGRESQL else f"{faster.low:.2g}..{faster.high:.2g}",
                    restorer.requests[name].redis,
                    restorer.requests[name].statements,
                    len(restorer.seconds[name]),
                ]
            )
    return Table(
        "Restore of one checkpoint, one at a time",
        [
            "",
            "p50 ms",
            "p99 ms",
            "times as fast as SQL",
            "lowest..highest",
            "Redis commands",
            "statements",
            "times",
        ],
        rows,
        f"The caller has the task's row, and so the number of its last checkpoint. {AFTER_FLUSH}: "
        "Redis is asked, has nothing, PostgreSQL serves, and the copy is written again. "
        "Statements as the server counts them. All in one run, in turn, on one machine with its "
        "servers: no network.",
    )


def _save_table(measured: dict[str, tuple[Restorer, Medians]]) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{size} {name}",
            restorer.percentile(name, 50),
            restorer.percentile(name, 99),
            None if name == SAVE else 1 / medians.ratio(name, SAVE).median,
            restorer.requests[name].redis,
            restorer.requests[name].statements,
            len(restorer.seconds[name]),
        ]
        for size, (restorer, medians) in measured.items()
        for name in (SAVE, SAVE_AND_CACHE)
    ]
    return Table(
        "What the copy adds to a save",
        ["", "p50 ms", "p99 ms", "times as long", "Redis commands", "statements", "times"],
        rows,
    )


def _failure_table(phases: dict[str, list[Phase]]) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{size} {phase.name}",
            phase.restores,
            phase.redis,
            phase.sql,
            phase.reason,
            phase.different,
            phase.lost,
            phase.longest_seconds * 1000,
        ]
        for size, of_size in phases.items()
        for phase in of_size
    ]
    return Table(
        "Every checkpoint restored, whatever becomes of Redis",
        ["Redis", "restores", "from Redis", "from SQL", "why", "differing", "lost", "longest ms"],
        rows,
        "Through a proxy, which can stop answering. A Redis that did not answer is not asked "
        "again in the same phase: the longest restore is the one that waited for it.",
    )


def _figures(
    measured: dict[str, tuple[Restorer, Medians]], phases: dict[str, list[Phase]]
) -> dict[str, JsonValue]:
    figures: dict[str, Any] = {}
    for size, (restorer, medians) in measured.items():
        figures[size] = {
            name: {
                "p50_ms": round(restorer.percentile(name, 50), 4),
                "p99_ms": round(restorer.percentile(name, 99), 4),
                "times_as_fast_as_sql": round(medians.ratio(name, FROM_POSTGRESQL).median, 3),
                "redis_commands": restorer.requests[name].redis,
                "statements": restorer.requests[name].statements,
            }
            for name in (FROM_REDIS, FROM_POSTGRESQL, AFTER_FLUSH)
        } | {
            name: {
                "p50_ms": round(restorer.percentile(name, 50), 4),
                "p99_ms": round(restorer.percentile(name, 99), 4),
                "times_as_long": round(1 / medians.ratio(name, SAVE).median, 3),
            }
            for name in (SAVE, SAVE_AND_CACHE)
        }
    samples = [phase for of_size in phases.values() for phase in of_size]
    figures["ordeal"] = {
        "restores": sum(phase.restores for phase in samples),
        "from_redis": sum(phase.redis for phase in samples),
        "from_sql": sum(phase.sql for phase in samples),
        "differing": sum(phase.different for phase in samples),
        "lost": sum(phase.lost for phase in samples),
    }
    return figures


def _plot(measured: dict[str, tuple[Restorer, Medians]]) -> Bars:
    return Bars(
        "Restore of one checkpoint",
        "median, ms",
        {
            f"{size}, {name}": restorer.percentile(name, 50)
            for size, (restorer, _) in measured.items()
            for name in (FROM_REDIS, FROM_POSTGRESQL, AFTER_FLUSH)
        },
        log_x=True,
    )
