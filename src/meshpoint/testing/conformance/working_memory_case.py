"""What the suites of working memories share: a memory under test, one that a run has begun, and its hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta

import pytest

from meshpoint.model.ids import RunId, new_id
from meshpoint.model.memory import Answer, Command, Content, Held, Item, Kind, Owner
from meshpoint.ports.working_memory import WorkingMemory

PATIENCE = 30.0
"""Seconds to wait for what must come. Only a failing test waits that long."""

BINARY = bytes(range(256)) + b"\r\n$-1\r\n\x00"
"""Every byte, a zero in the end, and what a protocol could take for its own."""

HOUR = b"3600000"
"""A time to live that no test outlasts."""


def an_owner(fence: int = 1, *, of: Owner | None = None) -> Owner:
    """A run that works with the memory of a new task, or with that of the owner `of`."""
    return Owner(f"travel:{new_id()}" if of is None else of.agent_id, RunId(new_id()), fence)


def contents(held: Held) -> dict[str, Content]:
    """What is there, by key."""
    assert len({item.key for item in held.items}) == len(held.items)
    return {item.key: item.content for item in held.items}


def own_times(items: Iterable[Item]) -> dict[str, int | None]:
    """When keys end by their own time."""
    return {item.key: item.expires_at for item in items}


def plain(items: Iterable[Item]) -> dict[str, tuple[Kind, Content, int | None]]:
    """Items without an order."""
    return {item.key: (item.kind, item.content, item.expires_at) for item in items}


def floats(answer: Answer) -> list[float]:
    """The scores of an answer with scores, or its one number."""
    if isinstance(answer, bytes):
        return [float(answer)]
    assert isinstance(answer, list)
    return [float(score) for score in answer[1::2]]


class Hand:
    """Does commands for one owner: a call does one, and gives its answer."""

    def __init__(self, memory: WorkingMemory, owner: Owner) -> None:
        self.memory, self.owner = memory, owner

    async def __call__(self, name: str, key: str, *args: bytes) -> Answer:
        _, [answer] = await self.memory.execute(self.owner, [Command(name, key, args)])
        return answer

    async def all(self, *commands: tuple[str, str, *tuple[bytes, ...]]) -> list[Answer]:
        """Do commands together."""
        return (await self.versioned(*commands))[1]

    async def versioned(self, *commands: tuple[str, str, *tuple[bytes, ...]]) -> tuple[int, list[Answer]]:
        """Do commands together; the version then, and the answers."""
        batch = [Command(name, key, args) for name, key, *rest in commands for args in [tuple(rest)]]
        return await self.memory.execute(self.owner, batch)

    async def held(self) -> Held:
        """All that is there."""
        return await self.memory.read(self.owner.agent_id)

    async def put(self, *items: Item) -> Held:
        """Put items in place of what is there."""
        return await self.memory.replace(self.owner, items)


async def hand_of(memory: WorkingMemory, owner: Owner, items: Sequence[Item] = ()) -> Hand:
    """The hand of `owner`, which has begun its memory with `items`."""
    await memory.replace(owner, items)
    return Hand(memory, owner)


class WorkingMemoryCase:
    """The fixtures and hooks that an adapter's test class provides; see `working_memory`."""

    @pytest.fixture
    def memory(self) -> WorkingMemory:
        """The working memory under test."""
        raise NotImplementedError("a working memory's suite provides the fixture `memory`")

    @pytest.fixture
    def other(self, memory: WorkingMemory) -> WorkingMemory:
        """What a second replica opens on the same data."""
        return memory

    @pytest.fixture
    async def do(self, memory: WorkingMemory) -> Hand:
        """The hand of a run that has begun an empty memory."""
        return await hand_of(memory, an_owner())

    async def pass_time(self, memory: WorkingMemory, duration: timedelta) -> None:
        """Return when the memory's clock is `duration` further; a few milliseconds at most. Move it if you can."""
        then = (await memory.read("clock")).now + duration // timedelta(milliseconds=1)
        async with asyncio.timeout(PATIENCE):
            while (await memory.read("clock")).now <= then:  # noqa: ASYNC110  a server's clock has no event
                await asyncio.sleep(0)
