"""Ask the databases of a configuration about operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshpoint.cli import sources
from meshpoint.errors import MeshpointError, OperationNotFound

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
    from meshpoint.operations import Operations

    mesh = sources.mesh_of(config, namespace=namespace)
    answers: list[T] = []
    for each in sources.databases_of(config, database):
        sources.refuse_missing_file(each.session_db_url)
        async with Operations(each.session_db_url, namespace=mesh.namespace) as operations:
            answers.append(await ask(operations))
    return answers


async def of_the_one(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    ask: Callable[[Operations], Awaitable[T]],
) -> T:
    """What the first of the databases answers that has the operation."""
    nowhere: MeshpointError | None = None

    async def found(operations: Operations) -> list[T]:
        nonlocal nowhere
        try:
            return [await ask(operations)]
        except OperationNotFound as error:
            nowhere = error
            return []

    answers = [answer for part in await of_each(config, database, namespace, found) for answer in part]
    if not answers and nowhere is not None:
        raise nowhere
    return answers[0]
