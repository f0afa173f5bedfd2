"""`meshpoint db`: manage the database schema."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import (
    print_either,
    print_json,
    print_note,
    print_text,
    show_progress,
)
from meshpoint.errors import ConfigurationError
from meshpoint.model.error_text import quantity
from meshpoint.settings.urls import redact_url

if TYPE_CHECKING:
    from meshpoint.ports.inspection import AgentKeys
    from meshpoint.wiring import Tables

app = typer.Typer(help="Create and check the database schema.", no_args_is_help=True)


def _examples(command: str) -> str:
    return f"""\b
Examples:
  meshpoint db {command} --config travel.yaml
  meshpoint db {command} --db postgresql://mesh@db/mesh
"""


@app.command("upgrade", epilog=_examples("upgrade"))
def upgrade(
    config: sources.Config = None,
    database: sources.Database = None,
    as_json: sources.AsJson = False,
) -> None:
    """Upgrade the schema to this release. Replicas may keep running.

    If the schema is up to date, nothing changes.
    """
    from meshpoint.wiring import check_schema, upgrade_schema

    for store, tables in sources.load_schemas(config, database):
        before = check_schema(store, tables)
        upgrade_schema(store, tables)
        is_newest = before.revision == before.newest
        shown = redact_url(store.url)
        status = "up to date" if is_newest else "upgraded"
        data = {"database": shown, "tables": tables.value, "status": status}
        result = f"{'already at' if is_newest else 'upgraded to'} revision {before.newest}"
        text = f"{_describe(shown, tables)}: {result}"
        print_either(data, text, as_json=as_json)


@app.command("check", epilog=_examples("check"))
def check(
    config: sources.Config = None,
    database: sources.Database = None,
    as_json: sources.AsJson = False,
) -> None:
    """Check that this release supports the schema. Exits with 2 if the schema is behind."""
    from meshpoint.wiring import check_schema

    outdated = False
    for store, tables in sources.load_schemas(config, database):
        schema = check_schema(store, tables)
        status = "behind" if schema.is_outdated else "up to date"
        outdated |= schema.is_outdated
        shown = _describe(redact_url(store.url), tables)
        if as_json:
            print_json(
                {
                    "database": redact_url(store.url),
                    "tables": tables.value,
                    "status": status,
                    "revision": schema.revision,
                    "newest": schema.newest,
                }
            )
        elif schema.is_outdated:
            option = f"--config {shlex.quote(str(config))}" if database is None else "--db URL"
            print_note(
                f"{shown}: has {schema.revision or 'no tables'}, needs {schema.newest}; "
                f"run: meshpoint db upgrade {option}"
            )
        else:
            print_text(f"{shown}: up to date ({schema.revision})")
    if outdated:
        raise typer.Exit(ExitCode.CONFIGURATION)


@app.command("downgrade", epilog=_examples("downgrade 0005"))
def downgrade(
    revision: Annotated[
        str | None,
        typer.Argument(
            metavar="REVISION", help="The earlier revision. Default: the previous one."
        ),
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    lose_data: Annotated[
        bool,
        typer.Option(
            "--lose-data", help="Delete data that tasks need and the earlier schema cannot keep."
        ),
    ] = False,
    as_sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL instead. Changes nothing.")
    ] = False,
    config: sources.Config = None,
    database: sources.Database = None,
    as_json: sources.AsJson = False,
) -> None:
    """Return the schema to an earlier revision. Replace all replicas with that release first.

    An earlier release also runs on newer tables, so this is rarely needed. The command exits with
    2 and changes nothing if tasks need data that the earlier schema cannot keep.
    """
    from meshpoint.wiring import downgrade_schema, downgrade_sql, plan_downgrade

    for store in sources.load_databases(config, database):
        if as_sql:
            print(downgrade_sql(store, revision))
            continue
        plan, shown = plan_downgrade(store, revision), redact_url(store.url)
        change = f"{shown}: from revision {plan.revision} to {plan.target}"
        for loss in plan.losses if lose_data else ():
            print_note(f"{shown}: deletes {loss}")
        if not yes and not typer.confirm(
            f"{change}; replicas of this release stop working", err=True
        ):
            raise typer.Exit(ExitCode.ERROR)
        downgrade_schema(store, plan.target, lose_data=lose_data)
        data = {"database": shown, "status": "downgraded", "revision": plan.target}
        print_either(data, f"{shown}: downgraded to revision {plan.target}", as_json=as_json)


@app.command("sql", epilog=_examples("sql"))
def sql(config: sources.Config = None, database: sources.Database = None) -> None:
    """Print the SQL that creates the schema, to run by hand. Changes nothing."""
    from meshpoint.wiring import schema_sql

    for store, tables in sources.load_schemas(config, database):
        print(schema_sql(store, tables))


@app.command(
    "reseal",
    epilog="""\b
Examples:
  meshpoint db reseal travel.yaml
  meshpoint db reseal travel.yaml --check
  meshpoint db reseal travel.yaml --clear
""",
)
def reseal(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; all their agents.")
    ],
    *,
    clear: Annotated[
        bool, typer.Option("--clear", help="Store everything in the clear, before a rollback.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only count what is sealed. Changes nothing.")
    ] = False,
    forget: Annotated[
        str | None,
        typer.Option(
            "--forget",
            metavar="KEY",
            help="Let replicas start without this lost key. Its values stay unreadable.",
        ),
    ] = None,
    as_json: sources.AsJson = False,
) -> None:
    """Seal what agents have stored with the first of their encryption_keys.

    Replicas may keep running. Says at its end which keys are no longer in use. If it is stopped,
    run it again: it continues with what is left. Exits with 2 if values cannot be opened.
    """
    from meshpoint import wiring
    from meshpoint.settings import load

    settings, failed = load(configs), False
    agents = [agent for agent in settings.agents if agent.has_database]
    if not agents:
        raise ConfigurationError(
            str(configs[0]), "no agent in it has a database", "add session_service: sql"
        )
    for agent in agents:
        namespace, name = settings.mesh.namespace, agent.name
        if forget is not None:
            asyncio.run(wiring.forget_key(agent, namespace, forget))
        with show_progress(f"{name}: counting rows …") as show:

            def on_rows(done: int, total: int, name: str = name) -> None:
                show(f"{name}: {_bar(done, total)} {done:,} of {total:,} rows")

            found = asyncio.run(
                wiring.reseal(agent, namespace, clear=clear, changes=not check, on_rows=on_rows)
            )
        sealer = wiring.make_sealer(agent.key_ring, "encryption_keys")
        missing = set(found.values) - set(() if sealer is None else sealer.key_ids)
        failed |= bool(missing or found.damaged)
        data = {
            "agent": name,
            "changed_rows": found.changed,
            "values_by_key": dict(found.values),
            "clear_values": found.clear,
            "damaged_values": found.damaged,
            "unused_keys": list(found.unused),
            "missing_keys": sorted(missing),
        }
        print_either(data, "\n".join(_describe_keys(name, found, missing)), as_json=as_json)
    if failed:
        raise typer.Exit(ExitCode.CONFIGURATION)


_BAR_WIDTH = 20


def _bar(done: int, total: int) -> str:
    filled = _BAR_WIDTH * done // max(total, 1)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def _describe_keys(name: str, found: AgentKeys, missing: Collection[str]) -> Iterator[str]:
    yield f"{name}: changed {quantity(found.changed, 'row')}"
    for key_id, values in sorted(found.values.items()):
        lacks = ", which encryption_keys does not have" if key_id in missing else ""
        yield f"  {quantity(values, 'value')} sealed with key {key_id}{lacks}"
    yield f"  {quantity(found.clear, 'value')} in the clear"
    if found.damaged:
        yield f"  {quantity(found.damaged, 'value')} changed by others, which do not open"
    for key_id in found.unused:
        yield f"  key {key_id} is no longer in use: remove it from encryption_keys"


def _describe(database: str, tables: Tables) -> str:
    return f"{database} ({tables})" if tables == "queues" else database
