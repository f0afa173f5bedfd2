"""Errors for the refusals that working-memory scripts reply with."""

from __future__ import annotations

from typing import Any

import msgpack

from meshpoint.adapters.redis.holding import decode_name
from meshpoint.adapters.redis.script_calls import ScriptReply
from meshpoint.errors import MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.memory import Owner

_COMMAND_ERROR_PREFIXES = ("WRONGTYPE", "ERR")  # Redis itself fails with OOM, READONLY, …
_MAX_KEYS_SHOWN = 10


def raise_for_reply(owner: Owner, reply: ScriptReply) -> None:
    """Raise the error that `reply` to `owner` stands for, if any."""
    match reply:
        case [b"fenced", run_id, fence]:
            raise fenced_error(owner, decode_name(run_id), int(fence))
        case [b"lost"]:
            raise MemoryLost(f"working memory {owner.agent_id}: all of it is lost")
        case [b"lost", *keys]:
            shown = ", ".join(repr(decode_name(key)) for key in keys[:_MAX_KEYS_SHOWN])
            more = f" and {len(keys) - _MAX_KEYS_SHOWN} more" if len(keys) > _MAX_KEYS_SHOWN else ""
            raise MemoryLost(f"working memory {owner.agent_id}: lost keys: {shown}{more}")
        case [b"refused", key, command, problem]:
            text = decode_name(problem)
            if not text.startswith(_COMMAND_ERROR_PREFIXES):
                raise MemoryUnavailable(f"Redis, memory {owner.agent_id}, key {decode_name(key)!r}: {text.strip()}")
            reason = text.removeprefix("ERR ").removeprefix("WRONGTYPE ")
            raise MemoryRefused(f"memory key {decode_name(key)!r}: {decode_name(command)}: {reason}")
        case [b"stale"]:
            raise MemoryUnavailable(f"Redis, memory {owner.agent_id}: it has changed since it was last read")
        case [b"incomplete"]:
            raise MemoryUnavailable(f"Redis, memory {owner.agent_id}: it lost part of the staged data")
        case _:
            raise_if_damaged(reply)


def raise_if_damaged(reply: ScriptReply) -> None:
    """Raise if the head or the index is not what Meshpoint wrote.

    Raises:
        MemoryUnavailable: names the key, which must be deleted by hand.
    """
    if reply[0] == b"damaged":
        raise MemoryUnavailable(f"Redis: {decode_name(reply[1])} was not written by Meshpoint; delete it")


def unpack_reply(reply: Any) -> ScriptReply:
    """Unpack a MessagePack reply of the `READ` script.

    Raises:
        MemoryUnavailable: like `raise_if_damaged`.
    """
    unpacked: ScriptReply = msgpack.unpackb(reply, raw=True)
    raise_if_damaged(unpacked)
    return unpacked


def fenced_error(owner: Owner, run_id: str, fence: int) -> MemoryFenced:
    """An error that says which run owns the memory."""
    return MemoryFenced(
        f"working memory {owner.agent_id}: owned by run {run_id} with fence {fence}, "
        f"not by run {owner.run_id} with fence {owner.fence}"
    )
