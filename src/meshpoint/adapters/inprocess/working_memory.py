"""Working memory in this process, used where no Redis is configured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, cast

from meshpoint.adapters.inprocess.redis_commands import (
    COMMANDS,
    OK,
    CommandRefused,
    add_int64,
    add_long_doubles,
    normalize_zero,
    parse_int64,
)
from meshpoint.errors import MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import RunId
from meshpoint.model.memory import Answer, Command, Content, Item, Kind, MemoryContents, Owner
from meshpoint.ports.clock import Clock

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_ONE_ARGUMENT = frozenset({"SET", "INCRBY", "INCRBYFLOAT", "PEXPIRE"})


def _scores(scores: Mapping[bytes, float] | None = None) -> dict[bytes, float]:
    return {member: normalize_zero(score) for member, score in (scores or {}).items()}


_FROM_CONTENT: Mapping[Kind, Callable[..., Any]] = {
    Kind.STRING: bytes,
    Kind.LIST: deque,
    Kind.HASH: dict,
    Kind.SET: set,
    Kind.ZSET: _scores,
}
_TO_CONTENT: Mapping[Kind, Callable[[Any], Content]] = {
    Kind.STRING: bytes,
    Kind.LIST: tuple,
    Kind.HASH: dict,
    Kind.SET: frozenset,
    Kind.ZSET: dict,
}


@dataclass(slots=True)
class _Entry:
    kind: Kind
    content: Any
    expires_at: int | None = None


class _Keyspace:
    """The keys of one working memory: values of five kinds, each with an optional expiry.

    Executes commands as of `now`, in milliseconds since the epoch. Expired keys are gone.
    """

    def __init__(self, items: Sequence[Item] = ()) -> None:
        self._entries = {
            item.key: _Entry(item.kind, _FROM_CONTENT[item.kind](item.content), item.expires_at)
            for item in items
            if item.content or item.kind is Kind.STRING
        }

    def keys(self, now: int) -> list[str]:
        """The keys that exist at `now`, in insertion order."""
        self._remove_expired(list(self._entries), now)
        return list(self._entries)

    def items(self, now: int) -> tuple[Item, ...]:
        """A copy of every key and its value at `now`."""
        self._remove_expired(list(self._entries), now)
        return tuple(
            Item(key, entry.kind, _TO_CONTENT[entry.kind](entry.content), entry.expires_at)
            for key, entry in self._entries.items()
        )

    def execute(self, command: Command, now: int) -> Answer:
        """Execute one command, completely or not at all.

        Raises:
            MemoryRefused: wrong arguments, or wrong kind of value; names the key.
        """
        self._remove_expired([command.key], now)
        try:
            return self._execute(command, now)
        except CommandRefused as problem:
            raise MemoryRefused(
                f"memory key {command.key!r}: {command.name}: {problem}"
            ) from problem

    def _execute(self, command: Command, now: int) -> Answer:
        if found := COMMANDS.get(command.name):
            _check_arity(command, found.min_args, found.max_args)
            content = self._content(command.key, found.kind)
            answer = found.function(content, *command.args)
            if command.is_write:
                self._store(command.key, found.kind, content)
            return answer
        key, args = command.key, command.args
        _check_arity(command, *([1, 1] if command.name in _ONE_ARGUMENT else [0, 0]))
        match command.name:
            case "GET":
                return cast(bytes, self._content(key, Kind.STRING)) if self._exists(key) else None
            case "SET":
                self._entries[key] = _Entry(Kind.STRING, args[0])
                return OK
            case "INCRBY":
                number = add_int64(parse_int64(self._number(key)), parse_int64(args[0]))
                self._store(key, Kind.STRING, b"%d" % number)
                return number
            case "INCRBYFLOAT":
                text = add_long_doubles(self._number(key), args[0])
                self._store(key, Kind.STRING, text)
                return text
            case "TYPE":
                return self._entries[key].kind.encode() if self._exists(key) else b"none"
            case "DEL":
                return int(self._entries.pop(key, None) is not None)
            case "PTTL":
                return self._ttl(key, now)
            case "PEXPIRE":
                return self._expire_at(key, add_int64(now, parse_int64(args[0])))
            case "PERSIST":
                return self._persist(key)
            case _:
                raise CommandRefused("unknown command")

    def _exists(self, key: str) -> bool:
        return key in self._entries

    def _content(self, key: str, kind: Kind) -> Any:
        """The key's value, or an empty value that is not stored yet."""
        entry = self._entries.get(key)
        if entry is None:
            return _FROM_CONTENT[kind]()
        if entry.kind is not kind:
            raise CommandRefused(f"the key holds a {entry.kind}, not a {kind}")
        return entry.content

    def _number(self, key: str) -> bytes:
        content = self._content(key, Kind.STRING)
        return cast(bytes, content) if self._exists(key) else b"0"

    def _store(self, key: str, kind: Kind, content: Any) -> None:
        """Store `content` without changing the key's expiry.

        An empty collection deletes the key.
        """
        if not content and kind is not Kind.STRING:
            self._entries.pop(key, None)
        elif entry := self._entries.get(key):
            entry.content = content
        else:
            self._entries[key] = _Entry(kind, content)

    def _remove_expired(self, keys: Sequence[str], now: int) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.expires_at is not None and entry.expires_at <= now:
                del self._entries[key]

    def _ttl(self, key: str, now: int) -> int:
        if (entry := self._entries.get(key)) is None:
            return -2
        return -1 if entry.expires_at is None else entry.expires_at - now

    def _expire_at(self, key: str, instant: int) -> int:
        if (entry := self._entries.get(key)) is None:
            return 0
        entry.expires_at = instant
        return 1

    def _persist(self, key: str) -> int:
        entry = self._entries.get(key)
        if entry is None or entry.expires_at is None:
            return 0
        entry.expires_at = None
        return 1


def _check_arity(command: Command, min_args: float, max_args: float) -> None:
    if not min_args <= len(command.args) <= max_args:
        raise CommandRefused(f"it does not take {quantity(len(command.args), 'argument')}")


@dataclass(slots=True)
class _Memory:
    run_id: RunId
    fence: int
    version: int
    keys: _Keyspace


class InProcessWorkingMemory:
    """A `meshpoint.ports.working_memory.WorkingMemory` that is lost with the process.

    No method awaits anything, so each is atomic on the event loop. A memory never expires: its
    owner must call `forget` when the task may continue in another process.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._memories: dict[str, _Memory] = {}
        self._versions = count(1)  # shared, so that a recreated memory never reuses a version

    @property
    def durable(self) -> bool:
        """`False`: memories are lost with the process."""
        return False

    async def open(self) -> None:
        """Do nothing: there is no connection to check."""

    async def execute(
        self, owner: Owner, commands: Sequence[Command], *, expected_version: int = 0
    ) -> tuple[int, list[Answer]]:
        """Execute commands in order. Returns the memory's version and the answers.

        Raises:
            MemoryFenced: another run owns the memory, with the same or a higher fence.
            MemoryLost: the memory is missing, has an earlier owner, or is older than version
                `seen`.
            MemoryRefused: a command does not fit its key's value. Earlier commands were executed.
            MemoryUnavailable: commands write, and the memory is newer than version `seen`.
        """
        memory, now = self._require_owned(owner, expected_version), self._now_ms()
        if any(command.is_write for command in commands):
            _require_unchanged(owner, memory, expected_version or memory.version)
            memory.version = next(self._versions)
        return memory.version, [memory.keys.execute(command, now) for command in commands]

    async def keys(self, owner: Owner, *, expected_version: int = 0) -> list[str]:
        """The keys that exist, in no particular order. Raises like `execute`."""
        return self._require_owned(owner, expected_version).keys.keys(self._now_ms())

    async def read(self, agent_id: str) -> MemoryContents:
        """A copy of the whole memory."""
        memory, now = self._memories.get(agent_id), self._now_ms()
        if memory is None:
            return MemoryContents((), 0, now)
        return MemoryContents(
            memory.keys.items(now), memory.version, now, memory.run_id, memory.fence
        )

    async def adopt(self, owner: Owner, version: int) -> bool:
        """Become the owner of the memory if it still has this version. Returns whether it has.

        Raises:
            MemoryFenced: its owner has a higher fence.
        """
        memory = self._unless_fenced(owner)
        if memory is None or memory.version != version:
            return False
        memory.run_id, memory.fence = owner.run_id, owner.fence
        return True

    async def replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        *,
        expected_version: int | None = None,
        force: bool = False,
    ) -> MemoryContents:
        """Replace the whole memory with `items` and become its owner.

        Raises:
            MemoryFenced: its owner has a higher fence, and `force` is not set.
            MemoryUnavailable: this run owns the memory, but its version is not `seen`.
        """
        existing = self._memories.get(owner.agent_id) if force else self._unless_fenced(owner)
        if (
            existing is not None
            and existing.run_id == owner.run_id
            and expected_version is not None
        ):
            _require_unchanged(owner, existing, expected_version)
        version = next(self._versions)
        self._memories[owner.agent_id] = _Memory(
            owner.run_id, owner.fence, version, _Keyspace(items)
        )
        return await self.read(owner.agent_id)

    async def retain(self, owner: Owner, *, paused: bool) -> None:
        """Do nothing: memories never expire."""

    async def forget(self, owner: Owner) -> None:
        """Delete the memory, unless another run with the same or a higher fence owns it."""
        memory = self._memories.get(owner.agent_id)
        if memory is not None and (memory.run_id == owner.run_id or memory.fence < owner.fence):
            del self._memories[owner.agent_id]

    async def close(self) -> None:
        """Do nothing: memories are released with this object."""

    def _require_owned(self, owner: Owner, seen: int) -> _Memory:
        memory = self._memories.get(owner.agent_id)
        if memory is None or (memory.run_id != owner.run_id and memory.fence < owner.fence):
            raise MemoryLost(f"working memory {owner.agent_id}: its contents are missing")
        if memory.run_id != owner.run_id or memory.fence > owner.fence:
            raise _fenced_error(owner, memory)
        if memory.version < seen:
            raise MemoryLost(f"working memory {owner.agent_id}: it is older than last seen")
        return memory

    def _unless_fenced(self, owner: Owner) -> _Memory | None:
        memory = self._memories.get(owner.agent_id)
        if memory is not None and memory.fence > owner.fence:
            raise _fenced_error(owner, memory)
        return memory

    def _now_ms(self) -> int:
        return (self._clock.now() - _EPOCH) // _MILLISECOND


def _require_unchanged(owner: Owner, memory: _Memory, seen: int) -> None:
    if memory.version != seen:
        raise MemoryUnavailable(
            f"working memory {owner.agent_id}: it has changed since it was last read"
        )


def _fenced_error(owner: Owner, memory: _Memory) -> MemoryFenced:
    return MemoryFenced(
        f"working memory {owner.agent_id}: owned by run {memory.run_id} "
        f"with fence {memory.fence}, not by run {owner.run_id} with fence {owner.fence}"
    )
