"""Both working memories, in the process and in Redis, pass the working-memory suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.redis import RedisWorkingMemory
from meshpoint.model.memory import Command
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.working_memory import WorkingMemorySuite
from meshpoint.testing.conformance.working_memory_values import Hand, an_owner, contents, hand_of
from servers import REDIS_LIMIT

"""The suite has no time limits, because the machine may be busy."""


class TestLocalWorkingMemory(WorkingMemorySuite):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    async def memory(self, clock: FakeClock) -> AsyncIterator[WorkingMemory]:
        self.moved = clock
        memory = InProcessWorkingMemory(clock)
        yield memory
        await memory.close()

    async def pass_time(self, memory: WorkingMemory, duration: timedelta) -> None:
        self.moved.advance(duration)

    async def test_a_local_memory_ends_with_the_process(self, memory: WorkingMemory) -> None:
        assert not memory.durable

    async def test_keys_expire_at_their_millisecond(self, do: Hand, clock: FakeClock) -> None:
        await do.all(("SET", "k", b"1"), ("PEXPIRE", "k", b"100"))
        clock.advance(timedelta(milliseconds=99))
        assert await do("PTTL", "k") == 1
        assert contents(await do.read_all()) == {"k": b"1"}
        clock.advance(timedelta(milliseconds=1))
        assert await do("PTTL", "k") == -2
        assert (await do.read_all()).items == ()

    async def test_a_long_list_is_built_and_emptied_one_by_one(self, do: Hand) -> None:
        for _ in range(20):
            batch = [Command("RPUSH", "k", (b"a",)), Command("LPUSH", "k", (b"b",))] * 2500
            await do.memory.execute(do.owner, batch)
        assert await do.all(("LLEN", "k"), ("LINDEX", "k", b"0"), ("LINDEX", "k", b"-1")) == [
            100_000,
            b"b",
            b"a",
        ]
        for _ in range(20):
            await do.memory.execute(do.owner, [Command("LPOP", "k"), Command("RPOP", "k")] * 2500)
        assert await do.memory.keys(do.owner) == []

    async def test_a_forgotten_memory_leaves_no_objects(self, memory: WorkingMemory) -> None:
        before = live_objects(memory)
        for _ in range(100):
            do = await hand_of(memory, an_owner())
            await do("SET", "k", b"1")
            await memory.forget(do.owner)
            await memory.read(do.owner.agent_id)
        assert live_objects(memory) == before


class TestRedisWorkingMemory(WorkingMemorySuite):
    @pytest.fixture
    async def memory(self, redis_url: str, namespace: str) -> AsyncIterator[WorkingMemory]:
        memory = RedisWorkingMemory(redis_url, namespace=namespace, timeout=REDIS_LIMIT)
        yield memory
        await memory.close()

    @pytest.fixture
    async def other(
        self, memory: WorkingMemory, redis_url: str, namespace: str
    ) -> AsyncIterator[WorkingMemory]:
        other = RedisWorkingMemory(redis_url, namespace=namespace, timeout=REDIS_LIMIT)
        yield other
        await other.close()

    async def test_a_redis_memory_outlives_the_process(
        self, memory: WorkingMemory, other: WorkingMemory
    ) -> None:
        assert memory.durable
        do = await hand_of(memory, an_owner())
        await do("SET", "k", b"1")
        await memory.close()
        assert contents(await other.read(do.owner.agent_id)) == {"k": b"1"}


def live_objects(memory: WorkingMemory) -> int:
    return sum(len(value) for value in vars(memory).values() if hasattr(value, "__len__"))


def test_test_names_are_unique_across_the_suite() -> None:
    sections = WorkingMemorySuite.__bases__
    names = Counter(
        name for section in sections for name in vars(section) if name.startswith("test_")
    )
    assert [name for name, times in names.items() if times > 1] == []
