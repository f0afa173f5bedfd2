"""Agents of other frameworks: what a pause costs, and tasks per second next to other systems.

The fake models answer at once, and so does the peer that they call. The first part runs one task
at a time in one process, with PostgreSQL, and counts the bytes that the store's statements carry.
The second part runs the systems as processes, with 16 tasks in flight.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from benchmarks.environment import BenchmarkServers
from benchmarks.framework_agents import MAKERS, NAME, PROMPT, peer, plain_agent
from benchmarks.history import counted
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.report import Cell, Report, Table
from benchmarks.rivals import job
from benchmarks.rivals.contender import Contender
from benchmarks.rivals.frameworks import specs
from benchmarks.rivals.resource_meters import Meter
from benchmarks.rivals.rounds import COSTS, MANY_IN_FLIGHT, run_sample, start_contender
from benchmarks.rivals.specs import versions
from meshpoint import DurableAgent
from meshpoint.local import local_mesh

PLAIN = "no framework"
_BARE, _ON_MESHPOINT = "by itself", "on Meshpoint"
_TARGET_RATIO = 1.0
"""Meshpoint should not be slower than other systems with the same framework."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of pauses, and duration of the measurements."""

    few: int
    many: int
    pause_rounds: int
    fan_outs: Sequence[int]
    rounds: int
    seconds: float


FULL = Plan(few=10, many=40, pause_rounds=7, fan_outs=(1, 5, 20), rounds=5, seconds=5)
QUICK = Plan(few=5, many=10, pause_rounds=1, fan_outs=(1, 5), rounds=1, seconds=2)


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure all frameworks, then all contenders."""
    plan = QUICK if quick else FULL
    await stage.postgres()
    times = await measure_times(stage, plan)
    written = {
        name: {
            pauses: await measure_bytes(name, pauses, await stage.database())
            for pauses in (plan.few, plan.many)
        }
        for name in (PLAIN, *MAKERS)
    }
    measured = await _measure_contenders(stage, plan)
    return Report(
        name="frameworks",
        about={
            **await stage.describe("pydantic-ai-slim", "langchain", "langgraph"),
            **{f"rivals' {name}": each for name, each in (await versions(specs.PACKAGES)).items()},
        },
        tables=[
            _pause_table(plan, times, written),
            *[
                table(pauses, medians)
                for pauses, medians in measured.items()
                for table in (_speed_table, _cost_table)
            ],
            _guarantee_table(measured),
            _target_table(measured),
        ],
        figures={
            "pauses": {name: _pause_figures(times, written, name) for name in written},
            **{f"N={pauses}": _figures(medians) for pauses, medians in measured.items()},
        },
    )


async def measure_times(stage: BenchmarkServers, plan: Plan) -> Medians:
    """Time tasks of `plan.few` pauses in each framework, by itself and on Meshpoint."""
    async with AsyncExitStack() as stack:
        rounds: dict[str, Callable[[], Awaitable[Sample]]] = {}

        async def add_mesh(name: str, agent: DurableAgent[Any, Any]) -> None:
            call = await stack.enter_async_context(_served(agent, await stage.database()))
            rounds[f"{name} {_ON_MESHPOINT}"] = partial(_time_task, call, plan.few)

        await add_mesh(PLAIN, plain_agent(plan.few))
        for name, make in MAKERS.items():
            agents = make(plan.few)
            rounds[f"{name} {_BARE}"] = partial(_time_task, agents.run, plan.few)
            await add_mesh(name, agents.durable)
        for warm_up in rounds.values():
            await warm_up()
        return await interleaved(rounds, plan.pause_rounds, title="pauses")


async def measure_bytes(name: str, pauses: int, db_url: str) -> int:
    """The bytes that one task of an agent writes."""
    agent = plain_agent(pauses) if name == PLAIN else MAKERS[name](pauses).durable
    async with _served(agent, db_url) as call:
        with counted() as written:
            _check(pauses, await call())
    return written.total


@asynccontextmanager
async def _served(
    agent: DurableAgent[Any, Any], db_url: str
) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Serve an agent and its peer, and yield a function that runs one task."""
    async with local_mesh(agent, peer, db_url=db_url) as mesh:
        yield partial(mesh.call, NAME, PROMPT)


async def _time_task(run_task: Callable[[], Awaitable[object]], pauses: int) -> Sample:
    started, cpu_started = time.perf_counter(), time.process_time()
    _check(pauses, await run_task())
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    return Sample(pauses, seconds, {"ms": seconds / pauses * 1e3, "cpu ms": cpu / pauses * 1e3})


def _check(pauses: int, result: object) -> None:
    job.check(pauses, str(result).strip())  # the test's models send word by word


def bytes_per_pause(written: Mapping[int, int]) -> tuple[float, float]:
    """The bytes of each of the first pauses, and of each later one."""
    (few, first), (many, all_) = written.items()
    return first / few, (all_ - first) / (many - few)


def _pause_figures(
    times: Medians, written: Mapping[str, Mapping[int, int]], name: str
) -> dict[str, JsonValue]:
    first, later = bytes_per_pause(written[name])
    figures: dict[str, JsonValue] = {"bytes, first": round(first), "bytes, later": round(later)}
    for where in (_BARE, _ON_MESHPOINT):
        if f"{name} {where}" in times.samples:
            for key in ("ms", "cpu ms"):
                figures[f"{key} {where}"] = times.extra(f"{name} {where}", key).median
    return figures


def _pause_table(plan: Plan, times: Medians, written: Mapping[str, Mapping[int, int]]) -> Table:
    def adapter(name: str, key: str) -> float:
        """What the adapter adds to the framework and to a pause of Meshpoint."""
        on_meshpoint, pause = (
            times.extra(f"{each} {_ON_MESHPOINT}", key).median for each in (name, PLAIN)
        )
        return on_meshpoint - pause - times.extra(f"{name} {_BARE}", key).median

    rows: list[list[Cell]] = []
    for name, sizes in written.items():
        has_framework = name != PLAIN
        cells: list[Cell] = []
        for key in ("ms", "cpu ms"):
            cells += [
                times.extra(f"{name} {_BARE}", key).median if has_framework else None,
                times.extra(f"{name} {_ON_MESHPOINT}", key).median,
                adapter(name, key) if has_framework else None,
            ]
        rows.append([name, *cells, *(each / 1e3 for each in bytes_per_pause(sizes))])
    columns = [
        f"{unit}{where}"
        for unit in ("ms ", "CPU ms ")
        for where in (_BARE, _ON_MESHPOINT, "of the adapter")
    ]
    return Table(
        "One call of a tool by the model, and one pause",
        ["", *columns, f"kB, pauses 1..{plan.few}", f"kB, pauses {plan.few + 1}..{plan.many}"],
        rows,
        f"A task with {plan.few} calls, one task at a time. By itself: the tool is a function "
        "that answers at once. Of the adapter: the time on Meshpoint, less that by itself, less "
        "that of an agent without a framework. kB: what the statements carry for each pause, with "
        "answers of 300 bytes.",
    )


async def _measure_contenders(stage: BenchmarkServers, plan: Plan) -> dict[int, Medians]:
    async with _contenders(stage) as (contenders, meters):
        pids = [each.pid for each in contenders.values()]
        return {
            pauses: await interleaved(
                {
                    name: partial(
                        run_sample,
                        contender,
                        meters[name],
                        pids,
                        pauses,
                        MANY_IN_FLIGHT,
                        plan.seconds,
                    )
                    for name, contender in contenders.items()
                },
                plan.rounds,
                title=f"N={pauses}",
            )
            for pauses in plan.fan_outs
        }


@asynccontextmanager
async def _contenders(
    stage: BenchmarkServers,
) -> AsyncIterator[tuple[dict[str, Contender], dict[str, Meter | None]]]:
    """Start and warm up all contenders. Each runs until the end, idle while others work."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshpoint-bench-")))
        parts = await specs.contender_specs(stage, folder)
        for part in parts:
            if part.meter is not None:
                stack.push_async_callback(part.meter.close)
        started = {
            part.name: await start_contender(stack, part.name, part.command, fan_out=5)
            for part in parts
        }
        yield started, {part.name: part.meter for part in parts}


def _reference(name: str) -> str | None:
    """Meshpoint with the framework of a rival. `None` for Meshpoint's own."""
    return next((ours for ours, rivals in specs.RIVALS_OF.items() if name in rivals), None)


def _speed_table(pauses: int, medians: Medians) -> Table:
    rows: list[list[Cell]] = []
    for name in medians.samples:
        ours = _reference(name)
        rows.append(
            [
                name,
                medians.rate(name).median,
                None if ours is None else f"{medians.ratio(ours, name):.2f}",
                *[medians.extra(name, key).median for key in ("p50", "p99")],
            ]
        )
    return Table(
        f"N={pauses}: an agent whose model makes {pauses} calls, one after another",
        ["", "tasks/s", "Meshpoint ÷", "p50 ms", "p99 ms"],
        rows,
        f"{MANY_IN_FLIGHT} tasks in flight. Meshpoint ÷: tasks/s with the same framework; median, "
        "and lowest..highest, of the rounds.",
    )


def _cost_table(pauses: int, medians: Medians) -> Table:
    rows: list[list[Cell]] = []
    for name, samples in medians.samples.items():
        available = samples[0].extras
        cells = [medians.extra(name, key).median if key in available else None for key in COSTS]
        rows.append([name, *cells])
    note = "Commits: transactions that wrote. Temporal's server is among its own processes."
    return Table(f"N={pauses}: what a task costs", ["", *COSTS.values()], rows, note)


def _guarantee_table(measured: Mapping[int, Medians]) -> Table:
    names = next(iter(measured.values())).samples
    rows = [[name, specs.GUARANTEES[name]] for name in names]
    return Table("What each promises", ["", "durability and transport"], rows)


def _target_table(measured: Mapping[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for pauses, medians in measured.items():
        for name in medians.samples:
            if (ours := _reference(name)) is not None and name not in specs.WEAKER:
                ratio = medians.ratio(ours, name).median
                verdict = "met" if ratio >= _TARGET_RATIO else "missed"
                rows.append([f"N={pauses}: {ours} ÷ {name}", _TARGET_RATIO, ratio, verdict])
    return Table("Targets: tasks/s, 16 in flight", ["", "at least", "seen", ""], rows)


def _figures(medians: Medians) -> dict[str, JsonValue]:
    figures: dict[str, JsonValue] = {}
    for name, samples in medians.samples.items():
        rate, ours = medians.rate(name), _reference(name)
        extras = {key: medians.extra(name, key).median for key in samples[0].extras}
        each: dict[str, JsonValue] = {
            "tasks/s": rate.median,
            "lowest": rate.low,
            "highest": rate.high,
            **extras,
        }
        if ours is not None:
            each["Meshpoint ÷"] = medians.ratio(ours, name).median
        figures[name] = each
    return figures
