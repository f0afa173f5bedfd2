"""Working memory as values: what is in it, what may be done with it, and whose it is.

The kinds are those of Redis, and so are the names and the meaning of commands: an adapter
without Redis does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from meshpoint.model.ids import AgentName, RunId, TaskId


class Kind(StrEnum):
    """What a key holds."""

    STRING = "string"
    LIST = "list"
    HASH = "hash"
    SET = "set"
    ZSET = "zset"


Content: TypeAlias = bytes | tuple[bytes, ...] | Mapping[bytes, bytes] | frozenset[bytes] | Mapping[bytes, float]
"""By kind: a string's bytes, a list's elements, a hash's fields, a set's members, a sorted set's scores by member.

No score is -0.0, which Redis keeps or forgets by the size of the set."""


@dataclass(frozen=True, slots=True)
class Item:
    """One key. `expires_at` is when it ends by its own time, in milliseconds since the epoch; None: it has none."""

    key: str
    kind: Kind
    content: Content
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Which run works with the memory `agent_id`. Only the one with the highest fence that came last may."""

    agent_id: str
    run_id: RunId
    fence: int


def agent_id(agent: AgentName, task_id: TaskId) -> str:
    """The name of the memory that `agent` has for one task: `{agent}:{task_id}`."""
    return f"{agent}:{task_id}"


def task_of(agent_id: str) -> TaskId:
    """The task of a memory."""
    return TaskId(agent_id.partition(":")[2])


READS = frozenset(
    {
        *("GET", "TYPE", "PTTL", "LRANGE", "LLEN", "LINDEX", "HGET", "HGETALL", "HEXISTS", "HLEN"),
        *("SMEMBERS", "SISMEMBER", "SCARD", "ZRANGE", "ZRANGEBYSCORE", "ZSCORE", "ZCARD"),
    }
)
"""Commands that change nothing. ZRANGE and ZRANGEBYSCORE are always asked for `WITHSCORES`."""

WRITES = frozenset(
    {
        *("SET", "INCRBY", "INCRBYFLOAT", "RPUSH", "LPUSH", "LPOP", "RPOP", "LTRIM"),
        *("HSET", "HDEL", "HINCRBY", "SADD", "SREM", "ZADD", "ZREM", "ZINCRBY", "DEL", "PEXPIRE", "PERSIST"),
    }
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command on one key, with its other arguments as Redis takes them.

    PEXPIRE gives the key a time of its own, in milliseconds, and PERSIST takes it away; PTTL tells what is left of
    that time: -1 where there is none, -2 where there is no key. SET takes it away too.
    """

    name: str
    key: str
    args: tuple[bytes, ...] = ()

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        return self.name in WRITES


Answer: TypeAlias = int | bytes | list[bytes] | None
"""What Redis answers (RESP2): numbers, bytes, nothing, or a list; scores and floats as text in bytes."""


@dataclass(frozen=True, slots=True)
class Held:
    """All that one memory holds at one instant. `now` is its clock, in milliseconds since the epoch.

    `version` grows with every write. `run_id` and `fence` are those of its last owner, None and 0 when it has none:
    it was never used, or everything is lost. `lost` are keys that should be there and are not: they were evicted.
    `large` are keys too large to read; '' stands for all keys, if their names alone exceed the limit.
    """

    items: tuple[Item, ...]
    version: int
    now: int
    run_id: RunId | None = None
    fence: int = 0
    lost: tuple[str, ...] = ()
    large: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Packed:
    """A snapshot as it rests: what it says of itself, and its items in chunks, all compressed.

    `digest` is that over all its content. `order` grows with every snapshot of one memory.
    """

    digest: str
    order: int
    manifest: bytes
    chunks: tuple[bytes, ...]
