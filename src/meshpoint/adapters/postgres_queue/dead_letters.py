"""The dead letters in queues on PostgreSQL, for operators.

Each change is one statement, guarded by the queue of the row: if several commands try, only one
moves or deletes it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.postgres_queue import statements as sql
from meshpoint.adapters.postgres_queue.content import MAX_PROPERTIES_BYTES, from_row, request_id
from meshpoint.adapters.postgres_queue.notifications import channel_name
from meshpoint.adapters.sql.engine import engine_for
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.adapters.stored_messages import LETTERS_PER_PAGE, MAX_BODY_BYTES
from meshpoint.errors import (
    BrokerUnavailable,
    ConfigurationError,
    PoisonMessage,
    StoreUnavailable,
)
from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult, make_letter
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import dead_letter_queue, is_agent_name


class PostgresDeadLetters:
    """`meshpoint.ports.dead_letters.DeadLetters`. Does not create the tables."""

    def __init__(self, url: str, *, namespace: str, timeout: timedelta) -> None:
        self._url, self._namespace, self._timeout = url, namespace, timeout
        self._engine: AsyncEngine | None = None
        self._has_tables = False

    async def open(self) -> None:
        """Connect.

        Raises:
            BrokerUnavailable: The database does not answer.
            ConfigurationError: The tables are older than this release.
        """
        self._engine = engine_for(
            self._url, command_timeout=self._timeout, pool_size=1, in_key_order=True
        )
        self._connection = PreparedConnection(self._engine)
        ((self._has_tables, are_current, _),) = await self._run(sql.FIND_TABLES)
        if self._has_tables and not are_current:
            raise ConfigurationError(
                "mesh.broker_url",
                "the tables of the queues are older than this release",
                "run `meshpoint db upgrade`",
            )

    async def close(self) -> None:
        """Disconnect."""
        if self._engine is not None:
            await self._connection.close()
            await self._engine.dispose()

    async def read(self, where: LetterFilter) -> AsyncGenerator[Sequence[DeadLetter], None]:
        """Yield the letters that match in pages of one agent each, its oldest first."""
        for agent, queue in await self._find_agents():
            if where.agents is not None and agent not in where.agents:
                continue
            after, last = 0, (await self._run(sql.LAST_DEAD_LETTER, queue))[0].id
            while page := await self._run(
                sql.READ_DEAD_LETTERS, queue, after, last, MAX_PROPERTIES_BYTES, LETTERS_PER_PAGE
            ):
                after = page[-1].id
                letters = [self._to_letter(agent, row) for row in page]
                if matching := [letter for letter in letters if where.matches(letter)]:
                    yield matching

    async def body(self, letter: DeadLetter) -> bytes | None:
        """The body of a letter; `None` if it is gone or too large to load."""
        queue, (id_,) = self._place([letter])
        rows = await self._run(sql.READ_DEAD_BODY, queue, id_, MAX_BODY_BYTES)
        return rows[0].body if rows else None

    async def replay(
        self, letters: Sequence[DeadLetter], body: bytes | None = None
    ) -> list[LetterResult]:
        """Append letters to the queues they came from, in one statement."""
        targets = {
            letter.id: self._queue_name(letter.queue)
            for letter in letters
            if letter.queue is not None and letter.defect is None
        }
        found = await self._run(sql.FIND_QUEUES, list(set(targets.values())))
        existing = {row.name for row in found}
        sent = [letter for letter in letters if targets.get(letter.id) in existing]
        rows = await self._run(
            sql.REPLAY_DEAD_LETTERS,
            *self._place(sent),
            [targets[letter.id] for letter in sent],
            [letter.message and request_id(letter.message) for letter in sent],
            body,
        )
        await self._notify({row.queue for row in rows})
        results = dict.fromkeys(letters, LetterResult.DEFECTIVE)
        results |= {letter: LetterResult.NO_QUEUE for letter in letters if letter.id in targets}
        return list((results | _results_of(sent, rows)).values())

    async def drop(self, letters: Sequence[DeadLetter]) -> list[LetterResult]:
        """Delete letters, in one statement."""
        rows = await self._run(sql.DROP_DEAD_LETTERS, *self._place(letters))
        return list(_results_of(letters, rows).values())

    async def _find_agents(self) -> list[tuple[AgentName, int]]:
        """The agents that have a dead-letter queue, and the id of that queue."""
        prefix, suffix = self._queue_name(""), dead_letter_queue(AgentName(""))
        rows = await self._run(sql.FIND_DEAD_LETTERS, prefix) if self._has_tables else []
        agents = [
            (row.name.removeprefix(prefix).removesuffix(suffix), row.id)
            for row in sorted(rows, key=lambda row: str(row.name))
        ]
        return [(AgentName(agent), queue) for agent, queue in agents if is_agent_name(agent)]

    def _to_letter(self, agent: AgentName, row: Any) -> DeadLetter:
        message, defect = None, None
        try:
            if row.body_size > MAX_BODY_BYTES:
                raise PoisonMessage("body: is too large to load")
            message = from_row(row.properties, b"", None)
        except PoisonMessage as error:
            defect = str(error)
        return make_letter(
            agent,
            row.id,
            reason=row.dead_reason,
            died_in=row.dead_from and row.dead_from.removeprefix(self._queue_name("")),
            message=message,
            defect=defect,
            stored={"properties": row.properties},
            deliveries=row.deliveries,
            body_size=row.body_size,
        )

    async def _notify(self, queues: set[int]) -> None:
        """Wake the replicas. Otherwise they find the messages at their next poll."""
        if queues:
            with suppress(BrokerUnavailable):
                payload = " ".join(map(str, queues))
                await self._run(sql.NOTIFY, channel_name(self._namespace), payload)

    async def _run(self, statement: str, *values: Any) -> Sequence[Any]:
        try:
            return await self._connection.write(statement, *values)
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    def _place(self, letters: Sequence[DeadLetter]) -> tuple[str, list[int]]:
        """The queue of letters of one agent, and their rows."""
        agents = {letter.agent for letter in letters} or {AgentName("")}
        (queue,) = map(dead_letter_queue, agents)
        return self._queue_name(queue), [int(letter.key) for letter in letters]

    def _queue_name(self, address: str) -> str:
        return f"{self._namespace}.{address}"


def _results_of(
    letters: Sequence[DeadLetter], changed: Sequence[Any]
) -> dict[DeadLetter, LetterResult]:
    ids = {str(row.id) for row in changed}
    return {
        letter: LetterResult.DONE if letter.key in ids else LetterResult.GONE for letter in letters
    }
