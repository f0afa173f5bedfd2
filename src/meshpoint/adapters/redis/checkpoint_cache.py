"""Cached copies of checkpoints in Redis.

A copy is a format marker byte and the checkpoint as JSON, sealed by `seal`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Unpack

import zstandard
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from meshpoint.adapters.redis.connection import RedisConnection, RequestLimits
from meshpoint.adapters.redis.seal import Seal, Secret, is_sealed, open_copy
from meshpoint.errors import CheckpointError
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.own_threads import run_in_own_thread
from meshpoint.ports.sealer import Sealer
from meshpoint.ports.task_store import CacheUnavailable, LeftOut

_MAX_CONNECTIONS = 4
_TIMEOUT = timedelta(milliseconds=500)
_PLAIN, _ZSTD = b"\x02", b"\x03"  # an envelope also begins with 2, but then with 1 instead of "{"
"""The previous release writes 0 and 1, and its copies lack a part of the checkpoint.

Neither release reads the copies of the other: they read the database, which both can.
"""
_LEFT_OUT = b"\x04"
"""The copy of a checkpoint that is only in the database. Releases without it read the database."""
_MIN_COMPRESS_BYTES = 1024
_MIN_THREAD_BYTES = 256 * 1024

_ALWAYS_COPIED = 128 * 1024
_MAX_REPEATED = 4
"""Larger records are copied only if they have at most four times the characters of changed ones.

Otherwise a task with many subtasks would send all of its records to Redis with each of them.
"""

MAX_COPY_BYTES = 16 * 1024 * 1024
"""Maximum size of a copy, in bytes.

Larger checkpoints are stored only in the database; larger values in Redis are ignored."""


class RedisCheckpointCache:
    """Copies of checkpoints, one per operation and agent.

    The key is `{namespace}:checkpoint:{analysis_id}:{agent_type}`. For one event loop.

    Args:
        secret: returns the key that authenticates copies. A copy written without it is never used.
        ttl: how long a copy is kept after it was written.
        sealer: encrypts copies. Copies in the clear are then never used.
        limits: when requests to Redis fail.

    Raises:
        ConfigurationError: `url` is not a Redis URL.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        secret: Secret,
        ttl: timedelta = timedelta(days=7),
        sealer: Sealer | None = None,
        **limits: Unpack[RequestLimits],
    ) -> None:
        self._connection = RedisConnection(
            url,
            setting="agent.checkpoint_cache_url",
            unavailable=CacheUnavailable,
            connections=_MAX_CONNECTIONS,
            **(RequestLimits(timeout=_TIMEOUT) | limits),
        )
        self._namespace = namespace
        self._seal = Seal(secret, CacheUnavailable)
        self._ttl, self._sealer = ttl, sealer

    async def put(self, checkpoint: AgentCheckpoint) -> None:
        """Replace the copy, which expires after `ttl`.

        A checkpoint with large records, few of which have changed, is left out.

        Raises:
            CheckpointError: the checkpoint exceeds `MAX_COPY_BYTES`.
        """
        key = self._key(checkpoint.operation_id, checkpoint.agent)
        self._connection.raise_if_unavailable(key)
        content = await encode_checkpoint(checkpoint) if _is_copied(checkpoint) else _LEFT_OUT
        copy = await self._seal.seal(key, self._encrypt(key, checkpoint.agent, content))
        if len(copy) > MAX_COPY_BYTES:
            raise CheckpointError(
                f"{key}: {len(copy):,} bytes exceed the limit of {MAX_COPY_BYTES:,} for copies"
            )
        await self._execute(key, lambda redis: redis.set(key, copy, px=self._ttl))

    async def get(
        self, operation_id: TaskId, agent: AgentName
    ) -> AgentCheckpoint | LeftOut | None:
        """The copy, or `None` if the key is missing or empty."""
        key = self._key(operation_id, agent)
        stored = await self._execute(
            key, lambda redis: redis.getrange(key, 0, MAX_COPY_BYTES)
        )  # one byte over the limit
        if not stored:
            return None
        if len(stored) > MAX_COPY_BYTES:
            raise CheckpointError(
                f"{key}: larger than {MAX_COPY_BYTES:,} bytes, so not written by Meshpoint"
            )
        try:
            content = self._decrypt(key, agent, await self._seal.unseal(key, stored))
            if content == _LEFT_OUT:
                return LeftOut()
            checkpoint = await decode_checkpoint(content)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from error
        if (checkpoint.operation_id, checkpoint.agent) != (operation_id, agent):
            raise CheckpointError(
                f"{key}: belongs to operation {checkpoint.operation_id!r} of {checkpoint.agent!r}"
            )
        return checkpoint

    async def forget(self, operation_id: TaskId, agent: AgentName) -> None:
        """Delete the copy."""
        key = self._key(operation_id, agent)
        await self._execute(key, lambda redis: redis.unlink(key))

    async def close(self) -> None:
        """Release every connection."""
        await self._connection.close()

    def _encrypt(self, key: str, agent: AgentName, content: bytes) -> bytes:
        if self._sealer is None or self._sealer.key_id(agent) is None:
            return content
        return self._sealer.seal(content, ("redis.checkpoint", agent, key))

    def _decrypt(self, key: str, agent: AgentName, content: bytes) -> bytes:
        if self._sealer is None or (not is_sealed(content) and self._sealer.key_id(agent) is None):
            return content
        return open_copy(self._sealer, content, ("redis.checkpoint", agent, key))

    def _key(self, operation_id: TaskId, agent: AgentName) -> str:
        return f"{self._namespace}:checkpoint:{operation_id}:{agent}"

    async def _execute(self, key: str, request: Callable[[Redis], Awaitable[Any]]) -> Any:
        """Return the reply of Redis to `request`.

        Raises:
            CacheUnavailable: it did not answer, or is not used after a recent failure.
            CheckpointError: the key's value is not a string.
        """
        try:
            return await self._connection.execute(key, request)
        except ResponseError as error:
            raise CheckpointError(f"{key}: not a string") from error


def _is_copied(checkpoint: AgentCheckpoint) -> bool:
    sizes = {record.name: len(record.result or "") for record in checkpoint.subtasks}
    total, changed = sum(sizes.values()), checkpoint.changed
    if total <= _ALWAYS_COPIED or changed is None:
        return True
    return total <= _MAX_REPEATED * sum(sizes.get(name, 0) for name in changed)


async def encode_checkpoint(checkpoint: AgentCheckpoint) -> bytes:
    """Encode `checkpoint` for storage, compressed if that makes it smaller.

    Raises:
        CheckpointError: it contains values that JSON cannot represent.
    """
    try:
        content = checkpoint.model_dump_json().encode()
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.seq} of {checkpoint.operation_id}: {_first_line(error)}"
        ) from error
    return (
        _pack(content)
        if len(content) < _MIN_THREAD_BYTES
        else await run_in_own_thread(_pack, content)
    )


async def decode_checkpoint(stored: bytes) -> AgentCheckpoint:
    """Decode a copy. Pass only authenticated bytes: decompressing others could exhaust memory.

    Raises:
        CheckpointError: this release cannot read it as a checkpoint.
    """
    return (
        _unpack(stored)
        if len(stored) < _MIN_THREAD_BYTES
        else await run_in_own_thread(_unpack, stored)
    )


def _pack(content: bytes) -> bytes:
    body = _PLAIN + content
    if len(content) >= _MIN_COMPRESS_BYTES:
        body = min(body, _ZSTD + zstandard.compress(content, level=1), key=len)
    return body


def _unpack(stored: bytes) -> AgentCheckpoint:
    marker, content = stored[:1], stored[1:]
    if marker not in {_PLAIN, _ZSTD}:
        raise CheckpointError(f"unknown format marker {marker!r}")
    try:
        return AgentCheckpoint.model_validate_json(
            content if marker == _PLAIN else zstandard.decompress(content)
        )
    except (ValueError, zstandard.ZstdError) as error:
        raise CheckpointError(f"not a valid checkpoint: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
