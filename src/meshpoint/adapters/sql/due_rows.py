"""Processing of due rows: as a batch, or one task at a time if a damaged row fails the batch."""

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
"""Seconds until a task with a damaged row is due again."""


@dataclass(frozen=True, slots=True)
class DueQuery:
    """A PICK statement of `statements`, which selects rows of due tasks, and its values."""

    template: str
    values: Mapping[str, Any]

    async def fetch(self, tx: Transaction, only: str | None = None) -> Sequence[Row[Any]]:
        """Fetch the rows of all tasks, or of the task `only`."""
        if only is None:
            return await tx.fetch(self.template, **self.values)
        one_task = self.template.replace("ORDER BY", "AND logical_task_id = :only ORDER BY")
        return await tx.fetch(one_task, only=only, **self.values)

    async def task_ids(self, tx: Transaction) -> list[str]:
        """The tasks of the rows. Reads no other column, since any other value may be damaged."""
        _, _, condition = self.template.partition("FROM")
        return [
            row.logical_task_id for row in await tx.fetch(f"SELECT logical_task_id FROM{condition}", **self.values)
        ]


class RunTransaction(Protocol):
    """A function that runs `body` in a transaction and returns its result after the commit."""

    def __call__(self, body: Callable[[Transaction], Awaitable[T]], /) -> Coroutine[Any, Any, T]: ...


DueTransaction = Callable[[Transaction, str | None, Sequence[T]], Awaitable[T]]
"""Processes due rows, of all tasks or of one, given the results of earlier transactions."""


async def process_due(
    write: RunTransaction, queries: Sequence[DueQuery], postpone: Sequence[str], body: DueTransaction[T]
) -> list[T]:
    """Run `body` in one transaction, or in one per task if that fails, and return its results.

    Args:
        write: Runs a transaction.
        queries: Select the due rows, to find their tasks if the batch fails.
        postpone: Statements that make a task with a damaged row due later, so that it does not
            fail every batch.
        body: Processes the rows.

    Raises:
        StoreUnavailable: The database is unavailable. Tasks acquired by earlier transactions are
            rescued when their leases expire.
    """
    try:
        return [await write(lambda tx: body(tx, None, ()))]
    except Unavailable:
        raise
    except Exception as error:
        log.warning("processing due tasks one at a time, because the batch failed: %s", error)
    results: list[T] = []
    task_ids = [task_id for pick in queries for task_id in await write(pick.task_ids)]
    for task_id in dict.fromkeys(task_ids):
        try:
            results.append(await write(_for_task(body, task_id, tuple(results))))
        except Unavailable:
            raise
        except Exception:
            log.exception(
                "task %s: a row is damaged; its due work is retried in %d s",
                task_id,
                _POSTPONE_SECONDS,
            )
            await write(partial(_postpone, statements=postpone, task_id=task_id))
    return results


def _for_task(body: DueTransaction[T], task_id: str, before: Sequence[T]) -> Callable[[Transaction], Awaitable[T]]:
    return lambda tx: body(tx, task_id, before)


async def _postpone(tx: Transaction, statements: Sequence[str], task_id: str) -> None:
    for statement in statements:
        await tx.execute(statement, task_id=task_id, delay=_POSTPONE_SECONDS)
