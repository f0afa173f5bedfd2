"""`ctx.memory`: what an agent has in its hands while it works on a task, found again whoever goes on.

The facade types and checks; a `MemoryRunner` knows where the memory is, and restores it before it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar, cast

from pydantic_core import from_json, to_json

from meshpoint.errors import ConfigurationError, MemoryRefused
from meshpoint.model.memory import Answer, Command
from meshpoint.model.memory_input import (
    Value,
    checked_key,
    kind_of,
    milliseconds,
    named,
    number_bytes,
    pairs_of,
    refused,
    value_bytes,
    whole_bytes,
)
from meshpoint.model.typed import DoesNotFit, Typed

T = TypeVar("T")


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

    async def clear(self) -> None:
        """Begin anew with an empty memory, whatever was there."""


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
        if not isinstance(match, str):
            raise MemoryRefused(f"a pattern of memory keys is text, not {kind_of(match)}")
        return sorted(key for key in await self._runner.keys() if fnmatchcase(key, match))

    async def clear(self) -> None:
        """Delete all keys at one instant.

        Also what there is left to do after a `ConsistencyError`: the task goes on with an empty memory.
        """
        await self._runner.clear()

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
        return await self._do("PEXPIRE", key, milliseconds(key, ttl)) == 1

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
        if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):  # a text has characters, not keys
            raise MemoryRefused(f"memory keys: several keys, not {kind_of(keys)}; for one there is get")
        keys = list(keys)
        values = await self._all([("GET", key, ()) for key in keys])
        return {key: cast(bytes, value) for key, value in zip(keys, values, strict=True) if value is not None}

    async def set_many(self, values: Mapping[str, Value], *, ttl: timedelta | None = None) -> None:
        """Replace several values at one instant."""
        commands: list[tuple[str, str, tuple[bytes, ...]]] = []
        for key, value in pairs_of("memory values", values):
            commands.append(("SET", key, (value_bytes(key, value),)))
            if ttl is not None:
                commands.append(("PEXPIRE", key, (milliseconds(key, ttl),)))
        await self._all(commands)

    async def get_model(self, key: str, type_: type[T]) -> T | None:
        """The value, read from JSON as `type_`, a pydantic model or another type that it knows; None: there is none.

        Raises:
            MemoryRefused: it does not fit; names the key and the place.
        """
        model = _typed(key, type_)
        value = await self.get(key)
        try:
            return None if value is None else cast(T, model.read(from_json(value, allow_inf_nan=False)))
        except DoesNotFit as error:
            raise refused(key, f"it holds no {error}") from error
        except ValueError as error:
            raise refused(key, f"it holds no JSON: {error}") from error

    async def set_model(self, key: str, value: object, *, ttl: timedelta | None = None) -> None:
        """Replace the value by the JSON of a pydantic model, or of anything that pydantic can write.

        Raises:
            MemoryRefused: it holds something that is not JSON, such as not-a-number, or bytes that are no UTF-8;
                names the key.
        """
        try:
            text = to_json(_typed(key, type(value)).write(value, round_trip=True))
        except DoesNotFit as error:
            raise refused(key, str(error)) from error
        except UnicodeDecodeError as error:
            problem = f"{kind_of(value)} holds bytes that are no UTF-8; keep bytes with set, or write them as base64"
            raise refused(key, problem) from error
        await self.set(key, text, ttl=ttl)

    # ── counters ───────────────────────────────────────────────────────────────────────────────────

    async def incr(self, key: str, by: int = 1) -> int:
        """Add to a whole number, which begins at 0; what it is then."""
        return cast(int, await self._do("INCRBY", key, whole_bytes(key, by)))

    async def incr_float(self, key: str, by: float) -> float:
        """Add to a number, which begins at 0; what it is then."""
        return float(cast(bytes, await self._do("INCRBYFLOAT", key, number_bytes(key, by))))

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
        return cast(list[bytes], await self._do("LRANGE", key, whole_bytes(key, start), whole_bytes(key, stop)))

    async def ltrim(self, key: str, start: int, stop: int) -> None:
        """Keep what `lrange` would give."""
        await self._do("LTRIM", key, whole_bytes(key, start), whole_bytes(key, stop))

    async def lindex(self, key: str, index: int) -> bytes | None:
        """One element; None: there is none."""
        return cast(bytes | None, await self._do("LINDEX", key, whole_bytes(key, index)))

    async def llen(self, key: str) -> int:
        """The length of a list."""
        return cast(int, await self._do("LLEN", key))

    # ── hashes ─────────────────────────────────────────────────────────────────────────────────────

    async def hset(self, key: str, fields: Mapping[Value, Value]) -> int:
        """Set fields; how many are new."""
        pairs = [part for pair in pairs_of(named(key), fields) for part in pair]
        return cast(int, await self._several("HSET", key, pairs))

    async def hget(self, key: str, field: Value) -> bytes | None:
        """One field; None: there is none."""
        return cast(bytes | None, await self._do("HGET", key, value_bytes(key, field)))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        """All fields."""
        return _pairs(await self._do("HGETALL", key))

    async def hdel(self, key: str, *fields: Value) -> int:
        """Delete fields; how many were there."""
        return cast(int, await self._several("HDEL", key, fields))

    async def hincrby(self, key: str, field: Value, by: int = 1) -> int:
        """Add to the whole number in a field, which begins at 0; what it is then."""
        return cast(int, await self._do("HINCRBY", key, value_bytes(key, field), whole_bytes(key, by)))

    async def hexists(self, key: str, field: Value) -> bool:
        """Whether there is such a field."""
        return await self._do("HEXISTS", key, value_bytes(key, field)) == 1

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
        return await self._do("SISMEMBER", key, value_bytes(key, member)) == 1

    async def scard(self, key: str) -> int:
        """How many members there are."""
        return cast(int, await self._do("SCARD", key))

    # ── sorted sets ────────────────────────────────────────────────────────────────────────────────

    async def zadd(self, key: str, scores: Mapping[Value, float]) -> int:
        """Set the scores of members; how many members are new."""
        pairs = [
            part for member, score in pairs_of(named(key), scores) for part in (number_bytes(key, score), member)
        ]
        return cast(int, await self._several("ZADD", key, pairs))

    async def zrem(self, key: str, *members: Value) -> int:
        """Take members away; how many were there."""
        return cast(int, await self._several("ZREM", key, members))

    async def zincrby(self, key: str, member: Value, by: float) -> float:
        """Add to a member's score, which begins at 0; what it is then."""
        return float(cast(bytes, await self._do("ZINCRBY", key, number_bytes(key, by), value_bytes(key, member))))

    async def zscore(self, key: str, member: Value) -> float | None:
        """A member's score; None: it is none."""
        score = cast(bytes | None, await self._do("ZSCORE", key, value_bytes(key, member)))
        return None if score is None else float(score)

    async def zrange(self, key: str, start: int = 0, stop: int = -1) -> list[tuple[bytes, float]]:
        """Members with their scores by rank from `start` to `stop`, both included, the lowest score first."""
        return _scored(await self._do("ZRANGE", key, whole_bytes(key, start), whole_bytes(key, stop), b"WITHSCORES"))

    async def zrangebyscore(self, key: str, low: float, high: float) -> list[tuple[bytes, float]]:
        """Members with scores from `low` to `high`, both included, the lowest first."""
        bounds = (number_bytes(key, low), number_bytes(key, high))
        return _scored(await self._do("ZRANGEBYSCORE", key, *bounds, b"WITHSCORES"))

    async def zcard(self, key: str) -> int:
        """How many members there are."""
        return cast(int, await self._do("ZCARD", key))

    # ── below ──────────────────────────────────────────────────────────────────────────────────────

    async def _several(self, name: str, key: str, values: Iterable[Value]) -> Answer:
        args = [value_bytes(key, value) for value in values]
        if not args:
            raise refused(key, f"{name} needs a value")
        return await self._do(name, key, *args)

    async def _do(self, name: str, key: str, *args: bytes) -> Answer:
        [answer] = await self._all([(name, key, args)])
        return answer

    async def _all(self, commands: Sequence[tuple[str, str, tuple[bytes, ...]]]) -> list[Answer]:
        if not commands:
            return []
        return await self._runner.execute([Command(name, checked_key(key), args) for name, key, args in commands])


def _typed(key: str, declared: Any) -> Typed[Any]:
    try:
        return Typed(declared, named(key))
    except ConfigurationError as error:
        # What pydantic says of it is long, and the cause tells it.
        name = getattr(declared, "__name__", str(declared))
        raise refused(key, f"{name} cannot become JSON; {error.fix}") from error


def _pairs(answer: Answer) -> dict[bytes, bytes]:
    flat = iter(cast(list[bytes], answer))
    return dict(zip(flat, flat, strict=True))


def _scored(answer: Answer) -> list[tuple[bytes, float]]:
    flat = iter(cast(list[bytes], answer))
    return [(member, float(score)) for member, score in zip(flat, flat, strict=True)]
