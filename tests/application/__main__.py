"""`python -m application --minutes 2`: on SQLite, then on servers; exit code 1 on any failure."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from servers import PostgresServer, RabbitServer, RedisServer

from .processes import Backend
from .run import RunConfig, RunState, Servers, run


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="application", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of kills, for each backend")
    parser.add_argument("--seed", type=int, help="seed of kills and callers; random by default")
    parser.add_argument("--on", choices=get_args(Backend), help="both by default")
    parser.add_argument("--callers", type=int, default=20, help="incidents at a time")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/application-histories"),
        help="folder for the histories of failed incidents",
    )
    parser.add_argument(
        "--stall", type=float, default=180.0, help="seconds to wait for the next result at the end"
    )
    parser.add_argument("--keep", action="store_true", help="write the history of each incident")
    return parser.parse_args()


@asynccontextmanager
async def _servers(backend: Backend) -> AsyncIterator[Servers | None]:
    if backend == "sqlite":
        yield None
        return
    servers = Servers(RabbitServer(), PostgresServer(), RedisServer())
    try:
        servers.rabbit.launch()
        await servers.postgres.start()
        await servers.rabbit.start()
        await servers.redis.start()
        yield servers
    finally:
        for server in (servers.redis, servers.rabbit, servers.postgres):
            server.close()


async def _run(config: RunConfig, console: Console) -> RunState:
    showing: list[asyncio.Task[None]] = []

    def show(state: RunState) -> None:
        showing.append(asyncio.create_task(_show_progress(state, console)))

    async with _servers(config.backend) as servers:
        try:
            return await run(config, servers, show)
        finally:
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)


async def _show_progress(state: RunState, console: Console) -> None:
    """Show a bar until cancelled; without a terminal, a line every ten seconds."""
    if not console.is_terminal:
        while True:
            elapsed = time.time() - state.started_at
            console.print(f"{elapsed:4.0f} s  {_describe(state)}", soft_wrap=True)
            await asyncio.sleep(10)
    columns = (
        TextColumn("{task.fields[backend]}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=state.config.seconds, backend=state.config.backend)
        while True:
            elapsed = min(time.time() - state.started_at, state.config.seconds)
            progress.update(bar, completed=elapsed, description=_describe(state))
            await asyncio.sleep(0.25)


def _describe(state: RunState) -> str:
    counts = state.counts
    killed = counts["replicas killed"] + counts["services killed"]
    decided = counts["decided by HTTP"] + counts["decided by CLI"]
    parts = [
        f"{counts['with a result']}/{counts['incidents']} results",
        f"{decided} decisions",
        f"{killed} kills",
        f"{counts['with a problem']} problems",
        state.phase,
    ]
    return " · ".join(parts)


def _make_table(states: list[RunState]) -> Table:
    table = Table("", *(state.config.backend for state in states), min_width=60)
    for name in states[0].counts:
        table.add_row(name, *(str(state.counts[name]) for state in states))
    return table


def main() -> None:
    """Run on each backend, and report."""
    arguments = _parse_arguments()
    seed = (
        arguments.seed
        if arguments.seed is not None
        else random.SystemRandom().randrange(1_000_000)
    )
    console = Console()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    console.print(f"application: {arguments.minutes:g} minutes for each backend, seed {seed}")
    states = []
    for backend in (arguments.on,) if arguments.on else get_args(Backend):
        config = RunConfig(
            seed=seed,
            seconds=arguments.minutes * 60,
            backend=backend,
            callers=arguments.callers,
            history_folder=arguments.out,
            keep_all=arguments.keep,
            stall_timeout=arguments.stall,
        )
        states.append(asyncio.run(_run(config, console)))
    console.print(_make_table(states))
    for state in states:
        verdict = f"FAILED: {state.failures}" if state.failures else "each caller got one result"
        console.print(f"{state.config.backend}, seed {seed}: {verdict}", soft_wrap=True)
        for path in state.histories:
            console.print(f"history: {path}", soft_wrap=True)
    sys.exit(any(state.failures for state in states))


if __name__ == "__main__":
    main()
