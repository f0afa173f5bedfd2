"""`meshpoint replicas`: list the replicas that have registered in the database."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import format_age, print_json, print_note, print_table
from meshpoint.errors import ConfigurationError
from meshpoint.model.tasks import plain_format

if TYPE_CHECKING:
    from meshpoint.model.replicas import RegisteredReplica

app = typer.Typer(
    help="List the replicas that have registered in the database.", no_args_is_help=True
)

_LIST = """\b
Examples:
  meshpoint replicas list travel.yaml
  meshpoint replicas list travel.yaml --agent flights --json
  meshpoint replicas list --db postgresql://mesh@db/mesh --namespace travel
"""


@app.command("list", epilog=_LIST)
def list_replicas(
    file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file of the mesh.")
    ] = None,
    *,
    config: sources.Config = None,
    database: sources.Database = None,
    namespace: sources.Namespace = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Only replicas of this agent.")
    ] = None,
    as_json: sources.AsJson = False,
) -> None:
    """List the replicas of each agent, with their versions and the state formats that they read.

    A replica is live, draining, or lost: then it has not registered for 30 seconds or more,
    because it was killed, is stopped, or cannot reach the database. Lost ones are listed for an
    hour. Replicas of agents without a database, and of earlier releases, do not register.
    """
    if file is not None and config is not None:
        raise ConfigurationError("--config", "CONFIG is given twice", "leave one of them out")
    found = asyncio.run(_read(file or config, database, namespace, agent))
    if as_json:
        print_json([_to_json(each) for each in found])
    elif not found:
        print_note("no replica is registered")
    else:
        columns = (
            *("replica", "agent", "state", "up for", "last seen"),
            *("version", "release", "slots", "host", "pid", "formats"),
        )
        print_table(columns, [_to_row(each) for each in found], right={"slots", "pid"})


async def _read(
    config: Path | None, database: str | None, namespace: str | None, agent: str | None
) -> list[RegisteredReplica]:
    from meshpoint.model.messages import validate_agent_name
    from meshpoint.wiring import open_store

    name = None if agent is None else validate_agent_name(agent)
    found: list[RegisteredReplica] = []
    async with aclosing(sources.open_each(config, database, namespace, open_store)) as databases:
        async for store in databases:
            found += await store.replicas(name)
    return found


def _to_row(each: RegisteredReplica) -> tuple[str, ...]:
    return (
        each.id,
        each.agent,
        each.state.value,
        format_age(each.started_at),
        f"{format_age(each.seen_at)} ago",
        each.app_version or "-",
        each.release,
        str(each.slots),
        each.host,
        "-" if each.pid is None else str(each.pid),
        ", ".join(_plain_formats(each)),
    )


def _to_json(each: RegisteredReplica) -> dict[str, object]:
    return {
        "id": each.id,
        "agent": each.agent,
        "state": each.state.value,
        "started_at": each.started_at,
        "seen_at": each.seen_at,
        "app_version": each.app_version,
        "release": each.release,
        "slots": each.slots,
        "host": each.host,
        "pid": each.pid,
        "formats": _plain_formats(each),
    }


def _plain_formats(each: RegisteredReplica) -> list[str]:
    """The formats without the suffixes of what a task uses."""
    return sorted(set(map(plain_format, each.formats)))
