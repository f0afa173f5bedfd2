"""The whole system compared with others: a client calls an agent that calls N trivial peers.

Since the peers do no work, throughput and latency measure the system itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.report import Cell, Report, Table
from benchmarks.rivals import specs
from benchmarks.rivals.contender import Contender
from benchmarks.rivals.resource_meters import Meter
from benchmarks.rivals.rounds import COSTS, MANY_IN_FLIGHT, run_sample, start_contender

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MORE_IN_FLIGHT = 64
"""Requests in flight, in addition to `MANY_IN_FLIGHT`."""
_TARGET_RATIO = 0.85
"""Target share of the bare mesh's rate with `MORE_IN_FLIGHT` requests, which saturate the CPU."""
_MESHPOINT_CONTENDERS = (specs.MESHPOINT, specs.IN_MEMORY)
_OURS = (specs.MESHPOINT, specs.POSTGRESQL, specs.IN_MEMORY)
_MAX_FAN_OUT_WITH_MORE = 10
"""Beyond this fan-out only ours run with `MORE_IN_FLIGHT`: others take minutes for one round."""
_POSTGRESQL_TARGET = 10.0
"""Target ratio of PostgreSQL alone to systems without Meshpoint's transport, with ten peers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Duration of the measurements."""

    fan_outs: Sequence[int]
    rounds: int
    seconds: float
    alone_seconds: float


FULL = Plan(fan_outs=(1, 10, 100), rounds=3, seconds=4, alone_seconds=2)
QUICK = Plan(fan_outs=(1, 10), rounds=1, seconds=2, alone_seconds=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds of one fan-out: many in flight, one in flight, and more in flight."""

    many: Medians
    alone: Medians
    more: Medians

    @property
    def names(self) -> Sequence[str]:
        """The contenders."""
        return list(self.many.samples)


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure all contenders."""
    return await measure(stage, QUICK if quick else FULL)


async def measure(stage: BenchmarkServers, plan: Plan) -> Report:
    """Measure all contenders for as long as `plan` says."""
    await stage.postgres()
    layout, layout_table = await _faster_layout(stage, plan)
    async with _contenders(stage, layout) as (contenders, meters):
        measured = {
            fan_out: await _measure_fan_out(contenders, meters, plan, fan_out)
            for fan_out in plan.fan_outs
        }
    return Report(
        name="system",
        about={
            **await stage.describe(),
            **await specs.versions(),
            "rounds": plan.rounds,
            "seconds": plan.seconds,
        },
        tables=[
            layout_table,
            *[
                table(fan_out, fan_out_result)
                for fan_out, fan_out_result in measured.items()
                for table in (_speed_table, _cost_table)
            ],
            _guarantee_table(),
            _target_table(measured),
        ],
        figures={f"N={fan_out}": _figures(each) for fan_out, each in measured.items()},
        plots={
            "rate": partial(
                _bars,
                measured,
                "tasks/s, 16 in flight",
                lambda each, name: each.many.rate(name).median,
            ),
            "latency": partial(
                _bars,
                measured,
                "p50 in ms, one in flight",
                lambda each, name: each.alone.extra(name, "p50").median,
            ),
        },
    )


async def _faster_layout(stage: BenchmarkServers, plan: Plan) -> tuple[list[str], Table]:
    """The arguments for the faster of Meshpoint's two layouts, and a table with the rates."""
    commands = specs.layout_commands((await stage.rabbit()).url, await stage.database())
    async with AsyncExitStack() as stack:
        contenders = {
            name: await start_contender(stack, name, command) for name, command in commands.items()
        }
        medians = await interleaved(
            {
                name: partial(
                    run_sample, command_rates, None, [], 10, MANY_IN_FLIGHT, plan.seconds
                )
                for name, command_rates in contenders.items()
            },
            plan.rounds,
            title="layout",
        )
    rows: list[list[Cell]] = [[name, medians.rate(name).median] for name in commands]
    table = Table("Meshpoint's layout: the faster is used", ["agents in", "tasks/s at N=10"], rows)
    together = medians.rate("one process").median > medians.rate("a process for each agent").median
    return (["--together"] if together else []), table


@asynccontextmanager
async def _contenders(
    stage: BenchmarkServers, layout: Sequence[str]
) -> AsyncIterator[tuple[dict[str, Contender], dict[str, Meter | None]]]:
    """Start and warm up all contenders. Each runs until the end, idle while others work."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshpoint-bench-")))
        parts = await specs.contender_specs(stage, folder, layout)
        for part in parts:
            if part.meter is not None:
                stack.push_async_callback(part.meter.close)
        yield (
            {part.name: await start_contender(stack, part.name, part.command) for part in parts},
            {part.name: part.meter for part in parts},
        )


async def _measure_fan_out(
    contenders: Mapping[str, Contender],
    meters: Mapping[str, Meter | None],
    plan: Plan,
    fan_out: int,
) -> Measured:
    pids = [each.pid for each in contenders.values()]

    def make_rounds(
        names: Sequence[str], in_flight: int, seconds: float
    ) -> dict[str, Callable[[], Awaitable[Sample]]]:
        return {
            name: partial(
                run_sample, contenders[name], meters[name], pids, fan_out, in_flight, seconds
            )
            for name in names
        }

    title, all_contenders = f"N={fan_out}", list(contenders)
    with_more = all_contenders if fan_out <= _MAX_FAN_OUT_WITH_MORE else _OURS
    return Measured(
        await interleaved(
            make_rounds(all_contenders, MANY_IN_FLIGHT, plan.seconds), plan.rounds, title=title
        ),
        await interleaved(
            make_rounds(all_contenders, 1, plan.alone_seconds), plan.rounds, title=f"{title} alone"
        ),
        await interleaved(
            make_rounds(with_more, MORE_IN_FLIGHT, plan.seconds),
            plan.rounds,
            title=f"{title} more",
        ),
    )


def _speed_table(fan_out: int, measured: Measured) -> Table:
    columns = ["", "tasks/s", "of Meshpoint", "p50 ms", "p99 ms", "alone p50 ms", "alone p99 ms"]
    rows = [
        [name, *_speed_cells(measured.many, name), *_latency_cells(measured.alone, name)]
        for name in measured.names
    ]
    rows += [
        [_with_more(name), *_speed_cells(measured.more, name), None, None]
        for name in measured.more.samples
    ]
    note = (
        f"{MANY_IN_FLIGHT} requests in flight, or one (alone). Of Meshpoint: median, and "
        "lowest..highest, of the rounds."
    )
    return Table(f"N={fan_out}: a root, {fan_out} peers, an answer", columns, rows, note)


def _cost_table(fan_out: int, measured: Measured) -> Table:
    rows = [[name, *_cost_cells(measured.many, name)] for name in measured.names]
    rows += [
        [_with_more(name), *_cost_cells(measured.more, name)] for name in measured.more.samples
    ]
    note = (
        "Commits: transactions that wrote or notified; a notification writes nothing to disk. "
        "The statements of Celery and dramatiq are Redis commands."
    )
    return Table(f"N={fan_out}: what a task costs", ["", *COSTS.values()], rows, note)


def _speed_cells(medians: Medians, name: str) -> list[Cell]:
    ratio = medians.ratio(name, reference=specs.MESHPOINT) if name != specs.MESHPOINT else None
    return [
        medians.rate(name).median,
        f"{ratio:.2f}" if ratio else None,
        *_latency_cells(medians, name),
    ]


def _latency_cells(medians: Medians, name: str) -> list[Cell]:
    return [medians.extra(name, key).median for key in ("p50", "p99")]


def _cost_cells(medians: Medians, name: str) -> list[Cell]:
    available = medians.samples[name][0].extras
    return [medians.extra(name, key).median if key in available else None for key in COSTS]


def _figures(measured: Measured) -> dict[str, JsonValue]:
    def figures_of(medians: Medians, name: str) -> dict[str, JsonValue]:
        rate = medians.rate(name)
        extras = {key: medians.extra(name, key).median for key in medians.samples[name][0].extras}
        return {"tasks/s": rate.median, "lowest": rate.low, "highest": rate.high, **extras}

    figures: dict[str, JsonValue] = {
        name: {
            f"{MANY_IN_FLIGHT} in flight": figures_of(measured.many, name),
            "alone": figures_of(measured.alone, name),
        }
        for name in measured.names
    }
    return {
        **figures,
        **{_with_more(name): figures_of(measured.more, name) for name in measured.more.samples},
    }


def _with_more(name: str) -> str:
    return f"{name}, {MORE_IN_FLIGHT} in flight"


def _target_table(measured: Mapping[int, Measured]) -> Table:
    rows = [
        row
        for fan_out, comparison in measured.items()
        for row in _comparisons(fan_out, comparison)
    ]
    return Table(
        "Targets",
        ["", "at least", "seen", ""],
        [[*row, _verdict(*row[1:])] for row in rows],
        "What Meshpoint adds: its p50 minus the bare mesh's p50, with one request in flight. DBOS "
        "and LangGraph have no mesh to subtract, because they run in one process.",
    )


def _verdict(minimum: float | None, actual: float) -> str | None:
    return None if minimum is None else "met" if actual >= minimum else "missed"


def _comparisons(fan_out: int, measured_: Measured) -> Iterator[tuple[str, float | None, float]]:
    """Names of comparisons, with the target (if any) and the measured value."""
    if measured_.more.samples and fan_out == 1:
        commits = measured_.more.extra(specs.POSTGRESQL, "commits").median
        yield f"N=1: tasks per commit, {MORE_IN_FLIGHT} in flight", 5.0, 1 / commits
    for in_flight, medians, minimum in (
        (MANY_IN_FLIGHT, measured_.many, None),
        (MORE_IN_FLIGHT, measured_.more, _TARGET_RATIO),
    ):
        yield (
            f"N={fan_out}: tasks/s ÷ bare mesh, {in_flight} in flight",
            minimum,
            medians.ratio(*_MESHPOINT_CONTENDERS).median,
        )
    ours, plain = (measured_.alone.extra(name, "p50").median for name in _MESHPOINT_CONTENDERS)
    for name in measured_.names:
        if name not in {*_OURS, specs.SQLITE}:
            others = (specs.DBOS, specs.LANGGRAPH, specs.CELERY)
            yield (
                f"N={fan_out}: tasks/s, PostgreSQL alone ÷ {name}",
                _POSTGRESQL_TARGET if fan_out == 10 and name in others else 1.0,
                measured_.many.ratio(specs.POSTGRESQL, name).median,
            )
            minimum = 5.0 if name == specs.SEED and fan_out == 10 else 1.0
            yield (
                f"N={fan_out}: tasks/s ÷ {name}",
                minimum,
                measured_.many.ratio(specs.MESHPOINT, name).median,
            )
            whole = measured_.alone.extra(name, "p50").median
            yield (
                f"N={fan_out}: p50 alone, {name} ÷ what Meshpoint adds",
                1.0,
                whole / (ours - plain),
            )
            yield f"N={fan_out}: p50 alone, {name} ÷ Meshpoint with its mesh", None, whole / ours
            alone = measured_.alone.extra(specs.POSTGRESQL, "p50").median
            yield f"N={fan_out}: p50 alone, {name} ÷ PostgreSQL alone", 1.0, whole / alone
            if name in measured_.more.samples:
                yield (
                    f"N={fan_out}: tasks/s, {MORE_IN_FLIGHT} in flight, PostgreSQL alone ÷ {name}",
                    None,
                    measured_.more.ratio(specs.POSTGRESQL, name).median,
                )


def _guarantee_table() -> Table:
    return Table(
        "What each promises",
        ["", "durability and transport"],
        [list(each) for each in specs.GUARANTEES.items()],
    )


def _bars(
    measured: Mapping[int, Measured],
    label: str,
    value: Callable[[Measured, str], float],
    axes: Axes,
) -> None:
    """Draw one group of bars per fan-out, with one bar per contender."""
    names = next(iter(measured.values())).names
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [group + index * width for group in range(len(measured))]
        axes.bar(places, [value(each, name) for each in measured.values()], width, label=name)
    axes.set_xticks(
        [group + 0.4 - width / 2 for group in range(len(measured))],
        [f"N={each}" for each in measured],
    )
    axes.set_yscale("log")
    axes.set(ylabel=label)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend(fontsize="small")
