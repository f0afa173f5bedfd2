"""Operations of `ctx.memory`, and the errors for invalid ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import date, timedelta
from math import inf, nan
from typing import Any, TypeAlias

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.errors import AgentFailed, AgentMisbehaved, MemoryRefused
from meshpoint.model.agent_memory import AgentMemory
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.memory import Answer, Command, MemoryRecovery, MemorySource, Owner
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.testing.clock import FakeClock

MINUTE = timedelta(minutes=1)
SURROGATE = "a\udc80"
OWNER = Owner("travel:1", RunId("r1"), 1)


class FakeMemoryRunner:
    """Executes an agent's commands at once and counts the round trips a server would see."""

    def use_memory(self) -> FakeMemoryRunner:
        return self

    def use_subtasks(self) -> Any:
        raise AssertionError("these tests use no subtasks")

    place = (0, 0)

    def now(self, pauses: int) -> Any:
        raise AssertionError("these tests do not ask for the time")

    def use_steps(self) -> Any:
        raise AssertionError("these tests use no steps")

    async def set_value(self, key: str, value: bytes) -> None:
        raise AssertionError("these tests set no values")

    def __init__(self, memory: WorkingMemory) -> None:
        self._memory = memory
        self.call_count = 0

    @property
    def recovery(self) -> MemoryRecovery | None:
        return MemoryRecovery(MemorySource.SQL, keys=3) if self.call_count else None

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        self.call_count += 1
        return (await self._memory.execute(OWNER, commands))[1]

    async def keys(self) -> list[str]:
        self.call_count += 1
        return await self._memory.keys(OWNER)

    async def clear(self) -> None:
        self.call_count += 1
        await self._memory.replace(OWNER, ())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def runner(clock: FakeClock) -> FakeMemoryRunner:
    memory = InProcessWorkingMemory(clock)
    await memory.replace(OWNER, ())
    return FakeMemoryRunner(memory)


@pytest.fixture
def memory(runner: FakeMemoryRunner) -> AgentMemory:
    runtime = ContextRuntime()
    runtime.tools = runner
    return AgentMemory(runtime)


async def test_keys_are_sorted_and_matched_by_glob_patterns(memory: AgentMemory) -> None:
    await memory.set_many(
        dict.fromkeys(["page:2", "page:1", "page:10", "Page:1", "a*b", "☃"], b"")
    )
    assert await memory.keys() == ["Page:1", "a*b", "page:1", "page:10", "page:2", "☃"]
    assert await memory.keys("page:*") == ["page:1", "page:10", "page:2"]
    assert await memory.keys("page:?") == ["page:1", "page:2"]
    assert await memory.keys("[Pp]age:1") == ["Page:1", "page:1"]
    assert await memory.keys("page:[!1]") == ["page:2"]
    assert await memory.keys("a[*]b") == ["a*b"]
    assert await memory.keys("page") == []


async def test_a_key_exists_until_it_is_deleted(memory: AgentMemory) -> None:
    await memory.set("a", "")
    await memory.rpush("b", "1")
    assert [await memory.exists(key) for key in "abc"] == [True, True, False]
    assert await memory.delete("a", "b", "c", "a") == 2
    assert [await memory.exists(key) for key in "abc"] == [False, False, False]
    assert await memory.delete() == 0


async def test_clear_deletes_all_keys(memory: AgentMemory) -> None:
    await memory.set("a", "1")
    await memory.sadd("b", "1")
    await memory.clear()
    assert await memory.keys() == []


async def test_a_key_expires_after_its_ttl(memory: AgentMemory, clock: FakeClock) -> None:
    await memory.set("a", "1", ttl=MINUTE)
    await memory.rpush("b", "1")
    assert await memory.expire("b", 2 * MINUTE)
    assert await memory.expire("c", MINUTE) is False
    clock.advance(MINUTE - timedelta(milliseconds=1))
    assert await memory.ttl("a") == timedelta(milliseconds=1)
    clock.advance(timedelta(milliseconds=1))
    assert (await memory.get("a"), await memory.ttl("a")) == (None, None)
    assert await memory.ttl("b") == MINUTE


async def test_persist_removes_the_ttl(memory: AgentMemory, clock: FakeClock) -> None:
    await memory.set_many({"a": "1", "b": "1"}, ttl=MINUTE)
    assert await memory.expire("a", None)
    assert await memory.expire("a", None)
    assert await memory.expire("c", None) is False
    await memory.set("b", "2")
    clock.advance(2 * MINUTE)
    assert await memory.get_many(["a", "b"]) == {"a": b"1", "b": b"2"}
    assert await memory.ttl("a") is None


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        *((b"\x00\xff", b"\x00\xff"), ("☃", "☃".encode()), ("", b""), (bytearray(b"a"), b"a")),
        (memoryview(b"abc")[::2], b"ac"),
    ],
)
async def test_values_are_returned_as_bytes(memory: AgentMemory, value: Any, kept: bytes) -> None:
    await memory.set("k", value)
    received = await memory.get("k")
    assert received == kept
    assert type(received) is bytes
    assert await memory.get("none") is None


async def test_several_values_are_set_and_read_at_once(
    memory: AgentMemory, runner: FakeMemoryRunner
) -> None:
    await memory.set_many({"a": "1", "b": b"2"})
    assert await memory.get_many(["b", "x", "a", "b"]) == {"b": b"2", "a": b"1"}
    assert await memory.get_many(key for key in "ab") == {"a": b"1", "b": b"2"}
    assert runner.call_count == 3


async def test_an_empty_call_makes_no_round_trip(
    memory: AgentMemory, runner: FakeMemoryRunner
) -> None:
    await memory.set_many({})
    assert await memory.get_many([]) == {}
    assert await memory.delete() == 0
    assert runner.call_count == 0


class Leg(BaseModel):
    model_config = ConfigDict(extra="forbid")

    to: str = Field(alias="destination")
    on: date | None = None
    tags: set[str] = set()

    @computed_field
    def label(self) -> str:
        return f"to {self.to}"


async def test_a_model_is_restored_unchanged(memory: AgentMemory) -> None:
    leg = Leg(destination="Rome", on=date(2026, 1, 2), tags={"b", "a"})
    await memory.set_model("leg", leg, ttl=MINUTE)
    assert await memory.get_model("leg", Leg) == leg
    assert await memory.ttl("leg") == MINUTE
    assert await memory.get("leg") == b'{"destination":"Rome","on":"2026-01-02","tags":["a","b"]}'
    assert await memory.get_model("none", Leg) is None


async def test_any_pydantic_type_can_be_stored(memory: AgentMemory) -> None:
    await memory.set_model("legs", [Leg(destination="Rome"), Leg(destination="Oslo")])
    await memory.set_model("numbers", {"big": 12345678901234567890, "share": 0.1, "none": None})
    assert [leg.to for leg in await memory.get_model("legs", list[Leg]) or []] == ["Rome", "Oslo"]
    numbers = await memory.get_model("numbers", dict[str, Any])
    assert numbers == {"big": 12345678901234567890, "share": 0.1, "none": None}


async def test_a_value_that_does_not_fit_the_model_is_refused(memory: AgentMemory) -> None:
    await memory.set_many(
        {"other": '{"destination": 5}', "text": "{]", "bytes": b"\xff", "nan": "NaN"}
    )
    assert await refusal_text(memory.get_model("other", Leg)) == (
        "memory key 'other': its value is not a valid Leg: destination: Input should be a valid "
        "string"
    )
    for key in ("text", "bytes", "nan"):
        assert (await refusal_text(memory.get_model(key, Leg))).startswith(
            f"memory key '{key}': its value is not JSON: "
        )


class Opaque:
    """A type that pydantic cannot handle."""


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], {"x": nan}, inf, [SURROGATE]])
async def test_a_model_that_is_not_json_is_refused(memory: AgentMemory, value: Any) -> None:
    assert "memory key 'k'" in await refusal_text(memory.set_model("k", value))
    assert await memory.keys() == []


class Picture(BaseModel):
    pixels: bytes


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b"\xff\xfe", "bytes"),
        ([b"a", b"\xff"], "list"),
        ({b"\xff": 1}, "dict"),
        (Picture(pixels=b"\xff\xfe"), "Picture"),
    ],
)
async def test_a_model_with_bytes_that_are_not_text_is_refused(
    memory: AgentMemory, value: Any, name: str
) -> None:
    assert await refusal_text(memory.set_model("k", value)) == (
        f"memory key 'k': {name} contains bytes that are not UTF-8; "
        "store them with set, or as base64"
    )
    assert await memory.keys() == []


class Encoded(Picture):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


async def test_a_model_can_serialize_its_bytes_as_base64(memory: AgentMemory) -> None:
    await memory.set_model("k", Encoded(pixels=b"\xff\xfe"))
    assert await memory.get_model("k", Encoded) == Encoded(pixels=b"\xff\xfe")


async def test_a_type_that_pydantic_cannot_handle_is_refused(memory: AgentMemory) -> None:
    assert "memory key 'k'" in await refusal_text(memory.get_model("k", Opaque))


async def test_counters_behave_as_in_redis(memory: AgentMemory) -> None:
    assert [await memory.incr("n"), await memory.incr("n", 5), await memory.incr("n", -7)] == [
        1,
        6,
        -1,
    ]
    assert [await memory.incr_float("f", 0.1), await memory.incr_float("f", 0.2)] == [0.1, 0.3]
    assert await memory.incr_float("f", 1) == 1.3
    assert await memory.incr("big", 2**63 - 1) == 2**63 - 1
    assert "'big'" in await refusal_text(memory.incr("big"))


async def test_lists_behave_as_in_redis(memory: AgentMemory) -> None:
    assert await memory.rpush("k", "b", b"c") == 2
    assert await memory.lpush("k", "a", "z") == 4
    assert await memory.lrange("k") == [b"z", b"a", b"b", b"c"]
    assert await memory.lrange("k", 1, -2) == [b"a", b"b"]
    assert [await memory.lindex("k", -1), await memory.lindex("k", 4), await memory.llen("k")] == [
        b"c",
        None,
        4,
    ]
    await memory.ltrim("k", 1, 2)
    assert [await memory.rpop("k"), await memory.lpop("k"), await memory.lpop("k")] == [
        b"b",
        b"a",
        None,
    ]
    assert [await memory.llen("k"), await memory.lrange("k")] == [0, []]


async def test_hashes_behave_as_in_redis(memory: AgentMemory) -> None:
    assert await memory.hset("k", {"f": "1", b"\xff": b"\x00"}) == 2
    assert await memory.hset("k", {"f": "2"}) == 0
    assert await memory.hgetall("k") == {b"f": b"2", b"\xff": b"\x00"}
    assert [await memory.hget("k", "f"), await memory.hget("k", "x")] == [b"2", None]
    assert [await memory.hexists("k", b"\xff"), await memory.hexists("k", "x")] == [True, False]
    assert [await memory.hincrby("k", "f", 3), await memory.hincrby("k", "n")] == [5, 1]
    assert [await memory.hlen("k"), await memory.hdel("k", "f", "x"), await memory.hlen("k")] == [
        3,
        1,
        2,
    ]
    assert await memory.hgetall("none") == {}


async def test_sets_behave_as_in_redis(memory: AgentMemory) -> None:
    assert await memory.sadd("k", "a", b"a", "b") == 2
    assert await memory.smembers("k") == {b"a", b"b"}
    assert [await memory.sismember("k", "a"), await memory.sismember("k", "x")] == [True, False]
    assert [
        await memory.scard("k"),
        await memory.srem("k", "a", "x"),
        await memory.scard("k"),
    ] == [2, 1, 1]
    assert await memory.smembers("none") == frozenset()


async def test_sorted_sets_behave_as_in_redis(memory: AgentMemory) -> None:
    assert await memory.zadd("k", {"b": 2, b"a": 1.5, "top": inf}) == 3
    assert await memory.zadd("k", {"b": 0.5}) == 0
    assert await memory.zrange("k") == [(b"b", 0.5), (b"a", 1.5), (b"top", inf)]
    assert await memory.zrange("k", -2, -2) == [(b"a", 1.5)]
    assert await memory.zrangebyscore("k", 0.5, 1.5) == [(b"b", 0.5), (b"a", 1.5)]
    assert await memory.zrangebyscore("k", 2, inf) == [(b"top", inf)]
    assert await memory.zincrby("k", "a", -3) == -1.5
    assert [await memory.zscore("k", "a"), await memory.zscore("k", "x")] == [-1.5, None]
    assert [
        await memory.zcard("k"),
        await memory.zrem("k", "a", "x"),
        await memory.zcard("k"),
    ] == [3, 1, 2]


Use: TypeAlias = Callable[[AgentMemory, Any], Awaitable[object]]

ON_A_KEY: list[Use] = [
    lambda m, key: m.exists(key),
    lambda m, key: m.delete("there", key),
    lambda m, key: m.expire(key, MINUTE),
    lambda m, key: m.expire(key, None),
    lambda m, key: m.ttl(key),
    lambda m, key: m.get(key),
    lambda m, key: m.set(key, "1"),
    lambda m, key: m.get_many(["there", key]),
    lambda m, key: m.set_many({"there": "changed", key: "1"}),
    lambda m, key: m.get_model(key, int),
    lambda m, key: m.set_model(key, 1),
    lambda m, key: m.incr(key),
    lambda m, key: m.incr_float(key, 1),
    lambda m, key: m.rpush(key, "a"),
    lambda m, key: m.lpop(key),
    lambda m, key: m.lrange(key),
    lambda m, key: m.hset(key, {"f": "1"}),
    lambda m, key: m.hgetall(key),
    lambda m, key: m.sadd(key, "a"),
    lambda m, key: m.smembers(key),
    lambda m, key: m.zadd(key, {"a": 1}),
    lambda m, key: m.zrangebyscore(key, 0, 1),
]

WITH_A_VALUE: list[Use] = [
    lambda m, value: m.set("k", value),
    lambda m, value: m.set_many({"there": "changed", "k": value}),
    lambda m, value: m.rpush("k", "a", value),
    lambda m, value: m.lpush("k", value),
    lambda m, value: m.hset("k", {"f": value}),
    lambda m, value: m.hget("k", value),
    lambda m, value: m.hdel("k", value),
    lambda m, value: m.hexists("k", value),
    lambda m, value: m.hincrby("k", value),
    lambda m, value: m.sadd("k", value),
    lambda m, value: m.srem("k", value),
    lambda m, value: m.sismember("k", value),
    lambda m, value: m.zrem("k", value),
    lambda m, value: m.zscore("k", value),
    lambda m, value: m.zincrby("k", value, 1),
]

WITH_A_WHOLE_NUMBER: list[Use] = [
    lambda m, number: m.incr("k", number),
    lambda m, number: m.hincrby("k", "f", number),
    lambda m, number: m.lrange("k", number, 1),
    lambda m, number: m.lrange("k", 0, number),
    lambda m, number: m.ltrim("k", number, 1),
    lambda m, number: m.ltrim("k", 0, number),
    lambda m, number: m.lindex("k", number),
    lambda m, number: m.zrange("k", number),
    lambda m, number: m.zrange("k", 0, number),
]

WITH_A_NUMBER: list[Use] = [
    lambda m, number: m.incr_float("k", number),
    lambda m, number: m.zadd("k", {"a": number}),
    lambda m, number: m.zincrby("k", "a", number),
    lambda m, number: m.zrangebyscore("k", number, 1),
    lambda m, number: m.zrangebyscore("k", 0, number),
]

WITH_A_TIME: list[Use] = [
    lambda m, ttl: m.expire("k", ttl),
    lambda m, ttl: m.set("k", "1", ttl=ttl),
    lambda m, ttl: m.set_many({"k": "1"}, ttl=ttl),
    lambda m, ttl: m.set_model("k", 1, ttl=ttl),
]

WITHOUT_VALUES: list[Use] = [
    lambda m, _: m.rpush("k"),
    lambda m, _: m.lpush("k"),
    lambda m, _: m.hset("k", {}),
    lambda m, _: m.hdel("k"),
    lambda m, _: m.sadd("k"),
    lambda m, _: m.srem("k"),
    lambda m, _: m.zadd("k", {}),
    lambda m, _: m.zrem("k"),
]


async def refusal_text(operation: Awaitable[object]) -> str:
    """The refusal's text, which must be one short line."""
    with pytest.raises(MemoryRefused) as refused:
        await operation
    assert isinstance(refused.value, AgentFailed)
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


async def assert_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, expected: Any
) -> str:
    """The refusal of `use`, which must neither reach the server nor change anything."""
    await memory.set("there", "unchanged")
    trips = runner.call_count
    text = await refusal_text(use(memory, expected))
    assert runner.call_count == trips
    assert await memory.get("there") == b"unchanged"
    return text


@pytest.mark.parametrize("use", ON_A_KEY)
@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "memory key '': must have 1 to 1024 bytes"),
        ("k" * 1025, "must have 1 to 1024 bytes"),
        ("☃" * 342, "must have 1 to 1024 bytes"),
        (
            SURROGATE,
            r"memory key 'a\udc80': the text cannot be encoded as UTF-8: surrogates not allowed",
        ),
        (b"k", "a memory key must be str, not bytes"),
        (5, "a memory key must be str, not int"),
        (None, "a memory key must be str, not NoneType"),
    ],
)
async def test_an_invalid_key_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, key: Any, problem: str
) -> None:
    assert (await assert_refused(memory, runner, use, key)).endswith(problem)


async def test_a_key_can_have_up_to_1024_bytes(memory: AgentMemory) -> None:
    await memory.set_many({"k" * 1024: "1", "☃" * 341: "2"})
    assert len(await memory.keys()) == 2


@pytest.mark.parametrize("use", WITH_A_VALUE)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (5, "expected bytes or str, not int; use set_model for models"),
        (None, "expected bytes or str, not NoneType; use set_model for models"),
        (("a",), "expected bytes or str, not tuple; use set_model for models"),
        (SURROGATE, "the text cannot be encoded as UTF-8: surrogates not allowed"),
    ],
)
async def test_an_invalid_value_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, value: Any, problem: str
) -> None:
    assert await assert_refused(memory, runner, use, value) == f"memory key 'k': {problem}"


@pytest.mark.parametrize("use", WITH_A_WHOLE_NUMBER)
@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (1.5, "expected an integer, not float"),
        ("1", "expected an integer, not str"),
        (None, "expected an integer, not NoneType"),
        (2**63, "the integer does not fit into 64 bits"),
        (-(2**63) - 1, "the integer does not fit into 64 bits"),
    ],
)
async def test_a_value_that_is_not_an_integer_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, number: Any, problem: str
) -> None:
    assert await assert_refused(memory, runner, use, number) == f"memory key 'k': {problem}"


@pytest.mark.parametrize("use", WITH_A_NUMBER)
@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (nan, "NaN cannot be ordered"),
        ("1", "expected a number, not str"),
        (None, "expected a number, not NoneType"),
        (10**400, "the number is too large for a float"),
    ],
)
async def test_a_value_that_is_not_a_number_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, number: Any, problem: str
) -> None:
    assert await assert_refused(memory, runner, use, number) == f"memory key 'k': {problem}"


@pytest.mark.parametrize("use", WITH_A_TIME)
@pytest.mark.parametrize(
    ("ttl", "problem"),
    [
        (timedelta(), "a time to live of 0:00:00 expires immediately; use delete"),
        (-MINUTE, "a time to live of -1 day, 23:59:00 expires immediately; use delete"),
        (
            timedelta(microseconds=999),
            "a time to live of 0:00:00.000999 expires immediately; use delete",
        ),
        (60, "a time to live must be a timedelta, not int"),
    ],
)
async def test_an_invalid_ttl_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, ttl: Any, problem: str
) -> None:
    assert await assert_refused(memory, runner, use, ttl) == f"memory key 'k': {problem}"


@pytest.mark.parametrize("use", WITHOUT_VALUES)
async def test_a_call_without_values_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use
) -> None:
    text = await assert_refused(memory, runner, use, None)
    assert text.startswith("memory key 'k': ")
    assert text.endswith(" needs at least one value")


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda m, _: m.hset("k", [("f", "1")]), "memory key 'k': expected a mapping, not list"),
        (lambda m, _: m.zadd("k", ["a"]), "memory key 'k': expected a mapping, not list"),
        (lambda m, _: m.set_many([("k", "1")]), "memory values: expected a mapping, not list"),
        (
            lambda m, _: m.get_many("abc"),
            "memory keys: expected several keys, not str; use get for one key",
        ),
        (
            lambda m, _: m.get_many(5),
            "memory keys: expected several keys, not int; use get for one key",
        ),
        (lambda m, _: m.delete(["k"]), "a memory key must be str, not list"),
        (lambda m, _: m.keys(b"*"), "a pattern for memory keys must be str, not bytes"),
    ],
)
async def test_a_value_that_is_not_a_collection_is_refused(
    memory: AgentMemory, runner: FakeMemoryRunner, use: Use, problem: str
) -> None:
    assert await assert_refused(memory, runner, use, None) == problem


async def test_a_key_of_another_kind_is_refused(memory: AgentMemory) -> None:
    await memory.rpush("k", "a")
    assert "'k'" in await refusal_text(memory.get("k"))
    assert "'k'" in await refusal_text(memory.incr_float("k", inf))


async def test_a_context_outside_a_run_explains_how_to_get_a_memory() -> None:
    with pytest.raises(
        AgentMisbehaved, match=r"no replica created this context; .* meshpoint\.local\.local_mesh"
    ):
        await TaskExecutionContext(TaskId("1")).memory.get("k")


async def test_the_recovery_is_reported_by_the_runner(memory: AgentMemory) -> None:
    assert memory.recovery is None
    await memory.keys()
    assert memory.recovery == MemoryRecovery(MemorySource.SQL, keys=3)
