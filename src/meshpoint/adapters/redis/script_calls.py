"""Script calls, sent as one pipeline and repeated in full if Redis does not know a script yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from meshpoint.adapters.redis.connection import RedisConnection
from meshpoint.adapters.redis.scripts import Script
from meshpoint.errors import MemoryUnavailable

ScriptReply: TypeAlias = list[Any]
"""A script's reply: a word as bytes, then its details."""

PIPELINE_BYTES = 4 * 2**20
"""Approximate limit on the bytes of one pipeline."""


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
    connection: RedisConnection, subject: str, calls: Sequence[ScriptCall], *, by_digest: bool = True
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


async def run_idempotent(connection: RedisConnection, subject: str, calls: Sequence[ScriptCall]) -> list[ScriptReply]:
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
