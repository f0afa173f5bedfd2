"""Rows that are due: worked on together, or one task at a time if a damaged one makes that fail."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import Row

from meshpoint.adapters.sql.database import Transaction
from meshpoint.errors import Unavailable

log = logging.getLogger("meshpoint.store")

T = TypeVar("T")

_POSTPONE_SECONDS = 60.0
"""Seconds after which a damaged row is looked at again."""


@dataclass(frozen=True, slots=True)
class DueQuery:
    """A statement on `statements` that picks rows of due tasks, and its values."""

    template: str
    values: Mapping[str, Any]

    async def fetch(self, tx: Transaction, only: str | None = None) -> Sequence[Row[Any]]:
        """The rows; with `only`, the rows of that task."""
        if only is None:
            return await tx.fetch(self.template, **self.values)
        one_task = self.template.replace("ORDER BY", "AND logical_task_id = :only ORDER BY")
        return await tx.fetch(one_task, only=only, **self.values)

    async def task_ids(self, tx: Transaction) -> list[str]:
        """The tasks of the rows. Reads nothing else, since anything else may be damaged."""
        _, _, condition = self.template.partition("FROM")
        return [
            row.logical_task_id for row in await tx.fetch(f"SELECT logical_task_id FROM{condition}", **self.values)
        ]


class RunTransaction(Protocol):
    """Runs a transaction."""

    def __call__(self, body: Callable[[Transaction], Awaitable[T]], /) -> Coroutine[Any, Any, T]: ...


DueTransaction = Callable[[Transaction, str | None, Sequence[T]], Awaitable[T]]
"""Works on what is due, or only on what is due of one task, after others with these results."""


async def process_due(
    write: RunTransaction, queries: Sequence[DueQuery], postpone: Sequence[str], body: DueTransaction[T]
) -> list[T]:
    """Run `body` in one transaction, or in one for each task if that fails; returns its results.

    `postpone` are statements that make a task with a damaged row due later, so that it does not make every look fail.

    Raises:
        StoreUnavailable: the database is unavailable. The leases of tasks acquired by earlier transactions expire.
    """
    try:
        return [await write(lambda tx: body(tx, None, ()))]
    except Unavailable:
        raise
    except Exception as error:
        log.warning("due work is done one task at a time, as together it fails: %s", error)
    results: list[T] = []
    task_ids = [task_id for pick in queries for task_id in await write(pick.task_ids)]
    for task_id in dict.fromkeys(task_ids):
        try:
            results.append(await write(_for_task(body, task_id, tuple(results))))
        except Unavailable:
            raise
        except Exception:
            log.exception(
                "task %s: a row of it is damaged, and is looked at again in %d s", task_id, _POSTPONE_SECONDS
            )
            await write(partial(_postpone, statements=postpone, task_id=task_id))
    return results


def _for_task(body: DueTransaction[T], task_id: str, before: Sequence[T]) -> Callable[[Transaction], Awaitable[T]]:
    return lambda tx: body(tx, task_id, before)


async def _postpone(tx: Transaction, statements: Sequence[str], task_id: str) -> None:
    for statement in statements:
        await tx.execute(statement, task_id=task_id, delay=_POSTPONE_SECONDS)
