"""The store alone (pause, N answers, resume, end), compared with plain SQL and the seed design."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from benchmarks.contenders import background_tasks
from benchmarks.contenders.job import Contender, jobs
from benchmarks.contenders.mesh import Mesh
from benchmarks.contenders.plain_sql import PlainSql
from benchmarks.contenders.seed import SeedDesign
from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.postgres_counters import PostgresProbe
from benchmarks.report import Cell, Lines, Report, Table

MESH, UNBATCHED, PLAIN_SQL, SEED = "meshpoint", "meshpoint alone", "floor", "seed"

FAN_OUTS = (1, 3, 10, 100, 1000, 10_000)
_MAX_CALLS = {MESH: 10_000, UNBATCHED: 1000, PLAIN_SQL: 10_000, SEED: 1000}
"""Maximum fan-out. Beyond it a contender takes minutes for one task."""
_MAX_TASKS = 20_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. A round has at least `least` tasks, even of a slow contender."""

    seconds: float
    rounds: dict[int, int]
    max_calls: dict[str, int]

    @classmethod
    def for_speed(cls, *, quick: bool) -> Effort:
        """About a minute in all if `quick`, otherwise several."""
        if quick:
            max_calls = {**_MAX_CALLS, UNBATCHED: 10, MESH: 1000, PLAIN_SQL: 1000}
            return cls(0.5, dict.fromkeys(FAN_OUTS, 3) | {1000: 1}, max_calls)
        return cls(1.5, dict.fromkeys(FAN_OUTS, 5) | {100: 3, 1000: 3, 10_000: 3}, _MAX_CALLS)

    def includes(self, name: str, fan_out: int) -> bool:
        """Whether `name` takes part at `fan_out`."""
        return fan_out <= self.max_calls[name]


def in_flight(fan_out: int) -> int:
    """Number of concurrent tasks."""
    return 64 if fan_out < 1000 else 16 if fan_out < 10_000 else 2


class Entrant:
    """A contender with its own database."""

    def __init__(self, name: str, contender: Contender) -> None:
        self.name = name
        self._contender = contender
        self._probe: PostgresProbe | None = None

    async def open(self, stage: BenchmarkServers) -> None:
        """Create the database with standing tasks."""
        seed = self.name == SEED
        self._url = await stage.empty_database() if seed else await stage.database()
        await self._contender.open(self._url)
        await background_tasks.add_standing_tasks(self._url, seed=seed)
        self._probe = PostgresProbe()
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
        first_round = 1 if fan_out >= 1000 else in_flight(fan_out)
        minimum = in_flight(fan_out)
        if self.name in {UNBATCHED, SEED} and fan_out >= 100:
            minimum = first_round = 8 if fan_out == 100 else 2
        tasks = int((await self.round(fan_out, first_round)).rate * seconds)
        if tasks > 4 * first_round:  # the first tasks were slow because of the warm-up
            tasks = int((await self.round(fan_out, min(tasks, _MAX_TASKS))).rate * seconds)
        return min(max(tasks, minimum), _MAX_TASKS)

    async def round(self, fan_out: int, tasks: int) -> Sample:
        """Run `tasks` tasks, and clear the tables afterwards."""
        prepared = self._contender.prepared(jobs(fan_out, tasks))
        gc.collect()
        gc.freeze()  # in production, jobs arrive one at a time
        before = await self._probe.counters() if self._probe else None
        cpu, started_at = time.process_time(), time.perf_counter()
        await self._contender.run(prepared, in_flight(fan_out))
        elapsed, cpu = time.perf_counter() - started_at, time.process_time() - cpu
        gc.unfreeze()
        if self._probe is None or before is None:
            return Sample(tasks, elapsed, {"cpu_us": cpu / tasks * 1e6})
        extras = (await self._probe.counters()).increase_per(tasks, before)
        await background_tasks.delete_finished_tasks(self._url)
        return Sample(tasks, elapsed, {**extras, "cpu_us": cpu / tasks * 1e6})


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure on PostgreSQL, then on SQLite."""
    effort = Effort.for_speed(quick=quick)
    measured = await _measure_postgres(stage, effort)
    on_file = await _measure_sqlite(effort)
    figures: dict[str, JsonValue] = {
        str(fan_out): _figures(fan_out, medians) for fan_out, medians in measured.items()
    }
    sqlite: dict[str, JsonValue] = {
        str(fan_out): _figures(fan_out, medians) for fan_out, medians in on_file.items()
    }
    return Report(
        name="store",
        about=await stage.describe("psycopg", "zstandard"),
        tables=[
            _speed_table(measured),
            _cost_table(measured),
            _sqlite_table(on_file),
            _target_table(measured),
        ],
        figures={"postgresql": figures, "sqlite": sqlite},
        plots={"cost-per-answer": _plot(measured)},
    )


async def _measure_postgres(stage: BenchmarkServers, effort: Effort) -> dict[int, Medians]:
    entrants = [
        Entrant(MESH, Mesh()),
        Entrant(PLAIN_SQL, PlainSql()),
        Entrant(UNBATCHED, Mesh(claim_together=False)),
        Entrant(SEED, SeedDesign()),
    ]
    for entrant in entrants:
        await entrant.open(stage)
    measured = {}
    for fan_out in FAN_OUTS:
        if participants := [
            entrant for entrant in entrants if effort.includes(entrant.name, fan_out)
        ]:
            measured[fan_out] = await _rounds(participants, fan_out, effort)
    for entrant in entrants:
        await entrant.close()
    return measured


async def _measure_sqlite(effort: Effort) -> dict[int, Medians]:
    measured = {}
    with tempfile.TemporaryDirectory(prefix="meshpoint-bench-") as folder:
        entrant = Entrant(MESH, Mesh())
        await entrant.open_file(Path(folder) / "store.db")
        for fan_out in (1, 3, 10, 100):
            measured[fan_out] = await _rounds([entrant], fan_out, effort)
        await entrant.close()
    return measured


async def _rounds(entrants: Sequence[Entrant], fan_out: int, effort: Effort) -> Medians:
    counts = {
        entrant.name: await entrant.tasks_for(fan_out, effort.seconds) for entrant in entrants
    }

    def contender(entrant: Entrant) -> Callable[[], Awaitable[Sample]]:
        return lambda: entrant.round(fan_out, counts[entrant.name])

    rounds = {entrant.name: contender(entrant) for entrant in entrants}
    return await interleaved(rounds, effort.rounds[fan_out], title=f"N={fan_out}")


def _speed_table(measured: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in measured.items():
        for name in medians.samples:
            rate = medians.rate(name)
            rows.append(
                [
                    f"N={fan_out} {name}",
                    rate.median,
                    f"{rate.low:.3g}..{rate.high:.3g}",
                    1e6 / rate.median / fan_out,
                    *_ratio(medians, name, PLAIN_SQL),
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
        "In flight: 64 tasks, 16 from N=1000, 2 at N=10000 (seed: 8 threads). Floor: the same "
        "rows by hand-written SQL that checks nothing but exactly-once. Seed: the design before "
        "Meshpoint; one task of N=10000 would take it more than ten minutes. Alone: each answer "
        "is claimed by itself, 100 at a time; "
        "otherwise what arrived meanwhile goes together, as the worker has it. Meshpoint's marks "
        "of what was sent go in the background, as in life, and are waited for before the clock "
        "stops; the floor's, which takes no locks in order, cannot.",
    )


def _ratio(medians: Medians, name: str, reference: str) -> list[Cell]:
    if reference == name or reference not in medians.samples:
        return [None, None]
    ratio = medians.ratio(name, reference)
    return [ratio.median, f"{ratio.low:.2g}..{ratio.high:.2g}"]


def _cost_table(measured: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in measured.items():
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
        "Statements as the server counts them: each row of a driver's executemany is one; "
        "those inside the floor's function are not.",
    )


def _sqlite_table(measured: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in measured.items():
        rate = medians.rate(MESH)
        cost = medians.extra(MESH, "cpu_us").median
        rows.append(
            [
                f"N={fan_out}",
                rate.median,
                f"{rate.low:.3g}..{rate.high:.3g}",
                1e6 / rate.median / fan_out,
                cost,
            ]
        )
    return Table(
        "Meshpoint's store on SQLite (WAL, synchronous FULL)",
        ["", "tasks/s", "lowest..highest", "µs per answer", "client CPU µs"],
        rows,
    )


def _target_table(measured: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out in (1, 10, 100):
        if fan_out in measured:
            rows.append(
                _target_row(
                    f"N={fan_out}: ÷ floor", 0.7, measured[fan_out].ratio(MESH, PLAIN_SQL).median
                )
            )
    if {10, 10_000} <= measured.keys():
        small, large = (1 / measured[n].rate(MESH).median / n for n in (10, 10_000))
        rows.append(_target_row("cost per answer, N=10 ÷ N=10000", 1 / 1.5, small / large))
    for fan_out, minimum in ((10, 20.0), (1000, 200.0)):
        if fan_out in measured and SEED in measured[fan_out].samples:
            rows.append(
                _target_row(
                    f"N={fan_out}: ÷ seed", minimum, measured[fan_out].ratio(MESH, SEED).median
                )
            )
    return Table("Targets", ["", "at least", "seen", ""], rows)


def _target_row(name: str, minimum: float, actual: float) -> list[Cell]:
    return [name, minimum, actual, "met" if actual >= minimum else "missed"]


def _figures(fan_out: int, medians: Medians) -> JsonValue:
    return {
        name: {
            "tasks_per_second": medians.rate(name).median,
            "us_per_answer": 1e6 / medians.rate(name).median / fan_out,
            **{
                f"to_{reference}": medians.ratio(name, reference).median
                for reference in (PLAIN_SQL, SEED)
                if reference in medians.samples
            },
            "rounds": [sample.rate for sample in samples],
            **{key: medians.extra(name, key).median for key in samples[0].extras},
        }
        for name, samples in medians.samples.items()
    }


def _plot(measured: dict[int, Medians]) -> Lines:
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in _MAX_CALLS}
    for fan_out, medians in measured.items():
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
