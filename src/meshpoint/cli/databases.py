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


async def of_each(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    ask: Callable[[Operations], Awaitable[T]],
) -> list[T]:
    """What each database answers."""
    async with aclosing(_opened(config, database, namespace)) as databases:
        return [await ask(operations) async for operations in databases]


async def of_the_one(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    ask: Callable[[Operations], Awaitable[T]],
) -> T:
    """What the first of the databases answers that has the operation; those after it are not asked."""
    nowhere: OperationNotFound | None = None
    async with aclosing(_opened(config, database, namespace)) as databases:
        async for operations in databases:
            try:
                return await ask(operations)
            except OperationNotFound as error:
                nowhere = error
    assert nowhere is not None  # there is a database, or naming none was refused
    raise nowhere


async def _opened(
    config: Path | None, database: str | None, namespace: str | None
) -> AsyncGenerator[Operations, None]:
    """Each database in turn, open while it is looked at."""
    from meshpoint.operations import Operations

    mesh = sources.mesh_of(config, namespace=namespace)
    for each in sources.databases_of(config, database):
        sources.refuse_missing_file(each.session_db_url)
        async with Operations(each.session_db_url, namespace=mesh.namespace) as operations:
            yield operations
