"""`python -m chaos --minutes 20`: a run on private servers; exit code 1 if anything went wrong."""

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

from servers import PostgresServer, RabbitServer, RedisServer

from . import picture, show
from .report import Report
from .run import Running, Wish, run


def _arguments() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(prog="chaos", description=__doc__)
    arguments.add_argument("--minutes", type=float, default=20.0)
    arguments.add_argument("--seed", type=int, help="seed of the fault plan; random by default")
    arguments.add_argument("--rate", type=float, default=9.5, help="requests per second")
    arguments.add_argument("--in-flight", type=int, default=100, help="maximum number of unanswered requests")
    arguments.add_argument("--replicas", type=int, default=4, help="number of processes, each serving all agents")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    arguments.add_argument("--plots", type=Path, default=Path("docs/images/benchmarks"), help="folder for the plot")
    arguments.add_argument("--keep", action="store_true", help="keep the events of every replica")
    arguments.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    return arguments.parse_args()


async def _run(wish: Wish, console: Console) -> Report:
    rabbit, postgres, redis = RabbitServer(), PostgresServer(), RedisServer()
    following: list[asyncio.Task[None]] = []

    def watch(running: Running) -> None:
        following.append(asyncio.create_task(show.follow(running, console)))

    try:
        rabbit.launch()
        await postgres.start()
        await rabbit.start()
        await redis.start()
        return await run(wish, rabbit, postgres, redis, watch)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        postgres.close()
        rabbit.close()
        redis.close()


def main() -> None:
    """Run, report, write the files."""
    options = _arguments()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console = Console(stderr=options.json)
    for name in ("aiormq", "meshpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the broker is stopped on purpose
    console.print(f"chaos: {options.minutes:g} minutes, seed {seed}")
    wish = Wish(
        seed=seed,
        seconds=options.minutes * 60,
        rate=options.rate,
        in_flight=options.in_flight,
        replicas=options.replicas,
        stories=options.out / "chaos-stories",
        keep=options.keep,
    )
    report = asyncio.run(_run(wish, console))
    options.out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(asdict(report), indent=1)
    (options.out / "chaos.json").write_text(written + "\n")
    options.plots.mkdir(parents=True, exist_ok=True)
    if not picture.draw(report, options.plots / "chaos.png"):
        console.print("no plot: matplotlib is not installed (`make chaos` installs it)")
    if options.json:
        sys.stdout.write(written + "\n")
    else:
        console.print(show.table(report))
    for line in show.verdict(report):
        console.print(line, soft_wrap=True)
    sys.exit(0 if report.good else 1)


if __name__ == "__main__":
    main()
