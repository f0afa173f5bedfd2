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

from . import show
from .report import REACHED, Report
from .run import Running, Wish, run

_SHARES = {"rabbitmq": 0.75, "sqlite": 0.25}


def _arguments() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--seed", type=int, help="seed of the messages; random by default")
    arguments.add_argument("--broker", choices=[*_SHARES], help="both by default, one after the other")
    arguments.add_argument("--rate", type=float, default=85.0, help="mutated messages per second")
    arguments.add_argument(
        "--only", default="", help="use only recipes with this in their names; branches are not judged"
    )
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    arguments.add_argument("--keep", type=Path, help="folder for the events and logs of the replicas")
    arguments.add_argument("--json", action="store_true", help="print the reports as JSON and nothing else")
    return arguments.parse_args()


async def _run(wish: Wish, console: Console) -> Report:
    following: list[asyncio.Task[None]] = []

    def watch(running: Running) -> None:
        following.append(asyncio.create_task(show.follow(running, console)))

    servers = (RabbitServer(), PostgresServer()) if wish.broker == "rabbitmq" else None
    try:
        if servers is None:
            return await run(wish, None, None, watch)
        rabbit, postgres = servers
        rabbit.launch()
        await postgres.start()
        await rabbit.start()
        return await run(wish, rabbit, postgres, watch)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for server in servers or ():
            server.close()


def main() -> None:
    """Run, report, write the file."""
    options = _arguments()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console = Console(stderr=options.json)
    for name in ("aiormq", "meshpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    console.print(f"fuzz: {options.minutes:g} minutes, seed {seed}")
    shares = {options.broker: 1.0} if options.broker else _SHARES
    reports = []
    for broker, share in shares.items():
        keep = options.keep and options.keep / broker
        seconds = options.minutes * 60 * share
        wish = Wish(
            seed,
            seconds,
            broker,
            rate=options.rate,
            only=options.only,
            keep=keep,
            quiet=max(10.0, min(30.0, seconds / 4)),
            reached=REACHED if broker == "rabbitmq" else 0,
        )
        report = asyncio.run(_run(wish, console))
        reports.append(report)
        if not options.json:
            console.print(show.table(report))
        for line in show.verdict(report):
            console.print(line, soft_wrap=True, markup=False)
    options.out.mkdir(parents=True, exist_ok=True)
    written = json.dumps([asdict(report) for report in reports], indent=1)
    (options.out / "fuzz.json").write_text(written + "\n")
    if options.json:
        sys.stdout.write(written + "\n")
    sys.exit(0 if all(report.good for report in reports) else 1)


if __name__ == "__main__":
    main()
