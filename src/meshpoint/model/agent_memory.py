"""`ctx.memory`: an agent's working memory for one task, in every replica that resumes it.

The facade checks arguments and converts types. A `MemoryRunner` locates the memory and restores it
before its first use.
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
    """Where a task's working memory was found when a segment first used it."""

    L1 = "l1"  # still there and complete
    SNAPSHOT = "snapshot"  # the snapshot in Redis
    SQL = "sql"  # the snapshot in the checkpoint
    NONE = "none"  # no memory found: the task never had one, or it is lost


@dataclass(frozen=True, slots=True)
class MemoryRecovery:
    """How a segment obtained its working memory.

    Attributes:
        source: where it was found.
        keys: number of keys.
        verified: whether every key matches the last checkpoint.
        behind: whether it matches an earlier checkpoint instead, so that later writes are lost.
        problems: one line for each piece of damage found during recovery.
    """

    source: MemorySource
    keys: int = 0
    verified: bool = True
    behind: bool = False
    problems: tuple[str, ...] = ()


class MemoryRunner(Protocol):
    """Executes an agent's commands on the working memory of its task."""

    @property
    def recovery(self) -> MemoryRecovery | None: ...

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands atomically and in order; return their answers."""

    async def keys(self) -> list[str]:
        """The existing keys."""

    async def clear(self) -> None:
        """Replace the memory with an empty one, even if it is damaged."""


class AgentMemory:
    """An agent's working memory for one task: named values of the five Redis kinds.

        if (page := await ctx.memory.get("page:1")) is None:
            page = await fetch(1)
            await ctx.memory.set("page:1", page)

    - Values go in as bytes or text and come out as bytes.
    - It belongs to this task and this agent; no other code can read it. It is deleted when the
      task completes.
    - It is saved with every checkpoint. After a pause, crash, failure or resume, in any replica,
      it has the contents of the last checkpoint, including the remaining time to live of its keys.
    - When a function agent replays, a write that was done before is not done again: it returns its
      first answer. Reads see the current memory. A recorded subtask does not run.
    - Each method takes at most one round trip and is atomic.

    Every method raises `MemoryUnavailable` if the memory cannot be reached and `MemoryRefused` for
    input that it cannot store. If the agent lets `MemoryUnavailable` propagate, the task resumes
    from its last checkpoint later.
    """

    def __init__(self, runner: MemoryRunner) -> None:
        self._runner = runner

    @property
    def recovery(self) -> MemoryRecovery | None:
        """How this segment obtained the memory, or `None` before its first use."""
        return self._runner.recovery

    async def keys(self, match: str = "*") -> list[str]:
        """The keys that match, sorted. `*`, `?` and `[abc]` work as in file names."""
        if not isinstance(match, str):
            raise MemoryRefused(f"a pattern for memory keys must be str, not {kind_of(match)}")
        return sorted(key for key in await self._runner.keys() if fnmatchcase(key, match))

    async def clear(self) -> None:
        """Delete all keys atomically.

        Also works after a `ConsistencyError`, so that the task can continue with an empty memory.
        """
        await self._runner.clear()

    async def exists(self, key: str) -> bool:
        """Whether the key exists."""
        return await self._do("TYPE", key) != b"none"

    async def delete(self, *keys: str) -> int:
        """Delete keys; return how many of them existed."""
        return sum(cast(int, answer) for answer in await self._all([("DEL", key, ()) for key in keys]))

    async def expire(self, key: str, ttl: timedelta | None) -> bool:
        """Set a key's time to live, or remove it with `None`. Returns whether the key exists."""
        if ttl is None:
            there, _ = await self._all([("TYPE", key, ()), ("PERSIST", key, ())])
            return there != b"none"
        return await self._do("PEXPIRE", key, milliseconds(key, ttl)) == 1

    async def ttl(self, key: str) -> timedelta | None:
        """A key's remaining time to live, or `None` without a time to live or key."""
        left = cast(int, await self._do("PTTL", key))
        return None if left < 0 else timedelta(milliseconds=left)

    async def get(self, key: str) -> bytes | None:
        """The value of a string key, or `None` if the key does not exist."""
        return cast(bytes | None, await self._do("GET", key))

    async def set(self, key: str, value: Value, *, ttl: timedelta | None = None) -> None:
        """Replace the value of any kind. Without `ttl`, the key lives as long as the memory."""
        await self.set_many({key: value}, ttl=ttl)

    async def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """A consistent read of several values. Missing keys are omitted."""
        if isinstance(keys, str | bytes) or not isinstance(
            keys, Iterable
        ):  # iterating over str would yield characters
            raise MemoryRefused(f"memory keys: expected several keys, not {kind_of(keys)}; use get for one key")
        keys = list(keys)
        values = await self._all([("GET", key, ()) for key in keys])
        return {key: cast(bytes, value) for key, value in zip(keys, values, strict=True) if value is not None}

    async def set_many(self, values: Mapping[str, Value], *, ttl: timedelta | None = None) -> None:
        """Replace several values atomically."""
        commands: list[tuple[str, str, tuple[bytes, ...]]] = []
        for key, value in pairs_of("memory values", values):
            commands.append(("SET", key, (value_bytes(key, value),)))
            if ttl is not None:
                commands.append(("PEXPIRE", key, (milliseconds(key, ttl),)))
        await self._all(commands)

    async def get_model(self, key: str, type_: type[T]) -> T | None:
        """The value, parsed from JSON as `type_`, or `None` if the key does not exist.

        Args:
            key: the key to read.
            type_: a pydantic model or any type that pydantic can validate.

        Raises:
            MemoryRefused: the value does not match the type; the message names the key and the
                field.
        """
        model = _typed(key, type_)
        value = await self.get(key)
        try:
            return None if value is None else cast(T, model.read(from_json(value, allow_inf_nan=False)))
        except DoesNotFit as error:
            raise refused(key, f"its value is not a valid {error}") from error
        except ValueError as error:
            raise refused(key, f"its value is not JSON: {error}") from error

    async def set_model(self, key: str, value: object, *, ttl: timedelta | None = None) -> None:
        """Replace the value with the JSON form of a pydantic model or other serializable value.

        Raises:
            MemoryRefused: the value contains something that JSON cannot represent, such as NaN, or
                bytes that are not UTF-8; the message names the key.
        """
        try:
            text = to_json(_typed(key, type(value)).write(value, round_trip=True))
        except DoesNotFit as error:
            raise refused(key, str(error)) from error
        except UnicodeDecodeError as error:
            problem = f"{kind_of(value)} contains bytes that are not UTF-8; store them with set, or as base64"
            raise refused(key, problem) from error
        await self.set(key, text, ttl=ttl)

    async def incr(self, key: str, by: int = 1) -> int:
        """Add to an integer, initially 0, and return the result."""
        return cast(int, await self._do("INCRBY", key, whole_bytes(key, by)))

    async def incr_float(self, key: str, by: float) -> float:
        """Add to a number, initially 0, and return the result."""
        return float(cast(bytes, await self._do("INCRBYFLOAT", key, number_bytes(key, by))))

    async def rpush(self, key: str, *values: Value) -> int:
        """Append values to a list; return its new length."""
        return cast(int, await self._several("RPUSH", key, values))

    async def lpush(self, key: str, *values: Value) -> int:
        """Prepend values to a list one after the other; return its new length."""
        return cast(int, await self._several("LPUSH", key, values))

    async def rpop(self, key: str) -> bytes | None:
        """Remove and return the last element, or `None` if the list is empty."""
        return cast(bytes | None, await self._do("RPOP", key))

    async def lpop(self, key: str) -> bytes | None:
        """Remove and return the first element, or `None` if the list is empty."""
        return cast(bytes | None, await self._do("LPOP", key))

    async def lrange(self, key: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """Elements from `start` to `stop`, inclusive. Negative indexes count from the end."""
        return cast(list[bytes], await self._do("LRANGE", key, whole_bytes(key, start), whole_bytes(key, stop)))

    async def ltrim(self, key: str, start: int, stop: int) -> None:
        """Keep only the elements that `lrange` would return."""
        await self._do("LTRIM", key, whole_bytes(key, start), whole_bytes(key, stop))

    async def lindex(self, key: str, index: int) -> bytes | None:
        """The element at `index`, or `None` if out of range."""
        return cast(bytes | None, await self._do("LINDEX", key, whole_bytes(key, index)))

    async def llen(self, key: str) -> int:
        """The length of a list, 0 if the key does not exist."""
        return cast(int, await self._do("LLEN", key))

    async def hset(self, key: str, fields: Mapping[Value, Value]) -> int:
        """Set fields of a hash; return how many are new."""
        pairs = [part for pair in pairs_of(named(key), fields) for part in pair]
        return cast(int, await self._several("HSET", key, pairs))

    async def hget(self, key: str, field: Value) -> bytes | None:
        """The value of one field, or `None` if it does not exist."""
        return cast(bytes | None, await self._do("HGET", key, value_bytes(key, field)))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        """All fields and values of a hash."""
        return _pairs(await self._do("HGETALL", key))

    async def hdel(self, key: str, *fields: Value) -> int:
        """Delete fields; return how many of them existed."""
        return cast(int, await self._several("HDEL", key, fields))

    async def hincrby(self, key: str, field: Value, by: int = 1) -> int:
        """Add to the integer in a field, initially 0, and return the result."""
        return cast(int, await self._do("HINCRBY", key, value_bytes(key, field), whole_bytes(key, by)))

    async def hexists(self, key: str, field: Value) -> bool:
        """Whether the field exists."""
        return await self._do("HEXISTS", key, value_bytes(key, field)) == 1

    async def hlen(self, key: str) -> int:
        """The number of fields."""
        return cast(int, await self._do("HLEN", key))

    async def sadd(self, key: str, *members: Value) -> int:
        """Add members to a set; return how many are new."""
        return cast(int, await self._several("SADD", key, members))

    async def srem(self, key: str, *members: Value) -> int:
        """Remove members; return how many of them existed."""
        return cast(int, await self._several("SREM", key, members))

    async def smembers(self, key: str) -> frozenset[bytes]:
        """All members of a set."""
        return frozenset(cast(list[bytes], await self._do("SMEMBERS", key)))

    async def sismember(self, key: str, member: Value) -> bool:
        """Whether `member` is in the set."""
        return await self._do("SISMEMBER", key, value_bytes(key, member)) == 1

    async def scard(self, key: str) -> int:
        """The number of members."""
        return cast(int, await self._do("SCARD", key))

    async def zadd(self, key: str, scores: Mapping[Value, float]) -> int:
        """Set the scores of members; return how many members are new."""
        pairs = [
            part for member, score in pairs_of(named(key), scores) for part in (number_bytes(key, score), member)
        ]
        return cast(int, await self._several("ZADD", key, pairs))

    async def zrem(self, key: str, *members: Value) -> int:
        """Remove members; return how many of them existed."""
        return cast(int, await self._several("ZREM", key, members))

    async def zincrby(self, key: str, member: Value, by: float) -> float:
        """Add to a member's score, initially 0, and return the result."""
        return float(cast(bytes, await self._do("ZINCRBY", key, number_bytes(key, by), value_bytes(key, member))))

    async def zscore(self, key: str, member: Value) -> float | None:
        """A member's score, or `None` if it is not in the set."""
        score = cast(bytes | None, await self._do("ZSCORE", key, value_bytes(key, member)))
        return None if score is None else float(score)

    async def zrange(self, key: str, start: int = 0, stop: int = -1) -> list[tuple[bytes, float]]:
        """Members and scores by rank from `start` to `stop`, inclusive, lowest score first."""
        return _scored(await self._do("ZRANGE", key, whole_bytes(key, start), whole_bytes(key, stop), b"WITHSCORES"))

    async def zrangebyscore(self, key: str, low: float, high: float) -> list[tuple[bytes, float]]:
        """Members with scores from `low` to `high`, inclusive, lowest score first."""
        bounds = (number_bytes(key, low), number_bytes(key, high))
        return _scored(await self._do("ZRANGEBYSCORE", key, *bounds, b"WITHSCORES"))

    async def zcard(self, key: str) -> int:
        """The number of members."""
        return cast(int, await self._do("ZCARD", key))

    async def _several(self, name: str, key: str, values: Iterable[Value]) -> Answer:
        args = [value_bytes(key, value) for value in values]
        if not args:
            raise refused(key, f"{name} needs at least one value")
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
        # pydantic's message is long, and it is available as the cause.
        name = getattr(declared, "__name__", str(declared))
        raise refused(key, f"{name} cannot become JSON; {error.fix}") from error


def _pairs(answer: Answer) -> dict[bytes, bytes]:
    flat = iter(cast(list[bytes], answer))
    return dict(zip(flat, flat, strict=True))


def _scored(answer: Answer) -> list[tuple[bytes, float]]:
    flat = iter(cast(list[bytes], answer))
    return [(member, float(score)) for member, score in zip(flat, flat, strict=True)]
