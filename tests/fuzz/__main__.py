"""`python -m fuzz --minutes 10`: a run on private servers; exit code 1 if anything went wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from servers import PostgresServer, RabbitServer

from . import display
from .report import MIN_BRANCH_HITS, Report
from .run import RunConfig, RunState, run

_TIME_SHARES = {"rabbitmq": 0.75, "sqlite": 0.125, "postgresql": 0.125}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="seed of the messages; random by default")
    parser.add_argument(
        "--broker", choices=[*_TIME_SHARES], help="all by default, one after the other"
    )
    parser.add_argument("--rate", type=float, default=85.0, help="mutated messages per second")
    parser.add_argument(
        "--only",
        default="",
        help="use only recipes with this in their names; branches are not judged",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder for the results"
    )
    parser.add_argument("--keep", type=Path, help="folder for the events and logs of the replicas")
    parser.add_argument(
        "--json", action="store_true", help="print the reports as JSON and nothing else"
    )
    return parser.parse_args()


async def _run(config: RunConfig, console: Console) -> Report:
    display_tasks: list[asyncio.Task[None]] = []

    def on_start(state: RunState) -> None:
        display_tasks.append(asyncio.create_task(display.show_progress(state, console)))

    rabbit = RabbitServer() if config.broker == "rabbitmq" else None
    postgres = PostgresServer() if config.broker != "sqlite" else None
    try:
        if rabbit is not None:
            rabbit.launch()
        if postgres is not None:
            await postgres.start()
        if rabbit is not None:
            await rabbit.start()
        return await run(config, rabbit, postgres, on_start)
    finally:
        for task in display_tasks:
            task.cancel()
        await asyncio.gather(*display_tasks, return_exceptions=True)
        for server in (rabbit, postgres):
            if server is not None:
                server.close()


def main() -> None:
    """Run, report, write the file."""
    arguments = _parse_arguments()
    seed = (
        arguments.seed
        if arguments.seed is not None
        else random.SystemRandom().randrange(1_000_000)
    )
    console = Console(stderr=arguments.json)
    for name in ("aiormq", "meshpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    console.print(f"fuzz: {arguments.minutes:g} minutes, seed {seed}")
    shares = {arguments.broker: 1.0} if arguments.broker else _TIME_SHARES
    reports = []
    for broker, share in shares.items():
        keep = arguments.keep and arguments.keep / broker
        seconds = arguments.minutes * 60 * share
        config = RunConfig(
            seed,
            seconds,
            broker,
            rate=arguments.rate,
            name_filter=arguments.only,
            keep_in=keep,
            quiet_seconds=max(10.0, min(30.0, seconds / 4)),
            min_branch_hits=MIN_BRANCH_HITS if broker == "rabbitmq" else 0,
        )
        report = asyncio.run(_run(config, console))
        reports.append(report)
        if not arguments.json:
            console.print(display.make_table(report))
        for line in display.verdict_lines(report):
            console.print(line, soft_wrap=True, markup=False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report_json = json.dumps([asdict(report) for report in reports], indent=1)
    (arguments.out / "fuzz.json").write_text(report_json + "\n")
    if arguments.json:
        sys.stdout.write(report_json + "\n")
    sys.exit(0 if all(report.good for report in reports) else 1)


if __name__ == "__main__":
    main()
