"""Calls of scripts, sent together; whether Redis knows a script makes no difference."""

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
"""What a script answers: a word in bytes, and what belongs to it."""

PIPELINE_BYTES = 4 * 2**20
"""About how much is sent at once."""


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script with its keys and arguments; all of them in one slot of a cluster."""

    script: Script
    keys: tuple[bytes, ...]
    args: tuple[bytes | int, ...]

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(len(arg) if isinstance(arg, bytes) else 8 for arg in self.args)


async def run_scripts(
    connection: RedisConnection, subject: str, calls: Sequence[ScriptCall], *, by_digest: bool = True
) -> list[ScriptReply]:
    """Do `calls` in one round trip; what each answered. With `by_digest`, only the digests of the scripts are sent.

    Raises:
        NoScriptError: Redis does not know a script; the other calls may be done. Never if not `by_digest`.
        MemoryUnavailable: Redis did not answer, or not as expected; any call may be done.
    """
    try:
        return await connection.execute(subject, lambda redis: _send(redis, calls, by_digest))
    except NoScriptError:
        raise
    except ResponseError as error:
        raise MemoryUnavailable(f"Redis, {subject}: {error}") from error


async def run_idempotent(connection: RedisConnection, subject: str, calls: Sequence[ScriptCall]) -> list[ScriptReply]:
    """As `run_scripts`, for calls that may be done twice as well as once, or for a single call."""
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
