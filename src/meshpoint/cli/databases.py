"""Query the operations in the databases of a configuration."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshpoint.cli import sources
from meshpoint.errors import OperationNotFound

if TYPE_CHECKING:
    from meshpoint.operations import Operations

T = TypeVar("T")


async def query_all(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    query: Callable[[Operations], Awaitable[T]],
) -> list[T]:
    """Run `query` on each database and return all results."""
    async with aclosing(_open_databases(config, database, namespace)) as databases:
        return [await query(operations) async for operations in databases]


async def query_first(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    query: Callable[[Operations], Awaitable[T]],
) -> T:
    """Return the result from the first database that has the operation.

    Raises:
        OperationNotFound: No database has it.
    """
    not_found: OperationNotFound | None = None
    async with aclosing(_open_databases(config, database, namespace)) as databases:
        async for operations in databases:
            try:
                return await query(operations)
            except OperationNotFound as error:
                not_found = error
    assert not_found is not None  # `load_databases` returns at least one
    raise not_found


async def _open_databases(
    config: Path | None, database: str | None, namespace: str | None
) -> AsyncGenerator[Operations, None]:
    """Yield each database in turn, open during its iteration."""
    from meshpoint.operations import Operations

    mesh = sources.load_mesh(config, namespace=namespace)
    for each in sources.load_databases(config, database):
        sources.check_file_exists(each.session_db_url)
        async with Operations(each.session_db_url, namespace=mesh.namespace) as operations:
            yield operations
