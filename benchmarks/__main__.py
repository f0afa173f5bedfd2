"""`python -m benchmarks [NAME]... [--quick] [--json]`, with tests/ and tests/frameworks/ on
the import path.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import page
from benchmarks.environment import BenchmarkServers
from benchmarks.report import Report
from meshpoint import event_loop

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[1] / "docs" / "images" / "benchmarks"


class Benchmark(StrEnum):
    """Modules of this package with `async def run(stage: Stage, *, quick: bool) -> Report`."""

    STORE = "store"
    SYSTEM = "system"
    MEMORY = "memory"
    ASKS = "asks"
    QUESTIONS = "questions"
    SCALE = "scale"
    RESTORE = "restore"
    WORKING = "working"
    HISTORY = "history"
    FRAMEWORKS = "frameworks"
    QUEUES = "queues"
    TIMELINE = "timeline"
    ENCRYPTION = "encryption"
    TELEMETRY = "telemetry"


def main(
    benchmarks: Annotated[
        list[Benchmark] | None, typer.Argument(help="Benchmarks to run. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="About a minute each, for rough figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for NAME.json files.")] = RESULTS,
    plots: Annotated[Path, typer.Option(help="Folder for plots.")] = PLOTS,
) -> None:
    """Measure Meshpoint on private servers, next to other systems that do the same job."""
    for benchmark in benchmarks or list(Benchmark):
        report = event_loop.run(_measure(benchmark, quick=quick))
        report.save(results, plots)
        if benchmark is Benchmark.SYSTEM and results == RESULTS:
            page.write()
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        else:
            report.show()


async def _measure(benchmark: Benchmark, *, quick: bool) -> Report:
    run: Callable[..., Awaitable[Report]] = importlib.import_module(f"benchmarks.{benchmark}").run
    async with BenchmarkServers() as stage:
        gc.freeze()  # exclude imported objects from collections during a round
        return await run(stage, quick=quick)


if __name__ == "__main__":
    typer.run(main)
