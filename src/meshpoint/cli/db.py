"""`meshpoint db`: the schema of the database."""

from __future__ import annotations

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import print_json, print_text

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
    """Bring the schema to this release. Running replicas may stay up; a second run changes nothing."""
    from meshpoint.adapters.sql import migrations

    for agent in sources.databases_of(config, database):
        migrations.upgrade(agent.session_db_url)
        _tell(agent.session_db_url, "upgraded", as_json)


@app.command("check", epilog=_examples("check"))
def check(config: sources.Config = None, database: sources.Database = None, as_json: sources.AsJson = False) -> None:
    """Check that the schema is that of this release; exits with 2 when it is not."""
    from meshpoint.adapters.sql import migrations

    for agent in sources.databases_of(config, database):
        migrations.check(agent.session_db_url)
        _tell(agent.session_db_url, "up to date", as_json)


@app.command("sql", epilog=_examples("sql"))
def sql(config: sources.Config = None, database: sources.Database = None) -> None:
    """Print the SQL of an upgrade from nothing, for whoever must run it by hand. Changes nothing."""
    from meshpoint.adapters.sql import migrations

    for agent in sources.databases_of(config, database):
        print(migrations.sql(agent.session_db_url))


def without_password(url: str) -> str:
    """`url` as it may be printed."""
    scheme, mark, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{mark}{user}{at}{place}"


def _tell(url: str, status: str, as_json: bool) -> None:
    shown = without_password(url)
    print_json({"database": shown, "status": status}) if as_json else print_text(f"{shown}: {status}")
