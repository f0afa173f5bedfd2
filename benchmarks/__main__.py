"""`python -m benchmarks [NAME]... [--quick] [--json]`, with tests/ on the path; --help lists the names."""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import Report
from benchmarks.stage import Stage
from meshpoint import event_loop

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[1] / "docs" / "images" / "benchmarks"


class Benchmark(StrEnum):
    """Each is a module of this package with `async def run(stage: Stage, *, quick: bool) -> Report`."""

    STORE = "store"
    SYSTEM = "system"
    MEMORY = "memory"
    SCALE = "scale"
    RESTORE = "restore"
    WORKING = "working"


def main(
    benchmarks: Annotated[list[Benchmark] | None, typer.Argument(help="Which; all when none is named.")] = None,
    quick: Annotated[bool, typer.Option(help="A minute each: enough to see the order of things.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for NAME.json.")] = RESULTS,
    plots: Annotated[Path, typer.Option(help="Folder for the plots.")] = PLOTS,
) -> None:
    """Measure Meshpoint on private servers, beside others that do the same job."""
    for benchmark in benchmarks or list(Benchmark):
        report = event_loop.run(_measured(benchmark, quick=quick))
        report.save(results, plots)
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        else:
            report.show()


async def _measured(benchmark: Benchmark, *, quick: bool) -> Report:
    run: Callable[..., Awaitable[Report]] = importlib.import_module(f"benchmarks.{benchmark}").run
    async with Stage() as stage:
        gc.freeze()  # what was imported is not looked through again in the middle of a round
        return await run(stage, quick=quick)


if __name__ == "__main__":
    typer.run(main)
