"""Latency of a step next to a million paused tasks, and table size under churn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pydantic import JsonValue

from benchmarks.churn import churn
from benchmarks.crowd import DUE, STATE_BYTES, Crowd
from benchmarks.measure import interleaved
from benchmarks.report import Cell, Lines, Report, Table
from benchmarks.stage import Stage

STEPS = ("claim", "pause", "end", "lookup", "look", f"expire {DUE}")
_LIVES, _LOOKS = 20, 4  # per round
_TARGET = 1.5


async def run(stage: Stage, *, quick: bool) -> Report:
    """Measure latency by table size, then table size over a long churn."""
    sizes, rounds = ((1_000, 10_000, 100_000), 10) if quick else ((1_000, 100_000, 1_000_000), 50)
    crowds = [Crowd(await stage.database(), size) for size in sizes]
    try:
        await _measure(crowds, rounds)
    finally:
        for crowd in crowds:
            await crowd.close()
    worn = await churn(await stage.database(), cycles=20_000 if quick else 1_000_000)
    figures: dict[str, JsonValue] = {**_figures(crowds), **worn.figures()}
    return Report(
        "scale",
        await stage.about(),
        [_latencies(crowds), worn.table()],
        figures,
        {"latency": _plot(crowds), "size": worn.plot()},
    )


async def _measure(crowds: list[Crowd], rounds: int) -> None:
    for crowd in crowds:
        await crowd.gather(known=(rounds + 1) * (_LIVES + DUE))
        await crowd.round(_LIVES, _LOOKS)
        crowd.forget()
    contenders = {f"{crowd.size:,}": partial(crowd.round, _LIVES, _LOOKS) for crowd in crowds}
    await interleaved(contenders, rounds, title="scale")


def _latencies(crowds: Sequence[Crowd]) -> Table:
    least = crowds[0]
    rows: list[list[Cell]] = [
        [
            step,
            crowd.size,
            crowd.percentile(step, 50),
            crowd.percentile(step, 99),
            crowd.percentile(step, 50) / least.percentile(step, 50),
            len(crowd.seconds[step]),
        ]
        for step in STEPS
        for crowd in crowds
    ]
    return Table(
        "One step at a time, by the number of paused tasks",
        ("step", "paused tasks", "p50 ms", "p99 ms", f"p50 to that at {least.size:,}", "times"),
        rows,
        f"Target: the p50 of a claim at most {_TARGET} times its p50 at 1,000. Each task waits for one call and "
        f"holds {STATE_BYTES} bytes of incompressible state; a claim completes the join and reads the task. Tasks "
        "are drawn at random from the table. 'look' is a sweep that finds nothing, six calls of the port; "
        f"'expire {DUE}' is a call that finds that many overdue tasks.",
    )


def _figures(crowds: Sequence[Crowd]) -> dict[str, JsonValue]:
    least, most = crowds[0], crowds[-1]
    claims: dict[str, JsonValue] = {str(crowd.size): round(crowd.percentile("claim", 50), 4) for crowd in crowds}
    ratios: dict[str, JsonValue] = {
        step: round(most.percentile(step, 50) / least.percentile(step, 50), 3) for step in STEPS
    }
    return {"claim p50 ms by paused tasks": claims, f"p50 at {most.size} to {least.size}": ratios}


def _plot(crowds: Sequence[Crowd]) -> Lines:
    series = {step: [(float(crowd.size), crowd.percentile(step, 50)) for crowd in crowds] for step in STEPS}
    return Lines("p50 of a step", "paused tasks", "milliseconds", series, log_x=True, log_y=True)
