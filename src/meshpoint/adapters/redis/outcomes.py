"""What the scripts of a working memory say when they did not do what was asked, as errors."""

from __future__ import annotations

from typing import Any

import msgpack

from meshpoint.adapters.redis.holding import name_of
from meshpoint.adapters.redis.script_calls import Reply
from meshpoint.errors import MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.memory import Owner

_OF_THE_COMMAND = ("WRONGTYPE", "ERR")  # of Redis itself are OOM, READONLY, MISCONF, …
_TOLD = 10


def check(owner: Owner, reply: Reply) -> None:
    """Raise what `reply` to `owner` says, unless it is well."""
    match reply:
        case [b"fenced", run_id, fence]:
            raise fenced(owner, name_of(run_id), int(fence))
        case [b"lost"]:
            raise MemoryLost(f"working memory {owner.agent_id}: all of it is lost")
        case [b"lost", *keys]:
            told = ", ".join(repr(name_of(key)) for key in keys[:_TOLD])
            more = f" and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
            raise MemoryLost(f"working memory {owner.agent_id}: lost are the keys {told}{more}")
        case [b"refused", key, command, problem]:
            text = name_of(problem)
            if not text.startswith(_OF_THE_COMMAND):
                raise MemoryUnavailable(f"Redis, memory {owner.agent_id}, key {name_of(key)!r}: {text.strip()}")
            reason = text.removeprefix("ERR ").removeprefix("WRONGTYPE ")
            raise MemoryRefused(f"memory key {name_of(key)!r}: {name_of(command)}: {reason}")
        case [b"stale"]:
            raise MemoryUnavailable(f"Redis, memory {owner.agent_id}: it has changed since it was looked at")
        case [b"incomplete"]:
            raise MemoryUnavailable(f"Redis, memory {owner.agent_id}: it lost some of what it was given to restore")
        case _:
            refuse_damaged(reply)


def refuse_damaged(reply: Reply) -> None:
    """Raise if what the scripts build on is something else.

    Raises:
        MemoryUnavailable: names the key; nothing but deleting it helps.
    """
    if reply[0] == b"damaged":
        raise MemoryUnavailable(f"Redis: {name_of(reply[1])} is not what Meshpoint has put there: delete it")


def opened(reply: Any) -> Reply:
    """What the script that reads has packed.

    Raises:
        MemoryUnavailable: as `refuse_damaged`.
    """
    read: Reply = msgpack.unpackb(reply, raw=True)
    refuse_damaged(read)
    return read


def fenced(owner: Owner, run_id: str, fence: int) -> MemoryFenced:
    """Another run has the memory."""
    return MemoryFenced(
        f"working memory {owner.agent_id}: run {run_id} with fence {fence} has it, "
        f"not run {owner.run_id} with fence {owner.fence}"
    )
