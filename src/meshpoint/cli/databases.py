"""Ask the databases of a configuration about operations."""

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
    """What each database answers."""
    async with aclosing(_open_databases(config, database, namespace)) as databases:
        return [await query(operations) async for operations in databases]


async def query_first(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    query: Callable[[Operations], Awaitable[T]],
) -> T:
    """What the first of the databases answers that has the operation; those after it are not asked."""
    not_found: OperationNotFound | None = None
    async with aclosing(_open_databases(config, database, namespace)) as databases:
        async for operations in databases:
            try:
                return await query(operations)
            except OperationNotFound as error:
                not_found = error
    assert not_found is not None  # there is a database, or naming none was refused
    raise not_found


async def _open_databases(
    config: Path | None, database: str | None, namespace: str | None
) -> AsyncGenerator[Operations, None]:
    """Each database in turn, open while it is looked at."""
    from meshpoint.operations import Operations

    mesh = sources.load_mesh(config, namespace=namespace)
    for each in sources.load_databases(config, database):
        sources.check_file_exists(each.session_db_url)
        async with Operations(each.session_db_url, namespace=mesh.namespace) as operations:
            yield operations
