"""`meshpoint metrics`: serve the metrics of a whole mesh."""

from __future__ import annotations

import asyncio
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from meshpoint.cli.run import MAX_PORT, LogLevel, parse_log_level
from meshpoint.extras import TELEMETRY

EXAMPLES = """\b
Examples:
  meshpoint metrics travel.yaml
  meshpoint metrics travel.yaml flights.yaml --port 9464 --interval 60
  meshpoint metrics travel.yaml --host 0.0.0.0 --log-json       in a container
"""


def metrics(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="YAML files; the agents of all files are used."),
    ],
    *,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=1,
            max=MAX_PORT,
            help="Serve /metrics, /healthz and /readyz here.",
        ),
    ] = 9464,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address for --port.")
    ] = "127.0.0.1",
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=1,
            max=3600,
            help="Time between two readings of a server; longer for a slow server.",
        ),
    ] = 15,
    log_level: LogLevel = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log JSON lines even on a terminal.")
    ] = False,
) -> None:
    """Serve the metrics of stored tasks and of queues, until SIGTERM or Ctrl-C.

    Run one such process for a mesh: replicas do not measure what they all see. It reads the
    databases and the broker in read-only transactions, on one connection to each. It runs no
    agent code and may stop at any time. While a server does not answer, its metrics keep their
    last values, and meshpoint_server_up is 0.
    """
    from meshpoint.settings import load
    from meshpoint.wiring import MetricsAddress, export_metrics, logging_to

    TELEMETRY.require("meshpoint metrics")
    level, settings = parse_log_level(log_level), load(configs)

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        address = MetricsAddress(host, port)
        await export_metrics(settings, address, interval=timedelta(seconds=interval), stop=stop)

    with logging_to(sys.stderr, level, as_json=log_json):
        asyncio.run(serve())
