"""`ctx.memory`: what an agent has in its hands while it works on a task, found again whoever goes on.

The facade types and checks; a `MemoryRunner` knows where the memory is, and restores it before it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from math import isnan
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from meshpoint.errors import MemoryRefused
from meshpoint.model.memory import Answer, Command
from meshpoint.model.typed import first_problem

T = TypeVar("T")

Value: TypeAlias = bytes | str
"""What goes in: bytes, or text, which is written as UTF-8. What comes out is bytes."""

MAX_KEY = 1024
"""Bytes of a key."""


class MemorySource(StrEnum):
    """Where a task's working memory was found when it was first used in a segment."""

    L1 = "l1"  # it was still there, and complete
    SNAPSHOT = "snapshot"  # the copy in the second place, which is Redis
    SQL = "sql"  # the copy in the checkpoint
    NONE = "none"  # there was nothing: a task that had none, or one that has lost it


@dataclass(frozen=True, slots=True)
class MemoryRecovery:
    """How a segment came by its working memory.

    `verified` says that it is, key by key, what the last checkpoint had. If not, `behind` says that it is what an
    earlier checkpoint had: what was put there since is lost. `problems` tell, one line each, what was found damaged
    on the way.
    """

    source: MemorySource
    keys: int = 0
    verified: bool = True
    behind: bool = False
    problems: tuple[str, ...] = ()


class MemoryRunner(Protocol):
    """Does an agent's commands on the working memory of its task."""

    @property
    def recovery(self) -> MemoryRecovery | None: ...

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Do commands together, in order; what each answered."""

    async def keys(self) -> list[str]:
        """The keys that are there."""


class AgentMemory:
    """An agent's working memory for one task: named values of five kinds, as in Redis, bytes in and bytes out.

        if (page := await ctx.memory.get("page:1")) is None:
            page = await fetch(1)
            await ctx.memory.set("page:1", page)

    - It belongs to this task and this agent; nobody else sees it. It is deleted when the task completes.
    - It is kept with every checkpoint. After a pause, a crash or a resume, in whichever replica, it is what it was at
      the last checkpoint (after a failure: what it was then), with the times that keys have of their own.
    - A function agent runs again through what it has done. A write that it does again there is not done twice: it
      gets the answer that it got. Reads there see the memory as it is now. A subtask that is recorded does not run.
    - Each method is one round trip at most, and does all or nothing.

    Every method raises `MemoryUnavailable` when the memory cannot be had now, and `MemoryRefused` for what it
    cannot keep. If the agent lets the first one pass, the task goes on from its last checkpoint in a while.
    """

    def __init__(self, runner: MemoryRunner) -> None:
        self._runner = runner

    @property
    def recovery(self) -> MemoryRecovery | None:
        """How this segment came by the memory; None: it was not used yet."""
        return self._runner.recovery

    # ── keys ───────────────────────────────────────────────────────────────────────────────────────

    async def keys(self, match: str = "*") -> list[str]:
        """The keys that match, sorted. `*`, `?` and `[abc]` as in file names."""
        return sorted(key for key in await self._runner.keys() if fnmatchcase(key, match))

    async def exists(self, key: str) -> bool:
        """Whether there is such a key."""
        return await self._do("TYPE", key) != b"none"

    async def delete(self, *keys: str) -> int:
        """Delete keys; how many were there."""
        return sum(cast(int, answer) for answer in await self._all([("DEL", key, ()) for key in keys]))

    async def expire(self, key: str, ttl: timedelta | None) -> bool:
        """Give a key a time of its own, or take it away; whether the key is there."""
        if ttl is None:
            there, _ = await self._all([("TYPE", key, ()), ("PERSIST", key, ())])
            return there != b"none"
        return await self._do("PEXPIRE", key, _milliseconds(key, ttl)) == 1

    async def ttl(self, key: str) -> timedelta | None:
        """What is left of a key's own time; None: it has none, or is not there."""
        left = cast(int, await self._do("PTTL", key))
        return None if left < 0 else timedelta(milliseconds=left)

    # ── values ─────────────────────────────────────────────────────────────────────────────────────

    async def get(self, key: str) -> bytes | None:
        """The value; None: there is none."""
        return cast(bytes | None, await self._do("GET", key))

    async def set(self, key: str, value: Value, *, ttl: timedelta | None = None) -> None:
        """Replace the value, of whichever kind it was. `ttl` is a time of its own, else it lives with the memory."""
        await self.set_many({key: value}, ttl=ttl)

    async def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those keys that are there, all of one instant."""
        keys = list(keys)
        values = await self._all([("GET", key, ()) for key in keys])
        return {key: cast(bytes, value) for key, value in zip(keys, values, strict=True) if value is not None}

    async def set_many(self, values: Mapping[str, Value], *, ttl: timedelta | None = None) -> None:
        """Replace several values at one instant."""
        commands: list[tuple[str, str, tuple[bytes, ...]]] = []
        for key, value in values.items():
            commands.append(("SET", key, (_bytes(key, value),)))
            if ttl is not None:
                commands.append(("PEXPIRE", key, (_milliseconds(key, ttl),)))
        await self._all(commands)

    async def get_model(self, key: str, type_: type[T]) -> T | None:
        """The value, read from JSON as `type_`, a pydantic model or another type that it knows; None: there is none.

        Raises:
            MemoryRefused: it does not fit; names the key and the place.
        """
        value = await self.get(key)
        try:
            return None if value is None else TypeAdapter(type_).validate_json(value)
        except ValidationError as error:
            name = getattr(type_, "__name__", str(type_))
            raise MemoryRefused(f"memory key {key!r} holds no {name}: {first_problem(error)}") from error

    async def set_model(self, key: str, value: object, *, ttl: timedelta | None = None) -> None:
        """Replace the value by the JSON of a pydantic model, or of anything that pydantic can write."""
        try:
            text = TypeAdapter(type(value)).dump_json(value)
        except ValueError as error:
            raise MemoryRefused(f"memory key {key!r}: {type(value).__name__} has no JSON form: {error}") from error
        await self.set(key, text, ttl=ttl)

    # ── counters ───────────────────────────────────────────────────────────────────────────────────

    async def incr(self, key: str, by: int = 1) -> int:
        """Add to a whole number, which begins at 0; what it is then."""
        return cast(int, await self._do("INCRBY", key, b"%d" % by))

    async def incr_float(self, key: str, by: float) -> float:
        """Add to a number, which begins at 0; what it is then."""
        return float(cast(bytes, await self._do("INCRBYFLOAT", key, _number(key, by))))

    # ── lists ──────────────────────────────────────────────────────────────────────────────────────

    async def rpush(self, key: str, *values: Value) -> int:
        """Append to a list; its length then."""
        return cast(int, await self._several("RPUSH", key, values))

    async def lpush(self, key: str, *values: Value) -> int:
        """Put each in front of a list; its length then."""
        return cast(int, await self._several("LPUSH", key, values))

    async def rpop(self, key: str) -> bytes | None:
        """Take the last element away; None: there is none."""
        return cast(bytes | None, await self._do("RPOP", key))

    async def lpop(self, key: str) -> bytes | None:
        """Take the first element away; None: there is none."""
        return cast(bytes | None, await self._do("LPOP", key))

    async def lrange(self, key: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """Elements from `start` to `stop`, both included; negative ones count from the end."""
        return cast(list[bytes], await self._do("LRANGE", key, b"%d" % start, b"%d" % stop))

    async def ltrim(self, key: str, start: int, stop: int) -> None:
        """Keep what `lrange` would give."""
        await self._do("LTRIM", key, b"%d" % start, b"%d" % stop)

    async def lindex(self, key: str, index: int) -> bytes | None:
        """One element; None: there is none."""
        return cast(bytes | None, await self._do("LINDEX", key, b"%d" % index))

    async def llen(self, key: str) -> int:
        """The length of a list."""
        return cast(int, await self._do("LLEN", key))

    # ── hashes ─────────────────────────────────────────────────────────────────────────────────────

    async def hset(self, key: str, fields: Mapping[Value, Value]) -> int:
        """Set fields; how many are new."""
        pairs = [part for field, value in fields.items() for part in (field, value)]
        return cast(int, await self._several("HSET", key, pairs))

    async def hget(self, key: str, field: Value) -> bytes | None:
        """One field; None: there is none."""
        return cast(bytes | None, await self._do("HGET", key, _bytes(key, field)))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        """All fields."""
        return _pairs(await self._do("HGETALL", key))

    async def hdel(self, key: str, *fields: Value) -> int:
        """Delete fields; how many were there."""
        return cast(int, await self._several("HDEL", key, fields))

    async def hincrby(self, key: str, field: Value, by: int = 1) -> int:
        """Add to the whole number in a field, which begins at 0; what it is then."""
        return cast(int, await self._do("HINCRBY", key, _bytes(key, field), b"%d" % by))

    async def hexists(self, key: str, field: Value) -> bool:
        """Whether there is such a field."""
        return await self._do("HEXISTS", key, _bytes(key, field)) == 1

    async def hlen(self, key: str) -> int:
        """How many fields there are."""
        return cast(int, await self._do("HLEN", key))

    # ── sets ───────────────────────────────────────────────────────────────────────────────────────

    async def sadd(self, key: str, *members: Value) -> int:
        """Add members; how many are new."""
        return cast(int, await self._several("SADD", key, members))

    async def srem(self, key: str, *members: Value) -> int:
        """Take members away; how many were there."""
        return cast(int, await self._several("SREM", key, members))

    async def smembers(self, key: str) -> frozenset[bytes]:
        """All members."""
        return frozenset(cast(list[bytes], await self._do("SMEMBERS", key)))

    async def sismember(self, key: str, member: Value) -> bool:
        """Whether it is a member."""
        return await self._do("SISMEMBER", key, _bytes(key, member)) == 1

    async def scard(self, key: str) -> int:
        """How many members there are."""
        return cast(int, await self._do("SCARD", key))

    # ── sorted sets ────────────────────────────────────────────────────────────────────────────────

    async def zadd(self, key: str, scores: Mapping[Value, float]) -> int:
        """Set the scores of members; how many members are new."""
        pairs = [part for member, score in scores.items() for part in (_number(key, score), member)]
        return cast(int, await self._several("ZADD", key, pairs))

    async def zrem(self, key: str, *members: Value) -> int:
        """Take members away; how many were there."""
        return cast(int, await self._several("ZREM", key, members))

    async def zincrby(self, key: str, member: Value, by: float) -> float:
        """Add to a member's score, which begins at 0; what it is then."""
        return float(cast(bytes, await self._do("ZINCRBY", key, _number(key, by), _bytes(key, member))))

    async def zscore(self, key: str, member: Value) -> float | None:
        """A member's score; None: it is none."""
        score = cast(bytes | None, await self._do("ZSCORE", key, _bytes(key, member)))
        return None if score is None else float(score)

    async def zrange(self, key: str, start: int = 0, stop: int = -1) -> list[tuple[bytes, float]]:
        """Members with their scores by rank from `start` to `stop`, both included, the lowest score first."""
        return _scored(await self._do("ZRANGE", key, b"%d" % start, b"%d" % stop, b"WITHSCORES"))

    async def zrangebyscore(self, key: str, low: float, high: float) -> list[tuple[bytes, float]]:
        """Members with scores from `low` to `high`, both included, the lowest first."""
        bounds = (_number(key, low), _number(key, high))
        return _scored(await self._do("ZRANGEBYSCORE", key, *bounds, b"WITHSCORES"))

    async def zcard(self, key: str) -> int:
        """How many members there are."""
        return cast(int, await self._do("ZCARD", key))

    # ── below ──────────────────────────────────────────────────────────────────────────────────────

    async def _several(self, name: str, key: str, values: Iterable[Value]) -> Answer:
        args = [_bytes(key, value) for value in values]
        if not args:
            raise MemoryRefused(f"memory key {key!r}: {name} needs a value")
        return await self._do(name, key, *args)

    async def _do(self, name: str, key: str, *args: bytes) -> Answer:
        [answer] = await self._all([(name, key, args)])
        return answer

    async def _all(self, commands: Sequence[tuple[str, str, tuple[bytes, ...]]]) -> list[Answer]:
        if not commands:
            return []
        return await self._runner.execute([Command(name, _key(key), args) for name, key, args in commands])


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise MemoryRefused(f"a memory key is text, not {type(key).__name__}: {key!r}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= MAX_KEY:
        raise MemoryRefused(f"memory key {key[:40]!r}: use text of 1 to {MAX_KEY} bytes")
    return key


def _bytes(key: str, value: Any) -> bytes:
    match value:
        case bytes():
            return value
        case str():
            return value.encode()
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            kind = type(value).__name__
            raise MemoryRefused(f"memory key {key!r}: bytes or text, not {kind}; for models there is set_model")


def _number(key: str, value: float) -> bytes:
    if isnan(value):
        raise MemoryRefused(f"memory key {key!r}: not-a-number has no place in an order")
    return repr(float(value)).encode()


def _milliseconds(key: str, ttl: timedelta) -> bytes:
    left = ttl // timedelta(milliseconds=1)
    if left <= 0:
        raise MemoryRefused(f"memory key {key!r}: a time to live of {ttl} is over already; use delete")
    return b"%d" % left


def _pairs(answer: Answer) -> dict[bytes, bytes]:
    flat = iter(cast(list[bytes], answer))
    return dict(zip(flat, flat, strict=True))


def _scored(answer: Answer) -> list[tuple[bytes, float]]:
    flat = iter(cast(list[bytes], answer))
    return [(member, float(score)) for member, score in zip(flat, flat, strict=True)]
