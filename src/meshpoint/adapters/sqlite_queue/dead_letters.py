"""The dead letters in a SQLite file, for operators.

Each change is one transaction, guarded by the queue of the row: if several commands try, only one
moves or deletes it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from meshpoint.adapters.sqlite_queue.content import (
    PROPERTIES,
    READ_BODY,
    READ_DELIVERIES,
    READ_PROPERTIES,
    READ_REASON,
    from_row,
)
from meshpoint.adapters.sqlite_queue.queues import UNREADABLE_HOLDER
from meshpoint.adapters.sqlite_queue.schema import add_dead_from, has_schema, transaction
from meshpoint.adapters.stored_messages import LETTERS_PER_PAGE
from meshpoint.errors import BrokerUnavailable, PoisonMessage
from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult, make_letter
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import dead_letter_queue, is_agent_name

_T = TypeVar("_T")

_MAX_NAME_LENGTH = 1000
_IN_QUEUE = f"queue = ? AND (holder IS NULL OR holder = {UNREADABLE_HOLDER})"
"""Condition on a dead letter that no consumer holds."""
_FIND_QUEUES = f"""
    SELECT name FROM meshpoint_queue
     WHERE name = dead_letters AND typeof(name) = 'text' AND length(name) <= {_MAX_NAME_LENGTH}
     ORDER BY name"""
_READ_PAGE = f"""
    SELECT id, {READ_DELIVERIES}, {READ_REASON}, substr(dead_from, 1, {_MAX_NAME_LENGTH}),
           length({READ_BODY}), {READ_PROPERTIES}
      FROM meshpoint_queue_message LEFT JOIN meshpoint_queue_content USING (id)
     WHERE {_IN_QUEUE} AND id > ? AND id <= ? ORDER BY id LIMIT {LETTERS_PER_PAGE}"""
_LAST_ID = "SELECT max(id) FROM meshpoint_queue_message WHERE queue = ?"
_READ_LETTER_BODY = f"""
    SELECT {READ_BODY} FROM meshpoint_queue_message JOIN meshpoint_queue_content USING (id)
     WHERE {_IN_QUEUE} AND id = ?"""
_APPEND = f"""
    INSERT INTO meshpoint_queue_message (queue)
    SELECT ? FROM meshpoint_queue_message WHERE {_IN_QUEUE} AND id = ?"""
_DELETE = f"DELETE FROM meshpoint_queue_message WHERE {_IN_QUEUE} AND id = ?"


class SqliteDeadLetters:
    """`meshpoint.ports.dead_letters.DeadLetters`. Does not create the file or its tables.

    Args:
        path: The file.
        namespace: The namespace of the mesh.
        timeout: Limit for waiting for writers.
    """

    def __init__(self, path: str | Path, *, namespace: str, timeout: timedelta) -> None:
        self._path, self._namespace = Path(path), namespace
        self._timeout = timeout.total_seconds()

    async def open(self) -> None:
        """Check that the file is readable, if it exists.

        Raises:
            BrokerUnavailable: It cannot be read.
        """
        await self._run(lambda db: None, None)

    async def close(self) -> None:
        """Do nothing: each operation opens the file."""

    async def read(self, where: LetterFilter) -> AsyncGenerator[Sequence[DeadLetter], None]:
        """Yield the letters that match in pages of one agent each, its oldest first."""
        for agent in await self._run(self._find_agents, list[AgentName]()):
            if where.agents is not None and agent not in where.agents:
                continue
            queue = self._queue_name(dead_letter_queue(agent))
            after, last = 0, await self._run(_reader(_LAST_ID, queue), [(None,)])
            while page := await self._run(
                _reader(_READ_PAGE, queue, after, last[0][0]), list[tuple[Any, ...]]()
            ):
                after = page[-1][0]
                letters = [self._to_letter(agent, row) for row in page]
                if matching := [letter for letter in letters if where.matches(letter)]:
                    yield matching

    async def body(self, letter: DeadLetter) -> bytes | None:
        """The body of a letter; `None` if it is gone, too large to load, or not a blob."""
        rows = await self._run(
            _reader(_READ_LETTER_BODY, *self._place(letter)), list[tuple[Any, ...]]()
        )
        return rows[0][0] if rows else None

    async def replay(
        self, letters: Sequence[DeadLetter], body: bytes | None = None
    ) -> list[LetterResult]:
        """Append letters to the queues they came from, all in one transaction."""
        return await self._change(letters, lambda db, letter: self._replay(db, letter, body))

    async def drop(self, letters: Sequence[DeadLetter]) -> list[LetterResult]:
        """Delete letters, all in one transaction."""
        return await self._change(letters, self._drop)

    def _find_agents(self, db: sqlite3.Connection) -> list[AgentName]:
        prefix, suffix = f"{self._namespace}.", dead_letter_queue(AgentName(""))
        agents = [
            name.removeprefix(prefix).removesuffix(suffix)
            for (name,) in db.execute(_FIND_QUEUES)
            if name.startswith(prefix)
        ]
        return [AgentName(agent) for agent in agents if is_agent_name(agent)]

    def _to_letter(self, agent: AgentName, row: tuple[Any, ...]) -> DeadLetter:
        id_, deliveries, reason, died_in, body_size, *properties = row
        message, defect = None, None
        try:
            message = from_row((*properties, None if body_size is None else b""), None)
        except PoisonMessage as error:
            defect = str(error)
        return make_letter(
            agent,
            id_,
            reason=reason,
            died_in=None if died_in is None else str(died_in).removeprefix(self._queue_name("")),
            message=message,
            defect=defect,
            stored=dict(zip(PROPERTIES, properties, strict=True)),
            deliveries=deliveries,
            body_size=body_size,
        )

    def _replay(
        self, db: sqlite3.Connection, letter: DeadLetter, body: bytes | None
    ) -> LetterResult:
        if letter.queue is None or letter.defect is not None:
            return LetterResult.DEFECTIVE
        target = self._queue_name(letter.queue)
        if not db.execute("SELECT 1 FROM meshpoint_queue WHERE name = ?", (target,)).fetchone():
            return LetterResult.NO_QUEUE
        queue, id_ = self._place(letter)
        # A new row puts the message at the end of its queue.
        appended = db.execute(_APPEND, (target, queue, id_))
        if not appended.rowcount:
            return LetterResult.GONE
        db.execute("DELETE FROM meshpoint_queue_message WHERE id = ?", (id_,))
        db.execute(
            "UPDATE OR REPLACE meshpoint_queue_content SET id = ?, body = coalesce(?, body)"
            " WHERE id = ?",
            (appended.lastrowid, body, id_),
        )
        return LetterResult.DONE

    def _drop(self, db: sqlite3.Connection, letter: DeadLetter) -> LetterResult:
        queue, id_ = self._place(letter)
        if not db.execute(_DELETE, (queue, id_)).rowcount:
            return LetterResult.GONE
        db.execute("DELETE FROM meshpoint_queue_content WHERE id = ?", (id_,))
        return LetterResult.DONE

    async def _change(
        self,
        letters: Sequence[DeadLetter],
        change: Callable[[sqlite3.Connection, DeadLetter], LetterResult],
    ) -> list[LetterResult]:
        def run(db: sqlite3.Connection) -> list[LetterResult]:
            with transaction(db):
                return [change(db, letter) for letter in letters]

        return await self._run(run, [LetterResult.GONE] * len(letters))

    async def _run(self, step: Callable[[sqlite3.Connection], _T], missing: _T) -> _T:
        """Return what `step` returns, or `missing` without the file or its tables."""
        try:
            return await asyncio.to_thread(self._connect_and_run, step, missing)
        except (sqlite3.Error, OSError) as error:
            raise BrokerUnavailable(f"{self._path}: {error}") from error

    def _connect_and_run(self, step: Callable[[sqlite3.Connection], _T], missing: _T) -> _T:
        if not self._path.exists():
            return missing
        uri = f"{self._path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, timeout=self._timeout, uri=True, isolation_level=None)
        with closing(connection) as db:
            # Others may write any bytes. With surrogates, only their own row is unreadable.
            db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            db.execute("PRAGMA synchronous = FULL")
            if not has_schema(db):
                return missing
            add_dead_from(db)
            return step(db)

    def _place(self, letter: DeadLetter) -> tuple[str, int]:
        """The queue and the row of a letter."""
        return self._queue_name(dead_letter_queue(letter.agent)), int(letter.key)

    def _queue_name(self, address: str) -> str:
        return f"{self._namespace}.{address}"


def _reader(
    query: str, *values: str | int | None
) -> Callable[[sqlite3.Connection], list[tuple[Any, ...]]]:
    return lambda db: db.execute(query, values).fetchall()
