"""`python -m benchmarks.since REVISION`: is the store as fast as it was? Two versions side by side, in turn.

Each version is a process of its own with a database of its own, on one PostgreSQL; each does a round, then the next
does. The version at hand takes part twice, so that what differs between two equal ones is seen too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.report import Cell, Report, Table
from benchmarks.stage import Stage

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
NOW, AGAIN, BEFORE = "now", "now, once more", "before"

FAN_OUTS = (1, 10, 100, 1000)
_ROUNDS = 12
_SECONDS = 1.0


class Version:
    """The store's contender `meshpoint` of one tree, in a process of its own."""

    def __init__(self, name: str, tree: Path, url: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("version.py")), url],
            env={"PYTHONPATH": ":".join(str(tree / folder) for folder in ("src", "tests", "."))},
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
        """Warm up; how many tasks take about `seconds`."""
        return int(await self._asked("tasks_for", fan_out, seconds))

    async def round(self, fan_out: int, tasks: int) -> Sample:
        """Do `tasks` tasks."""
        return Sample(**await self._asked("round", fan_out, tasks))

    async def _asked(self, *question: object) -> Any:
        return await asyncio.to_thread(self._answer, json.dumps(question))

    def _answer(self, question: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the process of the version {self.name!r} ended: see above")
        return json.loads(answer)


def main(
    revision: Annotated[str, typer.Argument(help="The commit, tag or branch to compare with.")],
    quick: Annotated[bool, typer.Option(help="Half a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure this tree's store beside that of REVISION: pause, N answers, resume, end."""
    with _tree_of(revision) as tree:
        report = asyncio.run(_compare(revision, tree, quick=quick))
    report.save(RESULTS)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        report.show()


@contextlib.contextmanager
def _tree_of(revision: str) -> Iterator[Path]:
    """The files of `revision` in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="meshpoint-since-") as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            Console(stderr=True).print(
                f"{revision!r} is no revision of this repository: name one that `git log` shows", style="red"
            )
            raise typer.Exit(2)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


async def _compare(revision: str, tree: Path, *, quick: bool) -> Report:
    async with Stage() as stage:
        versions = [
            Version(name, where, await stage.empty_database())
            for name, where in ((NOW, ROOT), (BEFORE, tree), (AGAIN, ROOT))
        ]
        try:
            found = {fan_out: await _rounds(versions, fan_out, quick=quick) for fan_out in FAN_OUTS}
        finally:
            for version in versions:
                version.close()
        return Report(
            name="since",
            about={**await stage.about(), "before": _commit(revision), "now": _commit("HEAD")},
            tables=[_table(found)],
            figures={
                str(fan_out): {name: [sample.rate for sample in samples] for name, samples in medians.samples.items()}
                for fan_out, medians in found.items()
            },
        )


def _commit(revision: str) -> str:
    return subprocess.check_output(
        ["git", "rev-parse", "--short", f"{revision}^{{commit}}"], cwd=ROOT, text=True
    ).strip()


async def _rounds(versions: list[Version], fan_out: int, *, quick: bool) -> Medians:
    tasks = min([await version.tasks_for(fan_out, 0.3 if quick else _SECONDS) for version in versions])

    def rounds_of(version: Version) -> Callable[[], Any]:
        return lambda: version.round(fan_out, tasks)

    contenders = {version.name: rounds_of(version) for version in versions}
    return await interleaved(contenders, 4 if quick else _ROUNDS, title=f"N={fan_out}")


def _table(found: dict[int, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for fan_out, medians in found.items():
        for name in (BEFORE, NOW, AGAIN):
            ratio = medians.ratio(name, BEFORE)
            rows.append(
                [
                    f"N={fan_out} {name}",
                    medians.rate(name).median,
                    *([None, None] if name == BEFORE else [ratio.median, f"{ratio.low:.2g}..{ratio.high:.2g}"]),
                    *[medians.extra(name, key).median for key in ("commits", "wal_kib", "cpu_us")],
                ]
            )
    return Table(
        "The store on PostgreSQL, now and before",
        ["", "tasks/s", "÷ before", "lowest..highest", "commits that wrote", "WAL KiB", "client CPU µs"],
        rows,
        "Each round is held against that of its neighbour. What now and now, once more differ by is the noise.",
    )


if __name__ == "__main__":
    typer.run(main)
