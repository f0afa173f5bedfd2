"""`meshpoint db`: manage the database schema."""

from __future__ import annotations

import typer

from meshpoint.cli import sources
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import print_json, print_note, print_text

app = typer.Typer(help="Create and check the database schema.", no_args_is_help=True)


def _examples(command: str) -> str:
    return f"""\b
Examples:
  meshpoint db {command} --config travel.yaml
  meshpoint db {command} --db postgresql://mesh@db/mesh
"""


@app.command("upgrade", epilog=_examples("upgrade"))
def upgrade(
    config: sources.Config = None, database: sources.Database = None, as_json: sources.AsJson = False
) -> None:
    """Upgrade the schema to this release. Replicas may keep running.

    If the schema is up to date, nothing changes.
    """
    from meshpoint.adapters.sql import migrations

    for agent in sources.load_databases(config, database):
        before, newest = migrations.check(agent.session_db_url)
        migrations.upgrade(agent.session_db_url)
        shown = redact_url(agent.session_db_url)
        if as_json:
            print_json({"database": shown, "status": "up to date" if before == newest else "upgraded"})
        else:
            print_text(f"{shown}: {'already at' if before == newest else 'upgraded to'} revision {newest}")


@app.command("check", epilog=_examples("check"))
def check(config: sources.Config = None, database: sources.Database = None, as_json: sources.AsJson = False) -> None:
    """Check that this release supports the schema. Exits with 2 if the schema is behind."""
    from meshpoint.adapters.sql import migrations
    from meshpoint.adapters.sql.schema import is_outdated

    outdated = False
    for agent in sources.load_databases(config, database):
        revision, newest = migrations.check(agent.session_db_url)
        status = "behind" if is_outdated(revision) else "up to date"
        outdated |= status == "behind"
        shown = redact_url(agent.session_db_url)
        if as_json:
            print_json({"database": shown, "status": status, "revision": revision, "newest": newest})
        elif status == "behind":
            command = "meshpoint db upgrade (with --config FILE or --db URL)"
            print_note(f"{shown}: has {revision or 'no tables'}, needs {newest}; run: {command}")
        else:
            print_text(f"{shown}: up to date ({revision})")
    if outdated:
        raise typer.Exit(ExitCode.CONFIGURATION)


@app.command("sql", epilog=_examples("sql"))
def sql(config: sources.Config = None, database: sources.Database = None) -> None:
    """Print the SQL that creates the schema, to be run manually. Changes nothing."""
    from meshpoint.adapters.sql import migrations

    for agent in sources.load_databases(config, database):
        print(migrations.upgrade_sql(agent.session_db_url))


def redact_url(url: str) -> str:
    """Return `url` without its password and its options, which may also contain one."""
    scheme, mark, rest = url.partition("://")
    rest, _, options = rest.partition("?")
    if "@" in options and "@" not in rest:  # the `?` may be part of the password
        return f"{scheme}{mark}…"
    credentials, at, location = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{mark}{user}{at}{location}"
