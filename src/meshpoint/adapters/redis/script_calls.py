"""Script calls, and the errors and contents that their replies stand for.

Calls are sent as one pipeline, and repeated in full if Redis does not know a script yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from meshpoint.adapters.redis.connection import RedisConnection
from meshpoint.adapters.redis.scripts import Script
from meshpoint.errors import MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.ids import RunId
from meshpoint.model.memory import Content, Item, Kind, MemoryContents, Owner

ScriptReply: TypeAlias = list[Any]
"""A script's reply: a word as bytes, then its details."""

PIPELINE_BYTES = 4 * 2**20
"""Approximate limit on the bytes of one pipeline."""

_COMMAND_ERROR_PREFIXES = ("WRONGTYPE", "ERR")
"""Error codes of a wrong command; Redis itself fails with OOM, READONLY, …

In the protocol of Redis the code is the first word of the text.
"""
_MAX_KEYS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script with its keys and arguments. All keys are in the same cluster slot."""

    script: Script
    keys: tuple[bytes, ...]
    args: tuple[bytes | int, ...]

    @property
    def size(self) -> int:
        """Approximate size of the arguments, in bytes."""
        return sum(len(arg) if isinstance(arg, bytes) else 8 for arg in self.args)


async def run_scripts(
    connection: RedisConnection,
    subject: str,
    calls: Sequence[ScriptCall],
    *,
    by_digest: bool = True,
) -> list[ScriptReply]:
    """Run `calls` in one round trip and return their replies.

    With `by_digest`, only the digests of the scripts are sent.

    Raises:
        NoScriptError: Redis does not know a script; other calls may have run. Only `by_digest`.
        MemoryUnavailable: Redis did not answer, or failed a call; any call may have run.
    """
    try:
        return await connection.execute(subject, lambda redis: _send(redis, calls, by_digest))
    except NoScriptError:
        raise
    except ResponseError as error:
        raise MemoryUnavailable(f"Redis, {subject}: {error}") from error


async def run_idempotent(
    connection: RedisConnection, subject: str, calls: Sequence[ScriptCall]
) -> list[ScriptReply]:
    """Like `run_scripts`, for a single call, or for calls that may safely run twice."""
    try:
        return await run_scripts(connection, subject, calls)
    except NoScriptError:
        return await run_scripts(connection, subject, calls, by_digest=False)


async def _send(redis: Redis, calls: Sequence[ScriptCall], by_digest: bool) -> list[ScriptReply]:
    async with redis.pipeline(transaction=False) as pipeline:
        for call in calls:
            script = ("EVALSHA", call.script.sha) if by_digest else ("EVAL", call.script.text)
            pipeline.execute_command(*script, len(call.keys), *call.keys, *call.args)
        replies: list[ScriptReply] = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def raise_for_reply(owner: Owner, reply: ScriptReply) -> None:
    """Raise the error that `reply` to `owner` stands for, if any."""
    match reply:
        case [b"fenced", run_id, fence]:
            raise fenced_error(owner, decode_name(run_id), int(fence))
        case [b"lost"]:
            raise MemoryLost(f"working memory {owner.agent_id}: all of it is lost")
        case [b"lost", *keys]:
            shown = ", ".join(repr(decode_name(key)) for key in keys[:_MAX_KEYS_SHOWN])
            more = (
                f" and {len(keys) - _MAX_KEYS_SHOWN} more" if len(keys) > _MAX_KEYS_SHOWN else ""
            )
            raise MemoryLost(f"working memory {owner.agent_id}: lost keys: {shown}{more}")
        case [b"refused", key, command, problem]:
            text = decode_name(problem)
            if not text.startswith(_COMMAND_ERROR_PREFIXES):
                raise MemoryUnavailable(
                    f"Redis, memory {owner.agent_id}, key {decode_name(key)!r}: {text.strip()}"
                )
            reason = text.removeprefix("ERR ").removeprefix("WRONGTYPE ")
            raise MemoryRefused(
                f"memory key {decode_name(key)!r}: {decode_name(command)}: {reason}"
            )
        case [b"stale"]:
            raise MemoryUnavailable(
                f"Redis, memory {owner.agent_id}: it has changed since it was last read"
            )
        case [b"incomplete"]:
            raise MemoryUnavailable(
                f"Redis, memory {owner.agent_id}: it lost part of the staged data"
            )
        case _:
            raise_if_damaged(reply)


def raise_if_damaged(reply: ScriptReply) -> None:
    """Raise if the head or the index is not what Meshpoint wrote.

    Raises:
        MemoryUnavailable: names the key, which must be deleted by hand.
    """
    if reply[0] == b"damaged":
        raise MemoryUnavailable(
            f"Redis: {decode_name(reply[1])} was not written by Meshpoint; delete it"
        )


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


def is_consistent(replies: Sequence[ScriptReply]) -> bool:
    """Whether replies for consecutive ranks of a memory's index show it at one instant.

    They do not if the memory was written between them, or if they do not cover all keys.
    """
    state, _, run_id, fence, version, total, _ = replies[-1]
    if any([reply[0], *reply[2:6]] != [state, run_id, fence, version, total] for reply in replies):
        return False
    # The index also has a member that is not a key.
    return bool(state != b"ok" or sum(len(reply[6]) for reply in replies) == total - 1)


def parse_contents(replies: Sequence[ScriptReply]) -> MemoryContents:
    """The content of a memory, from consistent replies.

    Keys that expired before the last reply are left out.
    """
    state, _, run_id, fence, version, _, _ = replies[-1]
    now = max(reply[1] for reply in replies)
    if state != b"ok":
        return MemoryContents((), version, now)
    items, lost, large = [], [], []
    for key, score, kind, *content in (entry for reply in replies for entry in reply[6]):
        name, ends = decode_name(key), float(score)
        if ends <= now:
            continue
        if kind == b"large":
            large.append(name)
        elif not content:
            lost.append(name)
        else:
            expires_at = None if ends == float("inf") else int(ends)
            items.append(
                Item(name, Kind(kind.decode()), _CONTENT_FROM_REPLY[kind](content[0]), expires_at)
            )
    run = RunId(decode_name(run_id))
    return MemoryContents(tuple(items), version, now, run, int(fence), tuple(lost), tuple(large))


def decode_name(key: bytes) -> str:
    """The name of a key. Bytes that are not UTF-8 are escaped."""
    return key.decode(errors="backslashreplace")


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: Sequence[bytes]) -> dict[bytes, float]:
    # Redis keeps the sign of -0.0 only in large sorted sets. Here it is always 0.0.
    return {member: float(score) + 0.0 for member, score in _pairs(flat).items()}


_CONTENT_FROM_REPLY: Mapping[bytes, Callable[[Any], Content]] = {
    b"string": bytes,
    b"list": tuple,
    b"hash": _pairs,
    b"set": frozenset,
    b"zset": _scores,
}
