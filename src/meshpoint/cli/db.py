"""`meshpoint db`: manage the database schema."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import print_either, print_json, print_note, print_text
from meshpoint.settings.urls import redact_url

if TYPE_CHECKING:
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


def _describe(database: str, tables: Tables) -> str:
    return f"{database} ({tables})" if tables == "queues" else database
