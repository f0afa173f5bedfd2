"""`ctx.memory`: an agent's working memory for one task, in every replica that resumes it.

The facade checks arguments and converts types. A `MemoryRunner` locates the memory and restores it
before its first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from math import isnan
from typing import Any, TypeAlias, TypeVar, cast

from pydantic_core import from_json, to_json

from meshpoint.errors import AgentMisbehaved, ConfigurationError, MemoryRefused
from meshpoint.model.context_runtime import ContextRuntime, MemoryRunner
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.memory import Answer, Command, MemoryRecovery

_T = TypeVar("_T")

Value: TypeAlias = bytes | str
"""Input value: bytes, or text that is stored as UTF-8. Values are always read as bytes."""

_MAX_KEY_BYTES = 1024


class MemoryMixin:
    """The part of a context that has a working memory."""

    _runtime: ContextRuntime

    @property
    def memory(self) -> AgentMemory:
        """The agent's working memory for this task, available wherever the task resumes.

        It is restored on first use in a segment, so an agent that does not use it pays nothing.
        """
        return AgentMemory(self._runtime)


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

    def __init__(self, runtime: ContextRuntime) -> None:
        self._runtime = runtime

    @property
    def recovery(self) -> MemoryRecovery | None:
        """How this segment obtained the memory, or `None` before its first use."""
        memory = self._runtime.memory
        return None if memory is None else memory.recovery

    async def keys(self, match: str = "*") -> list[str]:
        """The keys that match, sorted. `*`, `?` and `[abc]` work as in file names."""
        if not isinstance(match, str):
            raise MemoryRefused(f"a pattern for memory keys must be str, not {_type_name(match)}")
        return sorted(key for key in await self._runner.keys() if fnmatchcase(key, match))

    async def clear(self) -> None:
        """Delete all keys atomically.

        Also works after a `ConsistencyError`, so that the task can continue with an empty memory.
        """
        await self._runner.clear()

    async def exists(self, key: str) -> bool:
        """Whether the key exists."""
        return await self._execute_one("TYPE", key) != b"none"

    async def delete(self, *keys: str) -> int:
        """Delete keys; return how many of them existed."""
        return sum(
            cast(int, answer) for answer in await self._execute([("DEL", key, ()) for key in keys])
        )

    async def expire(self, key: str, ttl: timedelta | None) -> bool:
        """Set a key's time to live, or remove it with `None`. Returns whether the key exists."""
        if ttl is None:
            kind, _ = await self._execute([("TYPE", key, ()), ("PERSIST", key, ())])
            return kind != b"none"
        return await self._integer("PEXPIRE", key, _encode_ttl(key, ttl)) == 1

    async def ttl(self, key: str) -> timedelta | None:
        """A key's remaining time to live, or `None` without a time to live or key."""
        remaining_ms = await self._integer("PTTL", key)
        return None if remaining_ms < 0 else timedelta(milliseconds=remaining_ms)

    async def get(self, key: str) -> bytes | None:
        """The value of a string key, or `None` if the key does not exist."""
        return await self._optional("GET", key)

    async def set(self, key: str, value: Value, *, ttl: timedelta | None = None) -> None:
        """Replace the value of any kind. Without `ttl`, the key lives as long as the memory."""
        await self._execute(_set_commands(key, value, ttl))

    async def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """A consistent read of several values. Missing keys are omitted."""
        if isinstance(keys, str | bytes) or not isinstance(
            keys, Iterable
        ):  # iterating over str would yield characters
            raise MemoryRefused(
                f"memory keys: expected several keys, not {_type_name(keys)}; use get for one key"
            )
        keys = list(keys)
        values = await self._execute([("GET", key, ()) for key in keys])
        return {
            key: cast(bytes, value)
            for key, value in zip(keys, values, strict=True)
            if value is not None
        }

    async def set_many(self, values: Mapping[str, Value], *, ttl: timedelta | None = None) -> None:
        """Replace several values atomically."""
        items = _items_of("memory values", values)
        await self._execute(
            [each for key, value in items for each in _set_commands(key, value, ttl)]
        )

    async def get_model(self, key: str, type_: type[_T]) -> _T | None:
        """The value, parsed from JSON as `type_`, or `None` if the key does not exist.

        Args:
            key: the key to read.
            type_: a pydantic model or any type that pydantic can validate.

        Raises:
            MemoryRefused: the value does not match the type; the message names the key and the
                field.
        """
        typed = _typed_for_key(key, type_)
        value = await self.get(key)
        try:
            return (
                None
                if value is None
                else cast(_T, typed.read(from_json(value, allow_inf_nan=False)))
            )
        except TypeMismatch as error:
            raise _refusal(key, f"its value is not a valid {error}") from error
        except ValueError as error:
            raise _refusal(key, f"its value is not JSON: {error}") from error

    async def set_model(self, key: str, value: object, *, ttl: timedelta | None = None) -> None:
        """Replace the value with the JSON form of a pydantic model or other serializable value.

        Raises:
            MemoryRefused: the value contains something that JSON cannot represent, such as NaN, or
                bytes that are not UTF-8; the message names the key.
        """
        try:
            encoded = to_json(_typed_for_key(key, type(value)).write(value, round_trip=True))
        except TypeMismatch as error:
            problem = str(error)
            if isinstance(error.__cause__, UnicodeDecodeError):
                problem = (
                    f"{_type_name(value)} contains bytes that are not UTF-8; "
                    "store them with set, or as base64"
                )
            raise _refusal(key, problem) from error
        await self.set(key, encoded, ttl=ttl)

    async def incr(self, key: str, by: int = 1) -> int:
        """Add to an integer, initially 0, and return the result."""
        return await self._integer("INCRBY", key, _encode_integer(key, by))

    async def incr_float(self, key: str, by: float) -> float:
        """Add to a number, initially 0, and return the result."""
        return await self._float("INCRBYFLOAT", key, _encode_number(key, by))

    async def rpush(self, key: str, *values: Value) -> int:
        """Append values to a list; return its new length."""
        return await self._change_values("RPUSH", key, values)

    async def lpush(self, key: str, *values: Value) -> int:
        """Prepend values to a list one after the other; return its new length."""
        return await self._change_values("LPUSH", key, values)

    async def rpop(self, key: str) -> bytes | None:
        """Remove and return the last element, or `None` if the list is empty."""
        return await self._optional("RPOP", key)

    async def lpop(self, key: str) -> bytes | None:
        """Remove and return the first element, or `None` if the list is empty."""
        return await self._optional("LPOP", key)

    async def lrange(self, key: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """Elements from `start` to `stop`, inclusive. Negative indexes count from the end."""
        return await self._list(
            "LRANGE", key, _encode_integer(key, start), _encode_integer(key, stop)
        )

    async def ltrim(self, key: str, start: int, stop: int) -> None:
        """Keep only the elements that `lrange` would return."""
        await self._execute_one(
            "LTRIM", key, _encode_integer(key, start), _encode_integer(key, stop)
        )

    async def lindex(self, key: str, index: int) -> bytes | None:
        """The element at `index`, or `None` if out of range."""
        return await self._optional("LINDEX", key, _encode_integer(key, index))

    async def llen(self, key: str) -> int:
        """The length of a list, 0 if the key does not exist."""
        return await self._integer("LLEN", key)

    async def hset(self, key: str, fields: Mapping[Value, Value]) -> int:
        """Set fields of a hash; return how many are new."""
        pairs = [part for pair in _items_of(_describe_key(key), fields) for part in pair]
        return await self._change_values("HSET", key, pairs)

    async def hget(self, key: str, field: Value) -> bytes | None:
        """The value of one field, or `None` if it does not exist."""
        return await self._optional("HGET", key, _encode_value(key, field))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        """All fields and values of a hash."""
        return _to_dict(await self._list("HGETALL", key))

    async def hdel(self, key: str, *fields: Value) -> int:
        """Delete fields; return how many of them existed."""
        return await self._change_values("HDEL", key, fields)

    async def hincrby(self, key: str, field: Value, by: int = 1) -> int:
        """Add to the integer in a field, initially 0, and return the result."""
        return await self._integer(
            "HINCRBY", key, _encode_value(key, field), _encode_integer(key, by)
        )

    async def hexists(self, key: str, field: Value) -> bool:
        """Whether the field exists."""
        return await self._integer("HEXISTS", key, _encode_value(key, field)) == 1

    async def hlen(self, key: str) -> int:
        """The number of fields."""
        return await self._integer("HLEN", key)

    async def sadd(self, key: str, *members: Value) -> int:
        """Add members to a set; return how many are new."""
        return await self._change_values("SADD", key, members)

    async def srem(self, key: str, *members: Value) -> int:
        """Remove members; return how many of them existed."""
        return await self._change_values("SREM", key, members)

    async def smembers(self, key: str) -> frozenset[bytes]:
        """All members of a set."""
        return frozenset(await self._list("SMEMBERS", key))

    async def sismember(self, key: str, member: Value) -> bool:
        """Whether `member` is in the set."""
        return await self._integer("SISMEMBER", key, _encode_value(key, member)) == 1

    async def scard(self, key: str) -> int:
        """The number of members."""
        return await self._integer("SCARD", key)

    async def zadd(self, key: str, scores: Mapping[Value, float]) -> int:
        """Set the scores of members; return how many members are new."""
        pairs = [
            part
            for member, score in _items_of(_describe_key(key), scores)
            for part in (_encode_number(key, score), member)
        ]
        return await self._change_values("ZADD", key, pairs)

    async def zrem(self, key: str, *members: Value) -> int:
        """Remove members; return how many of them existed."""
        return await self._change_values("ZREM", key, members)

    async def zincrby(self, key: str, member: Value, by: float) -> float:
        """Add to a member's score, initially 0, and return the result."""
        return await self._float(
            "ZINCRBY", key, _encode_number(key, by), _encode_value(key, member)
        )

    async def zscore(self, key: str, member: Value) -> float | None:
        """A member's score, or `None` if it is not in the set."""
        score = await self._optional("ZSCORE", key, _encode_value(key, member))
        return None if score is None else float(score)

    async def zrange(self, key: str, start: int = 0, stop: int = -1) -> list[tuple[bytes, float]]:
        """Members and scores by rank from `start` to `stop`, inclusive, lowest score first."""
        ranks = (_encode_integer(key, start), _encode_integer(key, stop))
        return _to_scored_members(await self._list("ZRANGE", key, *ranks, b"WITHSCORES"))

    async def zrangebyscore(self, key: str, low: float, high: float) -> list[tuple[bytes, float]]:
        """Members with scores from `low` to `high`, inclusive, lowest score first."""
        bounds = (_encode_number(key, low), _encode_number(key, high))
        return _to_scored_members(await self._list("ZRANGEBYSCORE", key, *bounds, b"WITHSCORES"))

    async def zcard(self, key: str) -> int:
        """The number of members."""
        return await self._integer("ZCARD", key)

    @property
    def _runner(self) -> MemoryRunner:
        if (memory := self._runtime.memory) is None:
            raise AgentMisbehaved(
                "ctx.memory works only in a running segment: this one has ended, or no replica "
                "created this context; in a test, call the agent through "
                "meshpoint.local.local_mesh"
            )
        return memory

    async def _change_values(self, command: str, key: str, values: Iterable[Value]) -> int:
        args = [_encode_value(key, value) for value in values]
        if not args:
            raise _refusal(key, f"{command} needs at least one value")
        return await self._integer(command, key, *args)

    # The answer's type depends on the command.

    async def _integer(self, name: str, key: str, *args: bytes) -> int:
        return cast(int, await self._execute_one(name, key, *args))

    async def _float(self, name: str, key: str, *args: bytes) -> float:
        return float(cast(bytes, await self._execute_one(name, key, *args)))

    async def _optional(self, name: str, key: str, *args: bytes) -> bytes | None:
        return cast(bytes | None, await self._execute_one(name, key, *args))

    async def _list(self, name: str, key: str, *args: bytes) -> list[bytes]:
        return cast(list[bytes], await self._execute_one(name, key, *args))

    async def _execute_one(self, name: str, key: str, *args: bytes) -> Answer:
        [answer] = await self._execute([(name, key, args)])
        return answer

    async def _execute(
        self, commands: Sequence[tuple[str, str, tuple[bytes, ...]]]
    ) -> list[Answer]:
        if not commands:
            return []
        return await self._runner.execute(
            [Command(name, _check_key(key), args) for name, key, args in commands]
        )


def _set_commands(
    key: str, value: Any, ttl: timedelta | None
) -> list[tuple[str, str, tuple[bytes, ...]]]:
    commands: list[tuple[str, str, tuple[bytes, ...]]] = [
        ("SET", key, (_encode_value(key, value),))
    ]
    if ttl is not None:
        commands.append(("PEXPIRE", key, (_encode_ttl(key, ttl),)))
    return commands


def _typed_for_key(key: str, type_: Any) -> DeclaredType[Any]:
    try:
        return DeclaredType(type_, _describe_key(key))
    except ConfigurationError as error:
        # pydantic's message is long, and it is available as the cause.
        name = getattr(type_, "__name__", str(type_))
        raise _refusal(key, f"{name} cannot become JSON; {error.fix}") from error


def _to_dict(answer: list[bytes]) -> dict[bytes, bytes]:
    flat = iter(answer)
    return dict(zip(flat, flat, strict=True))


def _to_scored_members(answer: list[bytes]) -> list[tuple[bytes, float]]:
    flat = iter(answer)
    return [(member, float(score)) for member, score in zip(flat, flat, strict=True)]


def _check_key(key: Any) -> str:
    """Check that `key` is a str of 1 to `_MAX_KEY_BYTES` bytes and return it."""
    if not isinstance(key, str):
        raise MemoryRefused(f"a memory key must be str, not {_type_name(key)}")
    if not 1 <= len(_encode_utf8(key, key)) <= _MAX_KEY_BYTES:
        raise _refusal(key, f"must have 1 to {_MAX_KEY_BYTES} bytes")
    return key


def _encode_value(key: str, value: Any) -> bytes:
    """Encode a value."""
    match value:
        case bytes():
            return bytes(value)
        case str():
            return _encode_utf8(key, value)
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            raise _refusal(
                key, f"expected bytes or str, not {_type_name(value)}; use set_model for models"
            )


def _encode_utf8(key: object, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(key, f"the text cannot be encoded as UTF-8: {error.reason}") from error


def _encode_number(key: str, value: Any) -> bytes:
    """Encode a number that can be compared with others, so not NaN."""
    if not isinstance(value, int | float):
        raise _refusal(key, f"expected a number, not {_type_name(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise _refusal(key, "the number is too large for a float") from error
    if isnan(number):
        raise _refusal(key, "NaN cannot be ordered")
    return repr(number).encode()


def _encode_integer(key: str, value: Any) -> bytes:
    """Encode a 64-bit integer."""
    if not isinstance(value, int):
        raise _refusal(key, f"expected an integer, not {_type_name(value)}")
    if not -(2**63) <= value < 2**63:
        raise _refusal(key, "the integer does not fit into 64 bits")
    return b"%d" % value


def _encode_ttl(key: str, ttl: Any) -> bytes:
    """Encode a time to live of at least one millisecond."""
    if not isinstance(ttl, timedelta):
        raise _refusal(key, f"a time to live must be a timedelta, not {_type_name(ttl)}")
    ttl_ms = ttl // timedelta(milliseconds=1)
    if ttl_ms <= 0:
        raise _refusal(key, f"a time to live of {ttl} expires immediately; use delete")
    return b"%d" % ttl_ms


def _items_of(name: str, values: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a mapping. `name` names it in errors."""
    if not isinstance(values, Mapping):
        raise MemoryRefused(f"{name}: expected a mapping, not {_type_name(values)}")
    return values.items()


def _refusal(key: object, problem: str) -> MemoryRefused:
    """Build the error for `key`."""
    return MemoryRefused(f"{_describe_key(key)}: {problem}")


def _describe_key(key: object) -> str:
    """Format a key for errors, cut after 100 characters."""
    text = repr(key)
    return f"memory key {text if len(text) <= 100 else f'{text[:100]}…'}"


def _type_name(value: object) -> str:
    """The type name of `value`, for errors."""
    return type(value).__name__
