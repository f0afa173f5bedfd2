"""Random commands must have the same answers and effects in the process and in Redis.

Redis itself defines the results; the adapter adds owners, expiry times and a script. `make model`
runs the long form: see `test_store_machine`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol, TypeAlias, cast

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, settings
from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import ResponseError

from meshpoint.adapters.clocks import SystemClock
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.redis import RedisWorkingMemory
from meshpoint.errors import MemoryRefused
from meshpoint.model.ids import RunId, new_id
from meshpoint.model.memory import Answer, Command, Item, Kind, Owner
from meshpoint.ports.working_memory import WorkingMemory
from servers import REDIS_LIMIT

_MIN_EXAMPLES = int(os.environ.get("MESHPOINT_MODEL_EXAMPLES", "0"))
_NUMBERS = count(1)

REFUSED = "refused"
Answers: TypeAlias = list[Any] | str
"""Answers of a batch, normalised so that equal ones compare equal, or that it was refused."""
MemoryContents: TypeAlias = dict[str, tuple[Kind, Any, bool]]
"""Contents of a memory by key, and whether the key has an expiry time of its own."""


KEYS = {Kind.STRING: "s", Kind.LIST: "l", Kind.HASH: "h", Kind.SET: "m", Kind.ZSET: "z"}
values = st.sampled_from(
    [b"", b"a", b"b", b"\x00\xff", b"1", b"-5", b"3.5", b"1e2", b"07", b"9223372036854775807"]
)
small = st.integers(-6, 6)
integers = st.one_of(
    small, st.sampled_from([2**31, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)])
).map(b"%d".__mod__)
steps = st.one_of(integers, st.sampled_from([b"9223372036854775808", b"1.5", b""]))
short_decimals = st.integers(-1000, 1000).map(lambda number: number / 100)
floats = st.one_of(
    short_decimals,
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.1, 0.2, 0.3, 1e-320, -0.0, 2.0**53, 1e300]),
).map(lambda number: repr(number).encode())
bounds = st.one_of(floats, st.sampled_from([b"inf", b"-inf", b"+1", b"nan"]))
scores = st.one_of(bounds, st.sampled_from([b"", b" 1", b"1_0", b"1\x00"]))
times = st.sampled_from([b"3600000", b"1000000000000000", b"0", b"-1", b"9223372036854775807"])


def groups_of(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[bytes, ...]]:
    """One to four groups of arguments, flattened."""
    return st.lists(st.tuples(*parts), min_size=1, max_size=4).map(lambda groups: sum(groups, ()))


ARGUMENTS: dict[Kind | None, dict[str, st.SearchStrategy[tuple[bytes, ...]]]] = {
    None: {
        **{name: st.just(()) for name in ("TYPE", "DEL", "PTTL", "PERSIST")},
        "PEXPIRE": st.tuples(times),
        "SET": st.tuples(values),
    },
    Kind.STRING: {
        "GET": st.just(()),
        "SET": st.tuples(values),
        "INCRBY": st.tuples(steps),
        "INCRBYFLOAT": st.tuples(scores),
    },
    Kind.LIST: {
        **{name: groups_of(values) for name in ("RPUSH", "LPUSH")},
        **{name: st.just(()) for name in ("RPOP", "LPOP", "LLEN")},
        **{name: st.tuples(integers, integers) for name in ("LRANGE", "LTRIM")},
        "LINDEX": st.tuples(integers),
    },
    Kind.HASH: {
        "HSET": groups_of(values, values),
        "HDEL": groups_of(values),
        "HINCRBY": st.tuples(values, steps),
        **{name: st.tuples(values) for name in ("HGET", "HEXISTS")},
        **{name: st.just(()) for name in ("HGETALL", "HLEN")},
    },
    Kind.SET: {
        **{name: groups_of(values) for name in ("SADD", "SREM")},
        **{name: st.just(()) for name in ("SMEMBERS", "SCARD")},
        "SISMEMBER": st.tuples(values),
    },
    Kind.ZSET: {
        "ZADD": groups_of(scores, values),
        "ZREM": groups_of(values),
        "ZINCRBY": st.tuples(scores, values),
        "ZSCORE": st.tuples(values),
        "ZCARD": st.just(()),
        "ZRANGE": st.tuples(integers, integers, st.just(b"WITHSCORES")),
        "ZRANGEBYSCORE": st.tuples(bounds, bounds, st.just(b"WITHSCORES")),
    },
}


@st.composite
def commands(draw: st.DrawFn) -> Command:
    """A command, mostly on a key of its kind."""
    kind = draw(st.sampled_from(list(ARGUMENTS)))
    name = draw(st.sampled_from(list(ARGUMENTS[kind])))
    is_wrong_kind = kind is None or draw(st.integers(0, 9)) == 0
    key = (
        draw(st.sampled_from(list(KEYS.values()))) if kind is None or is_wrong_kind else KEYS[kind]
    )
    return Command(name, key, draw(ARGUMENTS[kind][name]))


stories = st.lists(st.lists(commands(), min_size=1, max_size=5), min_size=1, max_size=25)


class Implementation(Protocol):
    """An implementation under comparison."""

    async def reset(self) -> None:
        """Start with an empty memory."""

    async def execute(self, batch: Sequence[Command]) -> list[Answer]:
        """Execute a batch of commands."""

    async def contents(self) -> MemoryContents:
        """The whole contents."""


class MeshpointMemory:
    """A working memory of Meshpoint."""

    def __init__(self, memory: WorkingMemory) -> None:
        self._memory = memory

    async def reset(self) -> None:
        self._owner = Owner(f"travel:{new_id()}", RunId(new_id()), 1)
        await self._memory.replace(self._owner, ())

    async def execute(self, batch: Sequence[Command]) -> list[Answer]:
        version, answers = await self._memory.execute(self._owner, batch)
        current = await self._memory.read(self._owner.agent_id)
        assert current.version == version
        return answers

    async def contents(self) -> MemoryContents:
        current = await self._memory.read(self._owner.agent_id)
        assert current.lost_keys == ()
        result = {item.key: _normalized_item(item) for item in current.items}
        assert sorted(await self._memory.keys(self._owner)) == sorted(result)
        put = await self._memory.replace(self._owner, current.items)
        assert {item.key: _normalized_item(item) for item in put.items} == result
        return result


class PlainRedis:
    """Plain Redis. Answers are read from the wire."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection, self._namespace = connection, namespace

    async def reset(self) -> None:
        self._prefix = f"{self._namespace}:{next(_NUMBERS)}:"

    async def execute(self, batch: Sequence[Command]) -> list[Answer]:
        return [await self._call(command.name, command.key, *command.args) for command in batch]

    async def contents(self) -> MemoryContents:
        return {
            key: value for key in KEYS.values() if (value := await self._read_key(key)) is not None
        }

    async def _read_key(self, key: str) -> tuple[Kind, Any, bool] | None:
        kind = cast(bytes, await self._call("TYPE", key)).decode()
        if kind == "none":
            return None
        read_command: dict[str, tuple[Any, ...]] = {
            "string": ("GET", key),
            "list": ("LRANGE", key, "0", "-1"),
            "hash": ("HGETALL", key),
            "set": ("SMEMBERS", key),
            "zset": ("ZRANGE", key, "0", "-1", "WITHSCORES"),
        }
        answer = NORMALIZER_BY_COMMAND.get(read_command[kind][0], _identity)(
            await self._call(*read_command[kind])
        )
        return Kind(kind), answer, await self._call("PTTL", key) != -1

    async def _call(self, name: str, key: str, *args: bytes | str) -> Answer:
        await self._connection.send_command(name, self._prefix + key, *args)
        try:
            return cast(Answer, await self._connection.read_response())
        except ResponseError as error:
            raise MemoryRefused(f"memory key {key!r}: {error}") from error


def _identity(answer: Any) -> Any:
    return answer


def _text(answer: Any) -> Any:
    """A value. Floats are parsed, because another machine may print another last digit."""
    try:
        return float(answer) if answer is not None and b"." in answer else answer
    except ValueError:
        return answer


def _number(answer: Any) -> Any:
    return None if answer is None else float(answer)


def _pairs(answer: Any) -> Any:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _scored_members(answer: Any) -> Any:
    return [
        (member, float(score)) for member, score in zip(answer[::2], answer[1::2], strict=True)
    ]


def _scan_page(answer: Any) -> Any:
    return min(answer, 0)  # the remaining time depends on the clock


NORMALIZER_BY_COMMAND: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(["INCRBYFLOAT", "ZINCRBY", "ZSCORE"], _number),
    **dict.fromkeys(["ZRANGE", "ZRANGEBYSCORE"], _scored_members),
    **dict.fromkeys(["GET", "LPOP", "RPOP"], _text),
    "HGETALL": _pairs,
    "SMEMBERS": sorted,
    "PTTL": _scan_page,
}


def _normalized_item(item: Item) -> tuple[Kind, Any, bool]:
    content: Any = item.content
    match item.kind:
        case Kind.STRING:
            content = _text(content)
        case Kind.LIST:
            content = list(content)
        case Kind.SET:
            content = sorted(content)
        case Kind.ZSET:
            content = sorted(content.items(), key=lambda pair: (pair[1], pair[0]))
    return item.kind, content, item.expires_at is not None


async def _execute(side: Implementation, batch: Sequence[Command]) -> Answers:
    try:
        answers = await side.execute(batch)
    except MemoryRefused:
        return REFUSED
    return [
        NORMALIZER_BY_COMMAND.get(c.name, _identity)(answer)
        for c, answer in zip(batch, answers, strict=True)
    ]


async def _compare_story(
    implementations: tuple[Implementation, Implementation], story: Sequence[Sequence[Command]]
) -> None:
    for implementation in implementations:
        await implementation.reset()
    for batch in story:
        first_answers, second_answers = [await _execute(side, batch) for side in implementations]
        assert first_answers == second_answers, batch
    first_contents, second_contents = [await side.contents() for side in implementations]
    assert first_contents == second_contents


def compare_implementations(
    runner: asyncio.Runner,
    implementations: tuple[Implementation, Implementation],
    *,
    examples: int,
) -> None:
    """Run `examples` random stories on both sides; the environment overrides the number."""

    @settings(
        derandomize=not _MIN_EXAMPLES,
        max_examples=_MIN_EXAMPLES or examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if _MIN_EXAMPLES else [Phase.generate],
        print_blob=bool(_MIN_EXAMPLES),
        suppress_health_check=list(HealthCheck),
    )
    @given(stories)
    def run_story(story: list[list[Command]]) -> None:
        runner.run(_compare_story(implementations, story))

    run_story()


def test_the_inprocess_memory_behaves_like_redis(redis_url: str, namespace: str) -> None:
    with asyncio.Runner() as runner:

        async def connected() -> Connection:
            connection = Connection(
                protocol=2, decode_responses=False, **_connection_options(redis_url)
            )
            await connection.connect()
            return connection

        connection = runner.run(connected())
        try:
            sides = (
                MeshpointMemory(InProcessWorkingMemory(SystemClock())),
                PlainRedis(connection, namespace),
            )
            compare_implementations(runner, sides, examples=150)
        finally:
            runner.run(connection.disconnect())


def test_the_redis_adapter_behaves_like_the_inprocess_memory(
    redis_url: str, namespace: str
) -> None:
    with asyncio.Runner() as runner:

        async def opened() -> WorkingMemory:
            return RedisWorkingMemory(redis_url, timeout=REDIS_LIMIT, namespace=namespace)

        memory = runner.run(opened())
        try:
            compare_implementations(
                runner,
                (MeshpointMemory(InProcessWorkingMemory(SystemClock())), MeshpointMemory(memory)),
                examples=60,
            )
        finally:
            runner.run(memory.close())


def _connection_options(url: str) -> dict[str, Any]:
    return {
        key: value
        for key, value in parse_url(url).items()
        if key in {"host", "port", "db", "password"}
    }
