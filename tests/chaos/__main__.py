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

from . import display, plot
from .report import Report
from .run import RunConfig, RunState, run


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, help="seed of the fault plan; random by default")
    parser.add_argument("--rate", type=float, default=9.5, help="requests per second")
    parser.add_argument(
        "--in-flight", type=int, default=100, help="maximum number of unanswered requests"
    )
    parser.add_argument(
        "--replicas", type=int, default=4, help="number of processes, each serving all agents"
    )
    parser.add_argument(
        "--broker",
        choices=("rabbitmq", "postgresql"),
        default="rabbitmq",
        help="server of the queues; the tasks are always on PostgreSQL",
    )
    parser.add_argument(
        "--database-every",
        type=float,
        metavar="SECONDS",
        help="also stop PostgreSQL this often, in immediate mode",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder for the results"
    )
    parser.add_argument(
        "--plots", type=Path, default=Path("docs/images/benchmarks"), help="folder for the plot"
    )
    parser.add_argument("--keep", action="store_true", help="keep the events of every replica")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON and nothing else"
    )
    return parser.parse_args()


async def _run(config: RunConfig, broker: str, console: Console) -> Report:
    rabbit = RabbitServer() if broker == "rabbitmq" else None
    postgres, redis = PostgresServer(), RedisServer()
    display_tasks: list[asyncio.Task[None]] = []

    def on_start(running: RunState) -> None:
        display_tasks.append(asyncio.create_task(display.show_progress(running, console)))

    try:
        if rabbit is not None:
            rabbit.launch()
        await postgres.start()
        if rabbit is not None:
            await rabbit.start()
        await redis.start()
        return await run(config, rabbit, postgres, redis, on_start)
    finally:
        for task in display_tasks:
            task.cancel()
        await asyncio.gather(*display_tasks, return_exceptions=True)
        postgres.close()
        if rabbit is not None:
            rabbit.close()
        redis.close()


def main() -> None:
    """Run, report, write the files."""
    arguments = _parse_arguments()
    seed = (
        arguments.seed
        if arguments.seed is not None
        else random.SystemRandom().randrange(1_000_000)
    )
    console = Console(stderr=arguments.json)
    for name in ("aiormq", "meshpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the broker is stopped on purpose
    console.print(f"chaos: {arguments.minutes:g} minutes, {arguments.broker}, seed {seed}")
    config = RunConfig(
        seed=seed,
        seconds=arguments.minutes * 60,
        rate=arguments.rate,
        in_flight=arguments.in_flight,
        replicas=arguments.replicas,
        history_folder=arguments.out / "chaos-stories",
        keep_events=arguments.keep,
        database_every=arguments.database_every,
    )
    report = asyncio.run(_run(config, arguments.broker, console))
    arguments.out.mkdir(parents=True, exist_ok=True)
    report_json = json.dumps(asdict(report), indent=1)
    name = "chaos" if arguments.broker == "rabbitmq" else "chaos-postgresql"
    (arguments.out / f"{name}.json").write_text(report_json + "\n")
    arguments.plots.mkdir(parents=True, exist_ok=True)
    if not plot.draw_plot(report, arguments.plots / f"{name}.png"):
        console.print("no plot: matplotlib is not installed (`make chaos` installs it)")
    if arguments.json:
        sys.stdout.write(report_json + "\n")
    else:
        console.print(display.make_table(report))
    for line in display.verdict_lines(report):
        console.print(line, soft_wrap=True)
    sys.exit(0 if report.good else 1)


if __name__ == "__main__":
    main()
