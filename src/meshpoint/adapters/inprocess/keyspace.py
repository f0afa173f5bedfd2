"""The keys of one working memory: Redis values of five kinds, each with an optional expiry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from meshpoint.adapters.inprocess.redis_collections import COMMANDS, OK
from meshpoint.adapters.inprocess.redis_numbers import (
    CommandRefused,
    add_int64,
    add_long_doubles,
    normalize_zero,
    parse_int64,
)
from meshpoint.errors import MemoryRefused
from meshpoint.model.memory import Answer, Command, Content, Item, Kind


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


class Keyspace:
    """Executes commands as of `now`, in milliseconds since the epoch. Expired keys are gone."""

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
            raise MemoryRefused(f"memory key {command.key!r}: {command.name}: {problem}") from problem

    def _execute(self, command: Command, now: int) -> Answer:
        if found := COMMANDS.get(command.name):
            _check_arity(command, found.min_args, found.max_args)
            content = self._content(command.key, found.kind)
            answer = found.function(content, *command.args)
            if command.writes:
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


_ONE_ARGUMENT = frozenset({"SET", "INCRBY", "INCRBYFLOAT", "PEXPIRE"})


def _check_arity(command: Command, min_args: float, max_args: float) -> None:
    if not min_args <= len(command.args) <= max_args:
        raise CommandRefused(f"it does not take {len(command.args)} arguments")
