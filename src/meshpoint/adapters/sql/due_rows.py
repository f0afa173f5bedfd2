"""Processing of due rows: as a batch, or one task at a time if a damaged row fails the batch."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Row

from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.errors import KeyMissing, Unavailable

_log = logging.getLogger("meshpoint.store")

_T = TypeVar("_T")

_POSTPONE_SECONDS = 60.0
"""Seconds until a task with a damaged row is due again."""


@dataclass(frozen=True, slots=True)
class DueQuery:
    """A PICK statement of `statements`, which selects rows of due tasks, and its values."""

    template: str
    values: Mapping[str, Any]

    async def fetch(
        self, tx: Transaction, only: str | None = None, **values: Any
    ) -> Sequence[Row[Any]]:
        """Fetch the rows of all tasks, or of the task `only`. `values` replace the query's own."""
        if only is None:
            return await tx.fetch(self.template, **{**self.values, **values})
        one_task = self.template.replace("ORDER BY", "AND logical_task_id = :only ORDER BY")
        return await tx.fetch(one_task, only=only, **{**self.values, **values})

    async def task_ids(self, tx: Transaction) -> list[str]:
        """The tasks of the rows. Reads no other column, since any other value may be damaged."""
        _, _, condition = self.template.partition("FROM")
        return [
            row.logical_task_id
            for row in await tx.fetch(f"SELECT logical_task_id FROM{condition}", **self.values)
        ]


async def process_due(
    database: Database,
    queries: Sequence[DueQuery],
    postpone: Sequence[str],
    body: Callable[[Transaction, str | None], Awaitable[_T]],
) -> AsyncIterator[_T]:
    """Run `body` in one transaction, or in one per task if that fails, and yield its results.

    Args:
        database: Runs the transactions.
        queries: Select the due rows, to find their tasks if the batch fails.
        postpone: Statements that make a task with a damaged row due later, so that it does not
            fail every batch.
        body: Processes the rows of all tasks, or of one. Earlier results have been yielded then.

    Raises:
        StoreUnavailable: The database is unavailable. Tasks acquired by earlier transactions are
            rescued when their leases expire.
    """
    try:
        result = await database.write(lambda tx: body(tx, None))
    except KeyMissing as error:
        _log.warning("processing due tasks one at a time: a value is %s", error)
    except Unavailable:
        raise
    except Exception as error:
        _log.warning("processing due tasks one at a time, because the batch failed: %s", error)
    else:
        yield result
        return
    task_ids = [task_id for pick in queries for task_id in await database.write(pick.task_ids)]
    for task_id in dict.fromkeys(task_ids):
        try:
            result = await database.write(_for_task(body, task_id))
        except KeyMissing as error:
            _log.error(
                "task %s: a value is %s; retried in %d s", task_id, error, _POSTPONE_SECONDS
            )
            await database.write(partial(_postpone, statements=postpone, task_id=task_id))
        except Unavailable:
            raise
        except Exception:
            _log.exception(
                "task %s: a row is damaged; its due work is retried in %d s",
                task_id,
                _POSTPONE_SECONDS,
            )
            await database.write(partial(_postpone, statements=postpone, task_id=task_id))
        else:
            yield result


def _for_task(
    body: Callable[[Transaction, str | None], Awaitable[_T]], task_id: str
) -> Callable[[Transaction], Awaitable[_T]]:
    return lambda tx: body(tx, task_id)


async def _postpone(tx: Transaction, statements: Sequence[str], task_id: str) -> None:
    for statement in statements:
        await tx.execute(statement, task_id=task_id, delay=_POSTPONE_SECONDS)
