"""`meshpoint demo`: kill two of three replicas, and see every task answered."""

from __future__ import annotations

from typing import Annotated

import typer

from meshpoint.cli import sources

EXAMPLES = """\b
Examples:
  meshpoint demo                                  no server needed
  meshpoint demo --requests 50 --seed 7
  meshpoint demo --broker amqp://guest:guest@127.0.0.1/ --db postgresql://postgres@127.0.0.1/demo --json
"""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("demo", epilog=EXAMPLES)(demo)


def demo(
    broker: sources.Broker = None,
    database: sources.Database = None,
    requests: Annotated[int, typer.Option("--requests", metavar="N", min=1, help="Number of requests to send.")] = 24,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed for the response times of the peers.")
    ] = None,
    as_json: sources.AsJson = False,
) -> None:
    """Kill replicas and watch every task get its answer.

    Starts three replicas, then kills one while a task is paused and one while a task runs.
    """
    from meshpoint import demo as demonstration

    raise typer.Exit(
        demonstration.run(broker_url=broker, db_url=database, requests=requests, seed=seed, as_json=as_json)
    )
