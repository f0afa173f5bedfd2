"""Seal what is stored with the newest key, or store it in the clear, while replicas run.

Rows are changed in small transactions that skip rows locked by others, so transitions neither wait
long nor deadlock. A row is read under its lock, so no update is lost. Skipped rows are found again
by the next pass, and a killed command can be repeated: it finds the rows that are left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import Column, Row, Table, Text, cast, func, select, tuple_, type_coerce, update
from sqlalchemy.dialects.postgresql import JSONB

from meshpoint.adapters.encryption import (
    DIGEST_PREFIX,
    from_text,
    is_envelope,
    is_text_envelope,
    key_of,
    seq_of,
)
from meshpoint.adapters.sql import inventory, key_register
from meshpoint.adapters.sql.codec import EMPTY, Codec
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.inventory import SEALED, SEALED_KEY, Kind, Sealed
from meshpoint.adapters.sql.rows import columns_for_people, context_from_row
from meshpoint.adapters.sql.tables import JSON, metadata, tasks
from meshpoint.errors import KeyMissing
from meshpoint.ports.inspection import AgentKeys

_PAGE_ROWS = 100
_PAGE_BYTES = 4_000_000
_MAX_PASSES = 20
_AGENT_COLUMNS = ("agent_name", "agent_type")


@dataclass(frozen=True, slots=True)
class _Columns:
    """The sealed columns of a table, and how to select the rows of an agent."""

    table: Table
    sealed: tuple[Sealed, ...]

    @property
    def key(self) -> tuple[Column[Any], ...]:
        return tuple(self.table.primary_key.columns)

    @property
    def is_shared(self) -> bool:
        """Whether its rows belong to all agents of a namespace, whose keys may differ."""
        return "namespace" in self.table.c

    def belongs_to(self, agent: str) -> Any:
        """The condition for the rows of an agent, a qualified name."""
        if self.is_shared:
            return self.table.c.namespace == agent.rpartition("/")[0]
        for name in _AGENT_COLUMNS:
            if name in self.table.c:
                return self.table.c[name] == agent
        owner = select(tasks.c.agent_name).where(
            tasks.c.logical_task_id == self.table.c.logical_task_id
        )
        return owner.scalar_subquery() == agent

    def values(self) -> list[Any]:
        """The columns to read: JSON as text, and what the sealed values are bound to."""
        names = {column.name for column in self.key}
        names |= {name for each in self.sealed for name in each.keys}
        names |= {each.column for each in self.sealed}
        if self.table is tasks:
            names |= {"user_id", "effective_session_id"}
        return [
            cast(self.table.c[name], Text).label(name)
            if self.table.c[name].type is JSON
            else self.table.c[name]
            for name in sorted(names)
        ]


_COPIED_FIRST = "agent_subtask_records"
"""Transitions copy from this table to checkpoints, and from these to the archive."""

TABLES = tuple(
    _Columns(metadata.tables[table], tuple(columns))
    for table, columns in groupby(
        sorted(SEALED, key=lambda each: (each.table != _COPIED_FIRST, each.table)),
        attrgetter("table"),
    )
)


async def count_rows(database: Database, agent: str) -> int:
    """The number of rows of an agent that may have sealed values."""

    async def read(tx: Transaction) -> int:
        total = 0
        for each in TABLES:
            query = select(func.count()).select_from(each.table)
            query = query.where(each.belongs_to(agent))
            total += (await tx.connection.execute(query, {})).scalar_one()
        return total

    return await database.read(read)


async def reseal(
    database: Database,
    agent: str,
    *,
    changes: bool = True,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> AgentKeys:
    """Seal the values of `agent`, a qualified name, as the store's codec does.

    Without `changes`, only counts what is sealed with which key. `on_rows` gets the number of rows
    of each page of the first pass.
    """
    # A transition may copy a stale value behind the page that is read. So a pass that has changed
    # something is not the last one.
    found = AgentKeys()
    for number in range(_MAX_PASSES if changes else 1):
        found, before = AgentKeys(changed=found.changed), found.changed
        skipped = False
        for each in TABLES:
            async for page in _pages(database, each, agent):
                if number == 0:
                    on_rows(len(page))
                stale = [row for row in page if _is_stale(row, each, agent, database)]
                if changes and stale:
                    done = await _change(database, each, agent, stale, found)
                    skipped |= done < len(stale)
                    read = await _read_again(database, each, page)
                else:
                    read = page
                for row in read:
                    _count(row, each, found, database)
        if not skipped and found.changed == before:
            break
    if changes:
        await _update_register(database, agent, found)
    return found


async def _pages(database: Database, each: _Columns, agent: str) -> Any:
    last: Sequence[Any] | None = None
    while True:
        query = select(*each.values()).where(each.belongs_to(agent)).order_by(*each.key)
        if last is not None:
            query = query.where(tuple_(*each.key) > tuple_(*last))
        query = query.limit(_PAGE_ROWS)

        async def read(tx: Transaction, query: Any = query) -> Sequence[Row[Any]]:
            return (await tx.connection.execute(query, {})).all()

        rows = await database.read(read)
        if not rows:
            return
        yield rows
        last = [getattr(rows[-1], column.name) for column in each.key]


async def _read_again(
    database: Database, each: _Columns, page: Sequence[Row[Any]]
) -> Sequence[Row[Any]]:
    keys = [tuple(getattr(row, column.name) for column in each.key) for row in page]
    query = select(*each.values()).where(tuple_(*each.key).in_(keys))

    async def read(tx: Transaction) -> Sequence[Row[Any]]:
        return (await tx.connection.execute(query, {})).all()

    return await database.read(read)


async def _change(
    database: Database, each: _Columns, agent: str, rows: Sequence[Row[Any]], found: AgentKeys
) -> int:
    """Seal rows anew, and return how many were free to be locked."""
    free = 0
    for part in _by_size(rows):
        keys = [tuple(getattr(row, column.name) for column in each.key) for row in part]

        async def body(tx: Transaction, keys: Any = keys) -> tuple[int, int]:
            query = select(*each.values()).where(tuple_(*each.key).in_(keys))
            if not tx.dialect.is_sqlite:
                query = query.with_for_update(of=each.table, key_share=True, skip_locked=True)
            locked = (await tx.connection.execute(query, {})).all()
            changed = 0
            for row in locked:
                changed += await _change_row(tx, each, agent, row, found)
            return len(locked), changed

        locked, changed = await database.transact(body)
        free += locked
        found.changed += changed
    return free


def _by_size(rows: Sequence[Row[Any]]) -> Iterator[list[Row[Any]]]:
    part, size = list[Row[Any]](), 0
    for row in rows:
        part.append(row)
        size += sum(len(value) for value in row if isinstance(value, bytes | str))
        if size > _PAGE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


async def _change_row(
    tx: Transaction, each: _Columns, agent: str, row: Row[Any], found: AgentKeys
) -> int:
    codec, new = tx.options.codec, dict[str, Any]()
    for column in each.sealed:
        stored = getattr(row, column.column)
        if not _stale_value(stored, column, agent, codec):
            continue
        try:
            value = _convert(stored, column, agent, row, codec, tx.options.names.prefix)
        except KeyMissing:
            continue
        except ValueError:
            found.damaged += 1
            continue
        if value != stored:
            new[column.column] = value
    if each.table is tasks and _stale_people(row, agent, codec):
        new |= await _people(row, agent, codec)
    if not new:
        return 0
    if not tx.dialect.is_sqlite:
        new = {
            name: cast(type_coerce(value, Text), JSONB)
            if each.table.c[name].type is JSON and value is not None
            else value
            for name, value in new.items()
        }
    key = [getattr(row, column.name) for column in each.key]
    statement = update(each.table).where(tuple_(*each.key) == tuple_(*key)).values(**new)
    await tx.connection.execute(statement, {})
    return 1


async def _people(row: Row[Any], agent: str, codec: Codec) -> dict[str, Any]:
    """The copies of the user and the session, computed anew from the context."""
    try:
        context = await context_from_row(_WithAgent(row, agent), codec)
    except (KeyMissing, ValueError):
        return {}
    return columns_for_people(context, codec, agent)


class _WithAgent:
    """A row, and its agent."""

    def __init__(self, row: Row[Any], agent: str) -> None:
        self._row, self.agent_name = row, agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)


def _stale_people(row: Row[Any], agent: str, codec: Codec) -> bool:
    newest = codec.sealer.key_id(agent) if codec.sealer is not None else None
    copies = [row.user_id, row.effective_session_id]
    return any(
        copy is not None and (key_of(copy) if copy.startswith(DIGEST_PREFIX) else None) != newest
        for copy in copies
    )


def _is_stale(row: Row[Any], each: _Columns, agent: str, database: Database) -> bool:
    codec = database.options.codec
    if each.table is tasks and _stale_people(row, agent, codec):
        return True
    return any(
        _stale_value(getattr(row, column.column), column, agent, codec) for column in each.sealed
    )


def _stale_value(stored: Any, column: Sealed, agent: str, codec: Codec) -> bool:
    newest = codec.sealer.key_id(agent) if codec.sealer is not None else None
    return any(key != newest for key in _keys_in(stored, column))


def _keys_in(stored: Any, column: Sealed) -> Iterator[str | None]:
    """The key of each value in a column: `None` for a value in the clear."""
    if stored is None or stored in EMPTY:
        return
    match column.kind:
        case Kind.PACKED | Kind.BYTES:
            yield key_of(bytes(stored)) or "?" if is_envelope(stored) else None
        case Kind.TEXT | Kind.FIXED:
            yield key_of(stored) or "?" if is_text_envelope(stored) else None
        case _:
            for value in _parts(json.loads(stored), column.kind):
                if isinstance(value, str) and value in EMPTY:
                    continue
                yield key_of(value) or "?" if is_text_envelope(value) else None


def _parts(value: Any, kind: Kind) -> list[Any]:
    match kind:
        case Kind.LIST:
            return list(value)
        case Kind.OBJECT:
            return list(value.values())
        case Kind.MEMORY:
            return [value.get(SEALED_KEY, value)]
        case _:
            return [value]


def _count(row: Row[Any], each: _Columns, found: AgentKeys, database: Database) -> None:
    keys = [key for column in each.sealed for key in _keys_in(getattr(row, column.column), column)]
    if each.is_shared:  # another agent may have sealed it, with a key of its own
        sealer = database.options.codec.sealer
        known = () if sealer is None else sealer.key_ids
        keys = [key for key in keys if key is None or key in known]
    if each.table is tasks:
        copies = [row.user_id, row.effective_session_id]
        keys += [key_of(copy) for copy in copies if copy is not None]
    found.clear += sum(key is None for key in keys)
    found.values.update(key for key in keys if key is not None)


def _convert(
    stored: Any, column: Sealed, agent: str, row: Row[Any], codec: Codec, prefix: str
) -> Any:
    """A stored value as `codec` writes it."""
    bound = prefix if column in inventory.BOUND_TO_NAMESPACE else agent
    place: Any = (column, bound, *(str(getattr(row, name)) for name in column.keys))
    match column.kind:
        case Kind.PACKED | Kind.BYTES:
            stored = bytes(stored)
            seq = seq_of(stored) if is_envelope(stored) else 0
            return codec.seal(codec.open(stored, *place), *place, seq=seq)
        case Kind.TEXT | Kind.FIXED:
            return codec.text(codec.read_text(stored, *place), *place, seq=_seq(stored))
        case Kind.JSON:
            value = json.loads(stored)
            text = codec.read_text(value, *place) if is_text_envelope(value) else stored
            return codec.json(text, *place, seq=_seq(value))
        case Kind.MEMORY:
            memory = json.loads(stored)
            opened = codec.read_memory(memory, *place)
            seq = _seq(memory.get(SEALED_KEY))
            _, bound, key = place
            return json.dumps(codec.memory(opened, "records_from", column, bound, key, seq))
        case Kind.OBJECT:
            return json.dumps(
                {
                    name: codec.text(
                        codec.read_text(each, *place, name), *place, name, seq=_seq(each)
                    )
                    for name, each in json.loads(stored).items()
                }
            )
        case Kind.LIST:
            return json.dumps(_convert_list(json.loads(stored), codec, *place))


def _convert_list(items: list[Any], codec: Codec, *place: Any) -> list[Any]:
    column, agent, *keys = place
    converted: list[Any] = []
    for item in items:
        opened = codec.read_json(item, column, agent, *keys)
        if codec.seals(agent):
            text = json.dumps(opened)
            converted.append(codec.text(text, column, agent, *keys, seq=_seq(item)))
        elif isinstance(opened, list):  # children that were appended together
            converted += opened
        else:
            converted.append(opened)
    return converted


def _seq(stored: Any) -> int:
    return seq_of(from_text(stored)) if is_text_envelope(stored) else 0


async def _update_register(database: Database, agent: str, found: AgentKeys) -> None:
    """Remove unused keys from the register, but never the newest."""
    sealer = database.options.codec.sealer
    newest = None if sealer is None else sealer.key_id(agent)

    async def body(tx: Transaction) -> tuple[str, ...]:
        unused = [
            key_id
            for key_id in await key_register.read(tx, agent)
            if key_id != newest and not found.values[key_id]
        ]
        await key_register.remove(tx, agent, unused)
        return tuple(unused)

    registered = await database.transact(body)
    others = () if sealer is None else sealer.key_ids
    found.unused = tuple(
        dict.fromkeys(
            (
                *registered,
                *(each for each in others if each != newest and not found.values[each]),
            )
        )
    )


async def forget(database: Database, agent: str, key_id: str) -> None:
    """Remove a lost key from the register. Values that it has sealed stay unreadable."""
    await database.transact(lambda tx: key_register.remove(tx, agent, [key_id]))
