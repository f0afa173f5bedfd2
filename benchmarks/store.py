"""The store alone (pause, N answers, resume, end), compared with plain SQL and the seed design."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from benchmarks.contenders import standing
from benchmarks.contenders.floor import Floor
from benchmarks.contenders.job import Contender, jobs
from benchmarks.contenders.mesh import Mesh
from benchmarks.contenders.seed import Seed
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.probe import Probe
from benchmarks.report import Cell, Lines, Report, Table
from benchmarks.stage import Stage

MESH, ALONE, FLOOR, SEED = "meshpoint", "meshpoint alone", "floor", "seed"

FAN_OUTS = (1, 3, 10, 100, 1000, 10_000)
_MOST_CALLS = {MESH: 10_000, ALONE: 1000, FLOOR: 10_000, SEED: 1000}
"""Maximum fan-out. Beyond it a contender takes minutes for one task."""
_MOST_TASKS = 20_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. A round has at least `least` tasks, even of a slow contender."""

    seconds: float
    rounds: dict[int, int]
    most_calls: dict[str, int]

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        """About a minute in all if `quick`, otherwise several."""
        if quick:
            most = {**_MOST_CALLS, ALONE: 10, MESH: 1000, FLOOR: 1000}
            return cls(0.5, dict.fromkeys(FAN_OUTS, 3) | {1000: 1}, most)
        return cls(1.5, dict.fromkeys(FAN_OUTS, 5) | {100: 3, 1000: 3, 10_000: 3}, _MOST_CALLS)

    def takes(self, name: str, fan_out: int) -> bool:
        """Whether `name` takes part at `fan_out`."""
        return fan_out <= self.most_calls[name]


def in_flight(fan_out: int) -> int:
    """Number of concurrent tasks."""
    return 64 if fan_out < 1000 else 16 if fan_out < 10_000 else 2


class Entrant:
    """A contender with its own database."""

    def __init__(self, name: str, contender: Contender) -> None:
        self.name = name
        self._contender = contender
        self._probe: Probe | None = None

    async def open(self, stage: Stage) -> None:
        """Create the database with standing tasks."""
        seed = self.name == SEED
        self._url = await stage.empty_database() if seed else await stage.database()
        await self._contender.open(self._url)
        await standing.settle(self._url, seed=seed)
        self._probe = Probe()
        await self._probe.open(self._url)

    async def open_file(self, path: Path) -> None:
        """Use a SQLite file. Nothing is counted and nothing is deleted."""
        await self._contender.open(f"sqlite:///{path}")

    async def close(self) -> None:
        """Disconnect."""
        await self._contender.close()
        if self._probe is not None:
            await self._probe.close()

    async def tasks_for(self, fan_out: int, seconds: float) -> int:
        """Warm up, and return how many tasks take about `seconds`."""
        if self.name == SEED and fan_out >= 1000:
            return max(1, int(seconds))  # six seconds each; the smaller fan-outs were the warm-up
        first = 1 if fan_out >= 1000 else in_flight(fan_out)
        least = in_flight(fan_out)
        if self.name in {ALONE, SEED} and fan_out >= 100:
            least = first = 8 if fan_out == 100 else 2
        tasks = int((await self.round(fan_out, first)).rate * seconds)
        if tasks > 4 * first:  # the first tasks were slow because of the warm-up
            tasks = int((await self.round(fan_out, min(tasks, _MOST_TASKS))).rate * seconds)
        return min(max(tasks, least), _MOST_TASKS)

    async def round(self, fan_out: int, tasks: int) -> Sample:
        """Run `tasks` tasks, and clear the tables afterwards."""
        prepared = self._contender.prepared(jobs(fan_out, tasks))
        gc.collect()
        gc.freeze()  # in production, jobs arrive one at a time
        before = await self._probe.counters() if self._probe else None
        cpu, began = time.process_time(), time.perf_counter()
        await self._contender.run(prepared, in_flight(fan_out))
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        gc.unfreeze()
        if self._probe is None or before is None:
            return Sample(tasks, took, {"cpu_us": cpu / tasks * 1e6})
        seen = (await self._probe.counters()).per(tasks, before)
        await standing.clear(self._url)
        return Sample(tasks, took, {**seen, "cpu_us": cpu / tasks * 1e6})


async def run(stage: Stage, *, quick: bool) -> Report:
    """Measure on PostgreSQL, then on SQLite."""
    effort = Effort.of(quick=quick)
    found = await _on_postgres(stage, effort)
    on_file = await _on_sqlite(effort)
    figures: dict[str, JsonValue] = {str(fan_out): _figures(fan_out, medians) for fan_out, medians in found.items()}
    sqlite: dict[str, JsonValue] = {str(fan_out): _figures(fan_out, medians) for fan_out, medians in on_file.items()}
    return Report(
        name="store",
        about=await stage.about("psycopg", "zstandard"),
        tables=[_speed(found), _cost(found), _sqlite(on_file), _targets(found)],
        figures={"postgresql": figures, "sqlite": sqlite},
        plots={"cost-per-answer": _plot(found)},
    )


async def _on_postgres(stage: Stage, effort: Effort) -> dict[int, Medians]:
    entrants = [
        Entrant(MESH, Mesh()),
        Entrant(FLOOR, Floor()),
        Entrant(ALONE, Mesh(claim_together=False)),
        Entrant(SEED, Seed()),
    ]
    for entrant in entrants:
        await entrant.open(stage)
    found = {}
    for fan_out in FAN_OUTS:
        if taking_part := [entrant for entrant in entrants if effort.takes(entrant.name, fan_out)]:
            found[fan_out] = await _rounds(taking_part, fan_out, effort)
    for entrant in entrants:
        await entrant.close()
    return found


async def _on_sqlite(effort: Effort) -> dict[int, Medians]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="meshpoint-bench-") as folder:
        entrant = Entrant(MESH, Mesh())
        await entrant.open_file(Path(folder) / "store.db")
        for fan_out in (1, 3, 10, 100):
            found[fan_out] = await _rounds([entrant], fan_out, effort)
        await entrant.close()
    return found


async def _rounds(entrants: Sequence[Entrant], fan_out: int, effort: Effort) -> Medians:
    counts = {entrant.name: await entrant.tasks_for(fan_out, effort.seconds) for entrant in entrants}

    def contender(entrant: Entrant) -> Callable[[], Awaitable[Sample]]:
        return lambda: entrant.round(fan_out, counts[entrant.name])

    rounds = {entrant.name: contender(entrant) for entrant in entrants}
    return await interleaved(rounds, effort.rounds[fan_out], title=f"N={fan_out}")


def _speed(found: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in found.items():
        for name in medians.samples:
            rate = medians.rate(name)
            rows.append(
                [
                    f"N={fan_out} {name}",
                    rate.median,
                    f"{rate.low:.3g}..{rate.high:.3g}",
                    1e6 / rate.median / fan_out,
                    *_ratio(medians, name, FLOOR),
                    *_ratio(medians, name, SEED),
                ]
            )
    return Table(
        "The store on PostgreSQL: pause, N answers, resume, end",
        [
            "",
            "tasks/s",
            "lowest..highest",
            "µs per answer",
            "÷ floor",
            "lowest..highest",
            "÷ seed",
            "lowest..highest",
        ],
        rows,
        "In flight: 64 tasks, 16 from N=1000, 2 at N=10000 (seed: 8 threads). Floor: the same rows by hand-written "
        "SQL that checks nothing but exactly-once. Seed: the design before Meshpoint; one task of N=10000 would take "
        "it more than ten minutes. Alone: each answer is claimed by itself, 100 at a time; otherwise what arrived "
        "meanwhile goes together, as the worker has it. Meshpoint's marks of what was sent go in the background, as "
        "in life, and are waited for before the clock stops; the floor's, which takes no locks in order, cannot.",
    )


def _ratio(medians: Medians, name: str, to: str) -> list[Cell]:
    if to == name or to not in medians.samples:
        return [None, None]
    ratio = medians.ratio(name, to)
    return [ratio.median, f"{ratio.low:.2g}..{ratio.high:.2g}"]


def _cost(found: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in found.items():
        for name, samples in medians.samples.items():
            counted = "statements" in samples[0].extras
            rows.append(
                [
                    f"N={fan_out} {name}",
                    medians.extra(name, "statements").median if counted else None,
                    *[medians.extra(name, key).median for key in ("commits", "wal_kib", "cpu_us")],
                ]
            )
    return Table(
        "What one task costs",
        ["", "statements", "commits that wrote", "WAL KiB", "client CPU µs"],
        rows,
        "Statements as the server counts them: each row of a driver's executemany is one; those inside the floor's "
        "function are not.",
    )


def _sqlite(found: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in found.items():
        rate = medians.rate(MESH)
        cost = medians.extra(MESH, "cpu_us").median
        rows.append(
            [f"N={fan_out}", rate.median, f"{rate.low:.3g}..{rate.high:.3g}", 1e6 / rate.median / fan_out, cost]
        )
    return Table(
        "Meshpoint's store on SQLite (WAL, synchronous FULL)",
        ["", "tasks/s", "lowest..highest", "µs per answer", "client CPU µs"],
        rows,
    )


def _targets(found: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out in (1, 10, 100):
        if fan_out in found:
            rows.append(_target(f"N={fan_out}: ÷ floor", 0.7, found[fan_out].ratio(MESH, FLOOR).median))
    if {10, 10_000} <= found.keys():
        few, many = (1 / found[n].rate(MESH).median / n for n in (10, 10_000))
        rows.append(_target("cost per answer, N=10 ÷ N=10000", 1 / 1.5, few / many))
    for fan_out, least in ((10, 20.0), (1000, 200.0)):
        if fan_out in found and SEED in found[fan_out].samples:
            rows.append(_target(f"N={fan_out}: ÷ seed", least, found[fan_out].ratio(MESH, SEED).median))
    return Table("Targets", ["", "at least", "seen", ""], rows)


def _target(name: str, least: float, seen: float) -> list[Cell]:
    return [name, least, seen, "met" if seen >= least else "missed"]


def _figures(fan_out: int, medians: Medians) -> JsonValue:
    return {
        name: {
            "tasks_per_second": medians.rate(name).median,
            "us_per_answer": 1e6 / medians.rate(name).median / fan_out,
            **{f"to_{to}": medians.ratio(name, to).median for to in (FLOOR, SEED) if to in medians.samples},
            "rounds": [sample.rate for sample in samples],
            **{key: medians.extra(name, key).median for key in samples[0].extras},
        }
        for name, samples in medians.samples.items()
    }


def _plot(found: dict[int, Medians]) -> Lines:
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in _MOST_CALLS}
    for fan_out, medians in found.items():
        for name in medians.samples:
            series[name].append((fan_out, 1e6 / medians.rate(name).median / fan_out))
    return Lines(
        "What one answer costs, by fan-out",
        "calls of one pause",
        "µs of the whole task per answer",
        {name: points for name, points in series.items() if points},
        log_x=True,
        log_y=True,
    )
