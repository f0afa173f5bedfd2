"""What recording timelines costs: the store, and the whole mesh, with and without them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from benchmarks.contenders.mesh import Mesh
from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, Sample, Spread, interleaved
from benchmarks.report import Cell, Report, Table
from benchmarks.rivals.resource_meters import cpu_seconds
from benchmarks.rivals.rounds import compare
from benchmarks.rivals.specs import command_here
from benchmarks.store import Entrant

OFF, ON = "off", "on"
_TARGET = 0.95
_FAN_OUTS = (1, 10, 100)
_IN_FLIGHT = 64
_CPU_RATE = "tasks per cpu s"


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure both, round after round."""
    rounds, seconds = (3, 0.5) if quick else (9, 1.5)
    measured = {
        **await _measure_store(stage, rounds, seconds),
        **await _measure_file(rounds, seconds),
        **await _measure_mesh(stage, rounds, 2 * seconds),
    }
    return Report(
        name="timeline",
        about=await stage.describe(),
        tables=[_table(measured)],
        figures={name: _figures(medians) for name, medians in measured.items()},
    )


async def _measure_store(
    stage: BenchmarkServers, rounds: int, seconds: float
) -> dict[str, Medians]:
    entrants = [Entrant(OFF, Mesh()), Entrant(ON, Mesh(timeline=True))]
    for entrant in entrants:
        await entrant.open(stage)
    measured = {
        f"store on PostgreSQL, N={fan_out}": await _compare(entrants, fan_out, rounds, seconds)
        for fan_out in _FAN_OUTS
    }
    for entrant in entrants:
        await entrant.close()
    return measured


async def _measure_file(rounds: int, seconds: float) -> dict[str, Medians]:
    measured = {}
    with tempfile.TemporaryDirectory(prefix="meshpoint-bench-") as folder:
        entrants = [Entrant(OFF, Mesh()), Entrant(ON, Mesh(timeline=True))]
        for entrant in entrants:
            await entrant.open_file(Path(folder) / f"{entrant.name}.db")
        for fan_out in _FAN_OUTS:
            name = f"store on SQLite, N={fan_out}"
            measured[name] = await _compare(entrants, fan_out, rounds, seconds)
        for entrant in entrants:
            await entrant.close()
    return measured


async def _compare(
    entrants: Sequence[Entrant], fan_out: int, rounds: int, seconds: float
) -> Medians:
    tasks = min([await entrant.tasks_for(fan_out, seconds) for entrant in entrants])

    def contender(entrant: Entrant) -> Callable[[], Awaitable[Sample]]:
        return lambda: _round_with_cpu(entrant, fan_out, tasks)

    contenders = {entrant.name: contender(entrant) for entrant in entrants}
    return await interleaved(contenders, rounds, title=f"N={fan_out}")


async def _round_with_cpu(entrant: Entrant, fan_out: int, tasks: int) -> Sample:
    """A round, with the CPU time of this process and of the servers, which it has started."""
    before = cpu_seconds([os.getpid()])
    sample = await entrant.round(fan_out, tasks)
    rate = tasks / (cpu_seconds([os.getpid()]) - before)
    return Sample(sample.count, sample.seconds, {**sample.extras, _CPU_RATE: rate})


async def _measure_mesh(
    stage: BenchmarkServers, rounds: int, seconds: float
) -> dict[str, Medians]:
    """The whole mesh, with its queues on RabbitMQ, and with PostgreSQL as the only server."""
    brokers: Mapping[str, str | None] = {
        "RabbitMQ": (await stage.rabbit()).url,
        "PostgreSQL": None,
    }
    measured: dict[str, Medians] = {}
    for broker, url in brokers.items():
        commands = {}
        for name, options in ((OFF, ()), (ON, ("--timeline",))):
            database = await stage.database()
            commands[name] = command_here("mesh", url or database, database, *options)
        title = f"mesh on {broker}, N={{}}"
        measured |= await compare(commands, _FAN_OUTS, _IN_FLIGHT, rounds, seconds, title=title)
    return measured


def _table(measured: Mapping[str, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for name, medians in measured.items():
        ratio, cpu_ratio = medians.ratio(ON, OFF), _cpu_ratio(medians)
        rows.append(
            [
                name,
                medians.rate(OFF).median,
                medians.rate(ON).median,
                ratio.median,
                f"{ratio.low:.3g}..{ratio.high:.3g}",
                "met" if ratio.median >= _TARGET else "missed",
                cpu_ratio.median,
                f"{cpu_ratio.low:.3g}..{cpu_ratio.high:.3g}",
            ]
        )
    return Table(
        "Tasks per second without and with timelines",
        [
            *("", OFF, ON, "on ÷ off", "lowest..highest", f"at least {_TARGET}"),
            *("on ÷ off per CPU second", "lowest..highest"),
        ],
        rows,
        f"In flight: {_IN_FLIGHT} tasks. Rounds next to each other are compared. CPU time is that "
        "of clients and servers, and hardly depends on what else runs on the machine.",
    )


def _cpu_ratio(medians: Medians) -> Spread:
    """Tasks per second of CPU time, compared round by round."""
    pairs = zip(medians.samples[ON], medians.samples[OFF], strict=True)
    return Spread.from_values([on.extras[_CPU_RATE] / off.extras[_CPU_RATE] for on, off in pairs])


def _figures(medians: Medians) -> JsonValue:
    return {
        **{name: [sample.rate for sample in samples] for name, samples in medians.samples.items()},
        "ratio": medians.ratio(ON, OFF).median,
        "cpu_ratio": _cpu_ratio(medians).median,
    }
