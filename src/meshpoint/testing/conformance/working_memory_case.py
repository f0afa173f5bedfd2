"""Fixtures, helpers and sample values shared by the working-memory suites."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta

import pytest

from meshpoint.model.ids import RunId, new_id
from meshpoint.model.memory import Answer, Command, Content, Held, Item, Kind, Owner
from meshpoint.ports.working_memory import WorkingMemory

PATIENCE = 30.0
"""Seconds to wait for an expected event. Only a failing test waits this long."""

BINARY = bytes(range(256)) + b"\r\n$-1\r\n\x00"
"""Every byte, protocol delimiters, and a trailing zero."""

HOUR = b"3600000"
"""An expiry in milliseconds that no test reaches."""


def an_owner(fence: int = 1, *, of: Owner | None = None) -> Owner:
    """A new run that owns a new task's memory, or the memory of the owner `of`."""
    return Owner(f"travel:{new_id()}" if of is None else of.agent_id, RunId(new_id()), fence)


def contents(held: Held) -> dict[str, Content]:
    """The contents of all keys. Asserts that no key is listed twice."""
    assert len({item.key for item in held.items}) == len(held.items)
    return {item.key: item.content for item in held.items}


def own_times(items: Iterable[Item]) -> dict[str, int | None]:
    """The expiry of each key."""
    return {item.key: item.expires_at for item in items}


def plain(items: Iterable[Item]) -> dict[str, tuple[Kind, Content, int | None]]:
    """Items as a mapping, to compare them regardless of order."""
    return {item.key: (item.kind, item.content, item.expires_at) for item in items}


def floats(answer: Answer) -> list[float]:
    """The scores in a reply with scores, or its only number."""
    if isinstance(answer, bytes):
        return [float(answer)]
    assert isinstance(answer, list)
    return [float(score) for score in answer[1::2]]


class Hand:
    """Executes commands for one owner. Calling it executes one and returns its answer."""

    def __init__(self, memory: WorkingMemory, owner: Owner) -> None:
        self.memory, self.owner = memory, owner

    async def __call__(self, name: str, key: str, *args: bytes) -> Answer:
        _, [answer] = await self.memory.execute(self.owner, [Command(name, key, args)])
        return answer

    async def all(self, *commands: tuple[str, str, *tuple[bytes, ...]]) -> list[Answer]:
        """Execute commands in one batch and return their answers."""
        return (await self.versioned(*commands))[1]

    async def versioned(self, *commands: tuple[str, str, *tuple[bytes, ...]]) -> tuple[int, list[Answer]]:
        """Execute commands in one batch and return the version and the answers."""
        batch = [Command(name, key, args) for name, key, *rest in commands for args in [tuple(rest)]]
        return await self.memory.execute(self.owner, batch)

    async def held(self) -> Held:
        """Read the whole memory."""
        return await self.memory.read(self.owner.agent_id)

    async def put(self, *items: Item) -> Held:
        """Replace the whole memory with `items`."""
        return await self.memory.replace(self.owner, items)


async def hand_of(memory: WorkingMemory, owner: Owner, items: Sequence[Item] = ()) -> Hand:
    """Begin the memory of `owner` with `items`."""
    await memory.replace(owner, items)
    return Hand(memory, owner)


class WorkingMemoryCase:
    """Fixtures and hooks of an adapter's test class; see `working_memory`."""

    @pytest.fixture
    def memory(self) -> WorkingMemory:
        """The working memory under test."""
        raise NotImplementedError("a working memory's suite provides the fixture `memory`")

    @pytest.fixture
    def other(self, memory: WorkingMemory) -> WorkingMemory:
        """The working memory that a second replica opens on the same data."""
        return memory

    @pytest.fixture
    async def do(self, memory: WorkingMemory) -> Hand:
        """A run that has begun an empty memory."""
        return await hand_of(memory, an_owner())

    async def pass_time(self, memory: WorkingMemory, duration: timedelta) -> None:
        """Wait until the memory's clock has advanced by `duration`. Override it for a fake clock.

        Tests pass a few milliseconds at most.
        """
        then = (await memory.read("clock")).now + duration // timedelta(milliseconds=1)
        async with asyncio.timeout(PATIENCE):
            while (await memory.read("clock")).now <= then:  # noqa: ASYNC110  a server's clock has no event
                await asyncio.sleep(0)
