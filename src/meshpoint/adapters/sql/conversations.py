"""Conversations in a table of PostgreSQL or SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import JsonValue
from sqlalchemy import NullPool, Row, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from meshpoint.adapters.encryption import KeyRing, RingKey, key_of
from meshpoint.adapters.sql.codec import Codec
from meshpoint.adapters.sql.engine import async_url, make_files_private
from meshpoint.adapters.sql.failures import as_configuration_error, driver_errors, summarize
from meshpoint.adapters.sql.inventory import MESSAGES, SESSION, USER
from meshpoint.errors import ConfigurationError, IncompatibleState, StoreUnavailable
from meshpoint.model.encryption_keys import read_keys, to_ring
from meshpoint.model.error_text import make_storable
from meshpoint.ports.conversations import ConversationKey, ConversationTurn

_TIMEOUT = 10.0
"""Seconds for a connection, for a statement, and for a lock."""
_MAX_CONNECTIONS = 8
"""Open connections of one object and event loop. Further operations wait."""
_LOCK_KEY = 0x6D657368_7475726E
"""Advisory lock of those who create the table."""

_TABLE = "meshpoint_conversation_turns"
_SETTING = "encryption_keys of SqlConversations"
_CREATE = f"""
CREATE TABLE IF NOT EXISTS {_TABLE} (
    conversation text NOT NULL,
    turn bigint NOT NULL,
    task_id text NOT NULL,
    agent text NOT NULL,
    requester text,
    login text,
    user_id text,
    context_id text NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP,
    library text NOT NULL,
    replaces bigint NOT NULL,
    messages text NOT NULL,
    PRIMARY KEY (conversation, turn),
    UNIQUE (conversation, task_id)
)
"""
_COLUMNS = "turn, task_id, library, messages, replaces"
_LATEST = f"""
SELECT {_COLUMNS} FROM {_TABLE} WHERE conversation = :conversation
 ORDER BY turn DESC LIMIT :max_turns
"""
_BETWEEN = f"""
SELECT {_COLUMNS} FROM {_TABLE}
 WHERE conversation = :conversation AND turn BETWEEN :first AND :last ORDER BY turn DESC
"""
_APPEND = f"""
INSERT INTO {_TABLE} (conversation, turn, task_id, agent, requester, login, user_id, context_id,
                      library, replaces, messages)
SELECT :conversation, COALESCE(MAX(turn), 0) + 1, :task_id, :agent, :requester, :login, :user_id,
       :context_id, :library, :replaces, :messages
  FROM {_TABLE} WHERE conversation = :conversation
    ON CONFLICT (conversation, task_id) DO NOTHING
"""
_PAGE = f"""
SELECT conversation, turn, task_id, messages FROM {_TABLE}
 WHERE conversation > :conversation OR (conversation = :conversation AND turn > :turn)
 ORDER BY conversation, turn LIMIT 100
"""
_RESEAL = f"""
UPDATE {_TABLE} SET messages = :messages WHERE conversation = :conversation AND turn = :turn
"""
_DELETE_OLD = f"""
DELETE FROM {_TABLE} WHERE conversation = :conversation
   AND turn <= (SELECT MAX(turn) FROM {_TABLE} WHERE conversation = :conversation) - :kept
"""


class SqlConversations:
    """Stores conversations in a table of a PostgreSQL database or a SQLite file.

        travel = durable(planner, conversations=SqlConversations("sqlite:///conversations.db"))

    It creates the table `meshpoint_conversation_turns` when it is first used. Each operation has a
    connection of its own, so there is nothing to close. One object may serve several agents. The
    messages are stored as they are unless there are keys.

    Args:
        url: The database, such as postgresql://user@host/name. It may be the tasks' database.
        namespace: The mesh, if meshes of several namespaces share the database. Their agents may
            have the same names.
        max_turns: How many turns a task sees at most; a turn is what one task has added. The store
            keeps as many again for tasks that have started before, and deletes older ones.
        encryption_keys: Encrypt the messages, as the setting of the same name does. The user and
            the context become keyed digests. Turns in the clear stay readable.

    Raises:
        ConfigurationError: The URL names no such database, or `max_turns` is not positive.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "",
        max_turns: int = 50,
        encryption_keys: Sequence[str] | str = (),
    ) -> None:
        if max_turns < 1:
            raise ConfigurationError("SqlConversations", f"max_turns is {max_turns}", "write 50")
        try:
            self._url = async_url(url)
        except ConfigurationError as error:
            raise ConfigurationError("SqlConversations", error.problem, error.fix) from None
        self._namespace, self._max_turns = namespace, max_turns
        ring = to_ring(read_keys(encryption_keys, "SqlConversations.encryption_keys"))
        self._codec = Codec(
            KeyRing([RingKey(key.secret) for key in ring], setting=_SETTING, scope="store")
            if ring
            else None
        )
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        mode = "AUTOCOMMIT" if self._is_sqlite else "READ COMMITTED"
        options = {"timeout": _TIMEOUT}
        if not self._is_sqlite:
            options["command_timeout"] = _TIMEOUT
        self._engine = create_async_engine(
            self._url, poolclass=NullPool, isolation_level=mode, connect_args=options
        )
        if self._is_sqlite:
            make_files_private(self._engine.sync_engine)
        self._has_table = False
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return f"SqlConversations({self._url.render_as_string(hide_password=True)!r})"

    async def check(self) -> None:
        """See `ChecksStore`."""
        try:
            async with self._connect():
                pass
        except StoreUnavailable as error:
            if (refused := as_configuration_error(error.__cause__)) is not None:
                problem = f"the database of conversations: {refused.problem}"
                raise ConfigurationError("SqlConversations", problem, refused.fix) from error
            raise
        except ConfigurationError as error:
            raise ConfigurationError("SqlConversations", error.problem, error.fix) from None

    async def load(
        self, key: ConversationKey, numbers: tuple[int, int] | None = None
    ) -> list[ConversationTurn]:
        """See `Conversations.load`."""
        values: dict[str, object] = {"conversation": self._digest(key)}
        if numbers is None:
            statement = _LATEST
            values["max_turns"] = self._max_turns
        else:
            statement = _BETWEEN
            values["first"], values["last"] = numbers
        async with self._connect() as connection:
            rows = (await connection.execute(text(statement), values)).all()
        return [_read(row, self._codec, str(values["conversation"])) for row in reversed(rows)]

    async def append(
        self,
        key: ConversationKey,
        task_id: str,
        library: str,
        messages: list[JsonValue],
        *,
        replaces: int = 0,
    ) -> None:
        """See `Conversations.append`."""
        conversation = self._digest(key)
        text_ = self._codec.text(json.dumps(messages), MESSAGES, "", conversation, task_id)
        user = None if key.user_id is None else make_storable(key.user_id)
        values: dict[str, object] = {
            "conversation": conversation,
            "task_id": task_id,
            "agent": key.agent,
            "requester": key.requester,
            "login": key.login,
            "user_id": self._codec.digest(user, USER, ""),
            "context_id": self._codec.digest(key.context_id, SESSION, ""),
            "library": library,
            "replaces": replaces,
            "messages": text_,
        }
        async with self._connect(writes=True) as connection:
            if not self._is_sqlite:  # so that the numbers have the order of the commits
                lock = "SELECT pg_advisory_xact_lock(hashtextextended(:conversation, 0))"
                await connection.execute(text(lock), {"conversation": values["conversation"]})
            await connection.execute(text(_APPEND), values)
            kept = {"conversation": values["conversation"], "kept": 2 * self._max_turns}
            await connection.execute(text(_DELETE_OLD), kept)

    async def reseal(self) -> int:
        """Encrypt the messages of all turns with the first key, and return how many changed.

        Agents may run meanwhile. Earlier keys can be removed afterwards. If it is stopped, call it
        again. With `clear` as the first key, it stores them in the clear. The digests of users and
        contexts stay as they are.

        Raises:
            KeyMissing: A turn is encrypted with a key that is not in the list.
            StoreUnavailable: The database does not answer.
        """
        changed, last = 0, {"conversation": "", "turn": 0}
        sealer = self._codec.sealer
        newest = None if sealer is None else sealer.key_id()
        while True:
            async with self._connect() as connection:
                rows = (await connection.execute(text(_PAGE), last)).all()
            if not rows:
                return changed
            stale = [row for row in rows if key_of(row.messages) != newest]
            async with self._connect(writes=True) as connection:
                for row in stale:  # a turn never changes otherwise
                    where = (MESSAGES, "", row.conversation, row.task_id)
                    sealed = self._codec.text(self._codec.read_text(row.messages, *where), *where)
                    values = {"conversation": row.conversation, "turn": row.turn}
                    await connection.execute(text(_RESEAL), {**values, "messages": sealed})
            changed += len(stale)
            last = {"conversation": rows[-1].conversation, "turn": rows[-1].turn}

    def _digest(self, key: ConversationKey) -> str:
        parts = [key.agent, key.requester, key.login, key.user_id, key.context_id]
        named = [self._namespace, *parts] if self._namespace else parts
        return sha256(json.dumps(named).encode()).hexdigest()

    @asynccontextmanager
    async def _connect(self, *, writes: bool = False) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction, which commits at the end.

        Raises:
            StoreUnavailable: The database does not answer or refuses. A commit may have succeeded.
        """
        slots = self._slots.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(_MAX_CONNECTIONS)
        )
        try:
            async with slots:
                if not self._has_table:
                    async with self._begin(writes=True) as connection:
                        await self._create_table(connection)
                    self._has_table = True
                async with self._begin(writes=writes) as connection:
                    yield connection
        except driver_errors() as error:
            self._has_table = False  # it may be another database from now on
            refused = as_configuration_error(error)
            fix = "" if refused is None else f"; {refused.fix} of SqlConversations"
            raise StoreUnavailable(f"conversations: {summarize(error)}{fix}") from error

    @asynccontextmanager
    async def _begin(self, *, writes: bool) -> AsyncIterator[AsyncConnection]:
        async with self._engine.begin() as connection:
            if self._is_sqlite and writes:  # the driver begins none by itself
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            elif writes:
                await connection.exec_driver_sql("SET TRANSACTION READ WRITE")
            yield connection

    async def _create_table(self, connection: AsyncConnection) -> None:
        if not self._is_sqlite:
            await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")
            found = await connection.exec_driver_sql(f"SELECT to_regclass('{_TABLE}')")
            if found.scalar_one() is not None:  # the login may have no right to create tables
                return
        await connection.exec_driver_sql(_CREATE)


def _read(row: Row[Any], codec: Codec, conversation: str) -> ConversationTurn:
    number, task_id, library, stored, replaces = tuple(row)
    try:
        opened = codec.read_text(stored, MESSAGES, "", conversation, task_id)
        messages = json.loads(opened or "")
        if not isinstance(messages, list):
            raise ValueError("not a list")
    except ValueError as error:
        reason = f"turn {number} of the conversation, of task {task_id}, cannot be read: {error}"
        raise IncompatibleState(reason) from error
    return ConversationTurn(number, task_id, library, messages, replaces)
