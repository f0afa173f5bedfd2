"""What the scripts of a working memory say when they did not do what was asked, as errors."""

from __future__ import annotations

from typing import Any

import msgpack

from meshpoint.adapters.redis.holding import decode_name
from meshpoint.adapters.redis.script_calls import ScriptReply
from meshpoint.errors import MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.memory import Owner

_COMMAND_ERROR_PREFIXES = ("WRONGTYPE", "ERR")  # of Redis itself are OOM, READONLY, MISCONF, …
_MAX_KEYS_SHOWN = 10


def raise_for_reply(owner: Owner, reply: ScriptReply) -> None:
    """Raise what `reply` to `owner` says, unless it is well."""
    match reply:
        case [b"fenced", run_id, fence]:
            raise fenced_error(owner, decode_name(run_id), int(fence))
        case [b"lost"]:
            raise MemoryLost(f"working memory {owner.agent_id}: all of it is lost")
        case [b"lost", *keys]:
            shown = ", ".join(repr(decode_name(key)) for key in keys[:_MAX_KEYS_SHOWN])
            more = f" and {len(keys) - _MAX_KEYS_SHOWN} more" if len(keys) > _MAX_KEYS_SHOWN else ""
            raise MemoryLost(f"working memory {owner.agent_id}: lost are the keys {shown}{more}")
        case [b"refused", key, command, problem]:
            text = decode_name(problem)
            if not text.startswith(_COMMAND_ERROR_PREFIXES):
                raise MemoryUnavailable(f"Redis, memory {owner.agent_id}, key {decode_name(key)!r}: {text.strip()}")
            reason = text.removeprefix("ERR ").removeprefix("WRONGTYPE ")
            raise MemoryRefused(f"memory key {decode_name(key)!r}: {decode_name(command)}: {reason}")
        case [b"stale"]:
            raise MemoryUnavailable(f"Redis, memory {owner.agent_id}: it has changed since it was looked at")
        case [b"incomplete"]:
            raise MemoryUnavailable(f"Redis, memory {owner.agent_id}: it lost some of what it was given to restore")
        case _:
            raise_if_damaged(reply)


def raise_if_damaged(reply: ScriptReply) -> None:
    """Raise if what the scripts build on is something else.

    Raises:
        MemoryUnavailable: names the key; nothing but deleting it helps.
    """
    if reply[0] == b"damaged":
        raise MemoryUnavailable(f"Redis: {decode_name(reply[1])} is not what Meshpoint has put there: delete it")


def unpack_reply(reply: Any) -> ScriptReply:
    """What the script that reads has packed.

    Raises:
        MemoryUnavailable: as `raise_if_damaged`.
    """
    unpacked: ScriptReply = msgpack.unpackb(reply, raw=True)
    raise_if_damaged(unpacked)
    return unpacked


def fenced_error(owner: Owner, run_id: str, fence: int) -> MemoryFenced:
    """Another run has the memory."""
    return MemoryFenced(
        f"working memory {owner.agent_id}: run {run_id} with fence {fence} has it, "
        f"not run {owner.run_id} with fence {owner.fence}"
    )
