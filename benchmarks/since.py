"""`python -m benchmarks.since REVISION`: compare this tree's speed with an earlier revision's.

It measures the store, with `--system` the whole system: a client, an agent, its peers, a broker
and a database, and with `--messages` what one message costs without servers.

The versions run in separate processes with separate databases on one PostgreSQL, and take turns
after each round; the store's start anew several times. This tree and the earlier one take part
twice, to show how far two equal versions differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from pydantic import JsonValue
from rich.console import Console

from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.report import Cell, Report, Table
from benchmarks.rivals.contender import Contender
from benchmarks.rivals.resource_meters import process_cpu_seconds

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
NOW, REPEATED = "now", "now, once more"
BEFORE, REPEATED_BEFORE = "before", "before, once more"
_NAMES = (NOW, BEFORE, REPEATED, REPEATED_BEFORE)

FAN_OUTS = (1, 10, 100, 1000)
_STARTS, _ROUNDS = 6, 2
"""The number of starts, each with new processes and new databases, and of rounds per start.

Two processes of the same version differ by up to 5 %. More rounds of one start do not help. The
order of the starts rotates, in case it matters.
"""
_SYSTEM_ROUNDS = 12
_MESSAGE_ROUNDS = 9
_SECONDS = 1.0
_SYSTEM_FAN_OUTS = (1, 10, 100)
_SYSTEM_SECONDS = 3.0
_IN_FLIGHT = 64
"""Number of requests, enough to keep the machine busy."""
_NOTE = (
    "Each round is compared with its neighbour. The difference between now and now, once more is "
    "the noise."
)
_SUMMARY_NOTE = (
    "Each round divides the geometric mean of the two rates of now by the mean of the two rates "
    "of before. The ratio is the geometric mean of the rounds. Two equal versions are before, "
    "once more ÷ before."
)


class Version:
    """The store's contender `meshpoint` from one tree, in its own process."""

    def __init__(self, name: str, tree: Path, url: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, str(tree / "benchmarks" / "version.py"), url],
            env={"PYTHONPATH": _import_path(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    async def tasks_for(self, fan_out: int, seconds: float) -> int:
        """Warm up, and return how many tasks take about `seconds`."""
        return int(await self._request("tasks_for", fan_out, seconds))

    async def run_round(self, fan_out: int, tasks: int) -> Sample:
        """Run `tasks` tasks."""
        return Sample(**await self._request("round", fan_out, tasks))

    async def _request(self, *command: object) -> Any:
        return await asyncio.to_thread(self._read_answer, json.dumps(command))

    def _read_answer(self, question: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the process of the version {self.name!r} ended: see above")
        return json.loads(answer)


def _tree_of(name: str, tree: Path) -> Path:
    """Where a version's files are. The earlier revision is in `tree`."""
    return ROOT if name in {NOW, REPEATED} else tree


def _import_path(tree: Path) -> str:
    return ":".join(str(tree / folder) for folder in ("src", "tests", "."))


def main(
    revision: Annotated[str, typer.Argument(help="Commit, tag or branch to compare with.")],
    system: Annotated[
        bool, typer.Option("--system", help="Measure the whole system instead of the store.")
    ] = False,
    messages: Annotated[
        bool, typer.Option("--messages", help="Measure one message instead, without servers.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Take half a minute.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Compare this tree with REVISION: a task pauses, gets N answers, resumes and ends."""
    compare = _compare_systems if system else _compare_messages if messages else _compare
    with _extracted_tree(revision) as tree:
        report = asyncio.run(compare(revision, tree, quick=quick))
    report.save(RESULTS)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        report.show()


@contextlib.contextmanager
def _extracted_tree(revision: str) -> Iterator[Path]:
    """The files of `revision` in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="meshpoint-since-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, capture_output=True, check=False
        )
        if archive.returncode:
            Console(stderr=True).print(
                f"{revision!r} is not a revision of this repository; use one that `git log` shows",
                style="red",
            )
            raise typer.Exit(2)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


async def _compare(revision: str, tree: Path, *, quick: bool) -> Report:
    async with BenchmarkServers() as stage:
        measured = {fan_out: Medians({}) for fan_out in FAN_OUTS}
        for start in range(2 if quick else _STARTS):
            turn = start % len(_NAMES)
            versions = [
                Version(name, _tree_of(name, tree), await stage.empty_database())
                for name in (*_NAMES[turn:], *_NAMES[:turn])
            ]
            try:
                for fan_out in FAN_OUTS:
                    measured[fan_out] += await _measure_rounds(versions, fan_out, quick=quick)
            finally:
                for version in versions:
                    version.close()
        return Report(
            name="since",
            about={**await stage.describe(), "before": _commit(revision), "now": _commit("HEAD")},
            tables=[_table(measured), _summary(measured)],
            figures=_rates(measured),
        )


async def _compare_systems(revision: str, tree: Path, *, quick: bool) -> Report:
    async with BenchmarkServers() as stage, contextlib.AsyncExitStack() as stack:
        amqp = (await stage.rabbit()).url
        systems = {
            name: await _start_system(
                stack, _tree_of(name, tree), name, amqp, await stage.empty_database()
            )
            for name in _NAMES
        }
        measured: dict[int, Medians] = {}
        for fan_out in _SYSTEM_FAN_OUTS:
            rounds = {
                name: partial(_system_round, system, fan_out, quick)
                for name, system in systems.items()
            }
            for warm_up in rounds.values():
                await warm_up()
            measured[fan_out] = await interleaved(
                rounds, 4 if quick else _SYSTEM_ROUNDS, title=f"N={fan_out}"
            )
        return Report(
            name="since-system",
            about={**await stage.describe(), "before": _commit(revision), "now": _commit("HEAD")},
            tables=[_system_table(measured), _summary(measured)],
            figures=_rates(measured),
        )


async def _compare_messages(revision: str, tree: Path, *, quick: bool) -> Report:
    counts: dict[str, Counter[str]] = {}

    async def send(name: str, environment: Path) -> Sample:
        script = Path(__file__).with_name("message_path.py")
        output = await asyncio.to_thread(
            subprocess.check_output,
            [sys.executable, str(script)],
            env={"PYTHONPATH": _import_path(environment)},
        )
        counted, cpu_seconds = json.loads(output)
        counts[name] = Counter(counted)
        return Sample(1, cpu_seconds)

    senders = {
        name: partial(send, name, environment)
        for name, environment in ((NOW, ROOT), (BEFORE, tree), (REPEATED, ROOT))
    }
    medians = await interleaved(senders, 3 if quick else _MESSAGE_ROUNDS, title="messages")
    return Report(
        name="since-messages",
        about={
            **await BenchmarkServers().describe(),
            "before": _commit(revision),
            "now": _commit("HEAD"),
        },
        tables=[_message_table(counts, medians)],
        figures={
            name: [sample.seconds for sample in samples]
            for name, samples in medians.samples.items()
        },
    )


async def _start_system(
    stack: contextlib.AsyncExitStack, tree: Path, name: str, amqp: str, database: str
) -> Contender:
    """Start the mesh of `tree` after running its migrations."""
    # Without PYTHONSAFEPATH, `-m` would use the benchmarks of the current folder.
    python = ["env", f"PYTHONPATH={_import_path(tree)}", "PYTHONSAFEPATH=1", sys.executable]
    upgrade = (
        "import sys; from meshpoint.adapters.sql import migrations; "
        "migrations.upgrade(sys.argv[1])"
    )
    await asyncio.to_thread(subprocess.run, [*python, "-c", upgrade, database], check=True)
    mesh = [*python, "-m", "benchmarks.rivals.mesh", amqp, database, "--together"]
    contender = await Contender.start(name, mesh)
    stack.push_async_callback(contender.close)
    return contender


async def _system_round(system: Contender, fan_out: int, quick: bool) -> Sample:
    before = process_cpu_seconds(system.pid)
    done = await system.run_round(fan_out, _IN_FLIGHT, 1.0 if quick else _SYSTEM_SECONDS)
    client_seconds = process_cpu_seconds(system.pid) - before
    count = len(done.latencies)
    return Sample(
        count,
        done.seconds,
        {
            "client_us": client_seconds / count * 1e6,
            "p50": done.quantile(0.5),
            "p99": done.quantile(0.99),
        },
    )


def _commit(revision: str) -> str:
    return subprocess.check_output(
        ["git", "rev-parse", "--short", f"{revision}^{{commit}}"], cwd=ROOT, text=True
    ).strip()


async def _measure_rounds(versions: list[Version], fan_out: int, *, quick: bool) -> Medians:
    tasks = min(
        [await version.tasks_for(fan_out, 0.3 if quick else _SECONDS) for version in versions]
    )

    def round_of(version: Version) -> Callable[[], Any]:
        return lambda: version.run_round(fan_out, tasks)

    contenders = {version.name: round_of(version) for version in versions}
    return await interleaved(contenders, 2 if quick else _ROUNDS, title=f"N={fan_out}")


def _rates(measured: Mapping[int, Medians]) -> dict[str, JsonValue]:
    """The tasks per second of every round."""
    return {
        str(fan_out): {
            name: [sample.rate for sample in samples] for name, samples in medians.samples.items()
        }
        for fan_out, medians in measured.items()
    }


def _table(measured: Mapping[int, Medians]) -> Table:
    return Table(
        "The store on PostgreSQL, now and before",
        [
            "",
            "tasks/s",
            "÷ before",
            "lowest..highest",
            "commits that wrote",
            "WAL KiB",
            "client CPU µs",
        ],
        _rows(measured, "commits", "wal_kib", "cpu_us"),
        _NOTE,
    )


def _message_table(counts: Mapping[str, Counter[str]], medians: Medians) -> Table:
    rows: list[list[Cell]] = []
    for name in (BEFORE, NOW, REPEATED):
        count, slowness = counts[name], medians.ratio(BEFORE, name)
        rows.append(
            [
                name,
                count.total(),
                count.total() - count["adapters"],
                ", ".join(f"{part.removesuffix('.py')} {n}" for part, n in count.most_common()),
                1e6 / medians.rate(name).median,
                *(
                    [None, None]
                    if name == BEFORE
                    else [slowness.median, f"{slowness.low:.2g}..{slowness.high:.2g}"]
                ),
            ]
        )
    return Table(
        "One warm message without a pause, now and before",
        ["", "functions", "without adapters", "parts", "CPU µs", "÷ before", "lowest..highest"],
        rows,
        "With the broker and the database of `local_mesh`. The CPU time includes the client's and "
        "the driver's; the functions are those of a replica and of its stores' threads. " + _NOTE,
    )


def _system_table(measured: Mapping[int, Medians]) -> Table:
    return Table(
        f"The whole system on RabbitMQ and PostgreSQL, {_IN_FLIGHT} requests in flight, now and "
        "before",
        ["", "tasks/s", "÷ before", "lowest..highest", "client CPU µs", "p50 ms", "p99 ms"],
        _rows(measured, "client_us", "p50", "p99"),
        _NOTE,
    )


def _summary(measured: Mapping[int, Medians]) -> Table:
    return Table(
        "Both copies of now ÷ both copies of before",
        ["", "ratio", "standard error", "two equal versions", "standard error"],
        [
            [
                f"N={fan_out}",
                *mean_and_error(log_ratios(medians, (NOW, REPEATED), (BEFORE, REPEATED_BEFORE))),
                *mean_and_error(log_ratios(medians, (REPEATED_BEFORE,), (BEFORE,))),
            ]
            for fan_out, medians in measured.items()
        ],
        _SUMMARY_NOTE,
    )


def log_ratios(medians: Medians, names: Sequence[str], references: Sequence[str]) -> list[float]:
    """How much faster `names` are than `references` in each round, as logarithms."""
    above, below = (
        [
            fmean(math.log(sample.rate) for sample in samples)
            for samples in zip(*(medians.samples[name] for name in group), strict=True)
        ]
        for group in (names, references)
    )
    return [one - other for one, other in zip(above, below, strict=True)]


def mean_and_error(logarithms: Sequence[float]) -> tuple[float, float]:
    """The geometric mean of values, and its standard error."""
    mean = math.exp(fmean(logarithms))
    return mean, mean * stdev(logarithms) / math.sqrt(len(logarithms))


def _rows(measured: Mapping[int, Medians], *extras: str) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for fan_out, medians in measured.items():
        for name in (BEFORE, REPEATED_BEFORE, NOW, REPEATED):
            ratio = medians.ratio(name, BEFORE)
            rows.append(
                [
                    f"N={fan_out} {name}",
                    medians.rate(name).median,
                    *(
                        [None, None]
                        if name == BEFORE
                        else [ratio.median, f"{ratio.low:.2g}..{ratio.high:.2g}"]
                    ),
                    *[medians.extra(name, key).median for key in extras],
                ]
            )
    return rows


if __name__ == "__main__":
    typer.run(main)
