"""Working memory as values: contents, commands and owners.

Kinds, command names and semantics match Redis, also in adapters that do not use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeAlias

from meshpoint.model.ids import AgentName, RunId, TaskId


class Kind(StrEnum):
    """The type of a key's value."""

    STRING = "string"
    LIST = "list"
    HASH = "hash"
    SET = "set"
    ZSET = "zset"


Content: TypeAlias = (
    bytes | tuple[bytes, ...] | Mapping[bytes, bytes] | frozenset[bytes] | Mapping[bytes, float]
)
"""A value by kind: bytes, list elements, hash fields, set members, or sorted-set scores by member.

Scores are never -0.0, which Redis preserves or drops depending on the size of the set.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One key with its value.

    `expires_at` is in milliseconds since the epoch, `None` without a time to live of its own.
    """

    key: str
    kind: Kind
    content: Content
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that uses the memory `agent_id`.

    Only the latest run with the highest fence may use it.
    """

    agent_id: str
    run_id: RunId
    fence: int


def make_agent_id(agent: AgentName, task_id: TaskId) -> str:
    """The name of an agent's memory for one task: `{agent}:{task_id}`."""
    return f"{agent}:{task_id}"


def task_id_of(agent_id: str) -> TaskId:
    """The task id in the `agent_id` of a memory."""
    return TaskId(agent_id.partition(":")[2])


READ_COMMANDS = frozenset(
    {
        *("GET", "TYPE", "PTTL", "LRANGE", "LLEN", "LINDEX", "HGET", "HGETALL", "HEXISTS", "HLEN"),
        *("SMEMBERS", "SISMEMBER", "SCARD", "ZRANGE", "ZRANGEBYSCORE", "ZSCORE", "ZCARD"),
    }
)
"""Commands without side effects. ZRANGE and ZRANGEBYSCORE always come with `WITHSCORES`."""

WRITE_COMMANDS = frozenset(
    {
        *("SET", "INCRBY", "INCRBYFLOAT", "RPUSH", "LPUSH", "LPOP", "RPOP", "LTRIM"),
        *(
            "HSET",
            "HDEL",
            "HINCRBY",
            "SADD",
            "SREM",
            "ZADD",
            "ZREM",
            "ZINCRBY",
            "DEL",
            "PEXPIRE",
            "PERSIST",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Command:
    """One Redis command on one key, with its other arguments.

    PEXPIRE sets the key's time to live in milliseconds; PERSIST and SET remove it. PTTL returns
    the remaining time, -1 without a time to live, -2 without a key.
    """

    name: str
    key: str
    args: tuple[bytes, ...] = ()

    @property
    def is_write(self) -> bool:
        """Whether the command may change the memory."""
        return self.name in WRITE_COMMANDS


Answer: TypeAlias = int | bytes | list[bytes] | None
"""A Redis reply (RESP2): integer, bytes, list or nothing. Scores and floats are text in bytes."""


@dataclass(frozen=True, slots=True)
class MemoryContents:
    """The whole contents of one memory at one instant.

    Attributes:
        items: all keys with their values.
        version: increases with every write.
        now: the memory's clock, in milliseconds since the epoch.
        run_id: the last owner; `None` if the memory was never used or is completely lost.
        fence: the last owner's fence; 0 without an owner.
        lost: keys that should exist but were evicted.
        large: keys too large to read. '' stands for all keys, if their names alone exceed the
            limit.
    """

    items: tuple[Item, ...]
    version: int
    now: int
    run_id: RunId | None = None
    fence: int = 0
    lost_keys: tuple[str, ...] = ()
    oversized_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedSnapshot:
    """A stored snapshot: its manifest and its items in chunks, all compressed.

    `digest` covers all its content. `order` increases with every snapshot of the same memory. Its
    time in milliseconds since the epoch and its number of keys are for people; they are `None` if
    stored only in the manifest, which must confirm them otherwise.
    """

    digest: str
    order: int
    manifest: bytes
    chunks: tuple[bytes, ...]
    taken_at: int | None = field(default=None, compare=False, kw_only=True)
    key_count: int | None = field(default=None, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What an operator sees of a stored snapshot.

    Attributes:
        checkpoint: number of the checkpoint that it was taken for.
        digest: digest of all its content.
        taken_at: when it was taken.
        key_count: number of keys.
    """

    checkpoint: int
    digest: str
    taken_at: datetime
    key_count: int


def snapshot_time(milliseconds: int) -> datetime:
    """The time of a snapshot taken that many milliseconds after the epoch."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def parse_snapshot_time(text: str) -> int:
    """Parse a time in ISO format to milliseconds since the epoch.

    Raises:
        ValueError: it is no time.
    """
    return round(datetime.fromisoformat(text).timestamp() * 1000)


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
