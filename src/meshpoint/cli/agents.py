"""`meshpoint agents`: list the agents that are served, and show their cards."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import (
    format_age,
    format_duration,
    print_json,
    print_note,
    print_table,
    print_text,
)
from meshpoint.errors import MeshpointError
from meshpoint.model.error_text import escape_unprintable

if TYPE_CHECKING:
    from pydantic import JsonValue

    from meshpoint.client.found_agents import FoundAgent
    from meshpoint.settings import MeshSettings

app = typer.Typer(
    help="List the agents that are served, and show their cards.", no_args_is_help=True
)

_Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        min=0.1,
        max=60,
        metavar="SECONDS",
        help="Maximum time to wait for answers.",
    ),
]

_LIST = """\b
Examples:
  meshpoint agents list --config travel.yaml
  meshpoint agents list --broker amqp://guest:guest@127.0.0.1/ --namespace demo --json
"""
_SHOW = """\b
Examples:
  meshpoint agents show flights --config travel.yaml
  meshpoint agents show flights --config travel.yaml --json | jq .card.inputSchema
"""


@app.command("list", epilog=_LIST)
def list_agents(
    *,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    wait: _Wait = 2.0,
    as_json: sources.AsJson = False,
) -> None:
    """List the agents with a running replica, with the first line of their description.

    Replicas of earlier releases do not answer, and are not listed.
    """
    mesh = sources.require_mesh(config, broker, namespace)
    found = asyncio.run(_find(mesh, [], wait))
    if as_json:
        print_json([_to_json(each) for each in found])
    elif not found:
        print_note(f"no agent answered in {format_duration(wait)}")
    else:
        rows = [
            (
                each.card.name,
                _describe_versions(each),
                str(len(each.replicas)),
                each.card.description.partition("\n")[0] or "-",
            )
            for each in found
        ]
        print_table(("agent", "version", "replicas", "description"), rows, right={"replicas"})


@app.command("show", epilog=_SHOW)
def show(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")],
    *,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    wait: _Wait = 2.0,
    as_json: sources.AsJson = False,
) -> None:
    """Show the card of an agent, and the replicas that serve it.

    While replicas of several versions run, the replica that started last provides the card.
    """
    mesh = sources.require_mesh(config, broker, namespace)
    found = asyncio.run(_find(mesh, [agent], wait))
    if not found:
        raise MeshpointError(
            f"no replica of {agent!r} answered in {format_duration(wait)}: none is running, or "
            "all run an earlier release"
        )
    if as_json:
        print_json(_to_json(found[0]))
        return
    card = found[0].card
    facts = [("version", _describe_versions(found[0])), ("description", card.description or "-")]
    facts += [(f"skill {skill.id}", skill.description or skill.name) for skill in card.skills]
    print_table(("agent", card.name), facts)
    rows = [
        (each.id, each.version, format_age(each.started_at), each.app_version or "-")
        for each in found[0].replicas
    ]
    print_table(("replica", "version", "up for", "app version"), rows)
    _print_schema("input", card.input_schema)
    _print_schema("output", card.output_schema)


async def _find(mesh: MeshSettings, names: list[str], wait: float) -> list[FoundAgent]:
    from meshpoint.connecting import connect_to

    async with connect_to(mesh) as connection:
        return await connection.find_agents(*names, wait=wait)


def _describe_versions(found: FoundAgent) -> str:
    """The running versions, starting with the card's."""
    versions = dict.fromkeys((found.card.version, *(each.version for each in found.replicas)))
    return ", ".join(versions) or "-"


def _print_schema(part: str, schema: dict[str, JsonValue]) -> None:
    text = json.dumps(schema, indent=2, ensure_ascii=False) if schema else "any JSON"
    print_text(f"{part}: {escape_unprintable(text, allowed=chr(10))}")


def _to_json(found: FoundAgent) -> dict[str, object]:
    return {
        "card": found.card.to_json(),
        "replicas": [
            {
                "id": each.id,
                "startedAt": each.started_at,
                "version": each.version,
                "appVersion": each.app_version,
            }
            for each in found.replicas
        ],
    }
