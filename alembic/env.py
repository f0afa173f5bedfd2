"""Alembic's environment, which runs the migrations.

`meshpoint db …` passes an open connection. `alembic …` takes the database from `-x url=…`.
"""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.engine import URL

from meshpoint.adapters.sql.engine import async_url
from meshpoint.adapters.sql.migrations import QUEUES, TASKS, run_in_transaction
from meshpoint.adapters.sql.tables import metadata

SCHEMA = QUEUES if context.config.config_ini_section == QUEUES.ini_section else TASKS


def migrate(connection: Connection) -> None:
    """Run all migrations in the caller's transaction, which the caller commits."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=SCHEMA.version_table,
        render_as_batch=True,
        include_object=lambda thing, name, kind, *rest: kind != "table" or name in metadata.tables,
    )
    with context.begin_transaction():
        context.run_migrations()


def write(dialect_name: str) -> None:
    """Write the migrations as SQL instead of running them."""
    context.configure(
        dialect_name=dialect_name, version_table=SCHEMA.version_table, literal_binds=True
    )
    with context.begin_transaction():
        context.run_migrations()


def url_argument() -> URL:
    """The database in the argument `-x url=…`, by default `meshpoint.db` in the current folder."""
    return async_url(
        context.get_x_argument(as_dictionary=True).get("url", "sqlite:///meshpoint.db")
    )


attributes = context.config.attributes
if context.is_offline_mode():
    write(attributes.get("dialect_name") or url_argument().get_backend_name())
elif attributes.get("connection") is not None:
    migrate(attributes["connection"])
else:
    asyncio.run(run_in_transaction(url_argument(), migrate))
