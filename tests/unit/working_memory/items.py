"""Sample contents of working memories."""

from __future__ import annotations

from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.memory import Item, Kind, MemoryContents, Owner, make_agent_id

AGENT_ID = make_agent_id(AgentName("agent"), TaskId("task"))

ITEMS = (
    Item("text", Kind.STRING, b"one\x00\xff", 2_000),
    Item("list", Kind.LIST, (b"b", b"a", b"b")),
    Item("hash", Kind.HASH, {b"f": b"1", b"g": b"2"}),
    Item("set", Kind.SET, frozenset({b"x", b"y"})),
    Item("zset", Kind.ZSET, {b"m": 1.5, b"n": -0.25}),
)


def memory_contents(*items: Item, now: int = 1_000, version: int = 3) -> MemoryContents:
    return MemoryContents(items, version, now, RunId("run"), 1)


def create_owner(run: str = "run", fence: int = 1) -> Owner:
    return Owner(AGENT_ID, RunId(run), fence)
