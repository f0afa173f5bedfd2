"""Snapshots of working memories in Redis, apart from where the memories live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from redis.exceptions import NoScriptError

from meshpoint.adapters.redis import script_calls
from meshpoint.adapters.redis.connection import RedisConnection
from meshpoint.adapters.redis.holding import name_of
from meshpoint.adapters.redis.script_calls import Call, Reply
from meshpoint.adapters.redis.scripts import APPEND_CHUNKS, GET_DIGEST, GET_SNAPSHOT, PUT_SNAPSHOT
from meshpoint.adapters.redis.seal import SIZE, Seal, Secret
from meshpoint.errors import CheckpointError, ConsistencyError, MemoryUnavailable
from meshpoint.model.ids import new_id
from meshpoint.model.memory import Packed

LARGEST = 129 * 2**20
"""Maximum size of a snapshot, in bytes. Larger ones are stored only in the database; larger values are refused."""

_CONNECTIONS = 8
_LONGEST_DIGEST = 200
_CHUNK = 8  # overhead per chunk, in bytes
_STAGED = timedelta(hours=1)
_MILLISECOND = timedelta(milliseconds=1)


class RedisSnapshots:
    """A `meshpoint.ports.working_memory.SnapshotStore` in Redis 6.0 or later.

        {namespace}:l1_snapshot:{A}         the chunks, A being the agent id in braces
        {namespace}:l1_snapshot_meta:{A}    digest, order, number of chunks, manifest behind its authentication code

    `secret` returns the key for that code; a snapshot written without it is never used.
    A snapshot is limited to `largest` bytes and expires after `ttl`. A request takes at most `timeout`. After a
    failed request, Redis is not used for `retry_after`. `clock` counts seconds; `time_limit` bounds a request.
    For one event loop.

    Raises:
        ConfigurationError: `url` is none of a Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        secret: Secret,
        largest: int = LARGEST,
        ttl: timedelta = timedelta(days=14),
        timeout: timedelta = timedelta(seconds=5),
        retry_after: timedelta = timedelta(seconds=5),
        clock: Callable[[], float] = time.monotonic,
        time_limit: Callable[[float], asyncio.Timeout] = asyncio.timeout,
    ) -> None:
        self._connection = RedisConnection(
            url,
            setting="agent.memory_snapshot_url",
            unavailable=MemoryUnavailable,
            timeout=timeout,
            retry_after=retry_after,
            clock=clock,
            connections=_CONNECTIONS,
            time_limit=time_limit,
        )
        self._namespace = namespace
        self._seal = Seal(secret, MemoryUnavailable)
        self._largest, self._ttl = largest, ttl

    async def put(self, agent_id: str, packed: Packed) -> bool:
        """Keep it in place of the one that is there, unless that has a higher `order`; whether so.

        A few megabytes are one round trip. A failure at any point leaves the old snapshot, or this one.

        Raises:
            ConsistencyError: it exceeds `largest`, so it could not be read back.
        """
        if (size := _size(packed)) > self._largest:
            problem = f"{size:,} bytes exceed the limit of {self._largest:,} for snapshots in Redis"
            raise ConsistencyError(f"{_name(agent_id)}: {problem}")
        try:
            return await self._put(agent_id, packed, known=True)
        except NoScriptError:
            return await self._put(agent_id, packed, known=False)

    async def get(self, agent_id: str) -> Packed | None:
        """The one that is there; None: none. What its chunks hold may be damaged.

        Raises:
            ConsistencyError: there is something, but nothing that could be a snapshot.
        """
        chunks, meta = self._keys(agent_id)
        [reply] = await script_calls.repeat(
            self._connection, _name(agent_id), [Call(GET_SNAPSHOT, (chunks, meta), (self._largest,))]
        )
        if reply[0] == b"damaged":
            _refuse(reply[1], "it is of another type")
        if reply[0] == b"large":
            _refuse(reply[1], f"larger than {self._largest:,} bytes, so not written by Meshpoint")
        return None if reply[0] == b"none" else await self._opened(agent_id, _packed(meta, *reply[1:]))

    async def digest(self, agent_id: str) -> str | None:
        """That of the one that is there, as it says itself; None: none."""
        _, meta = self._keys(agent_id)
        asked = Call(GET_DIGEST, (meta,), (_LONGEST_DIGEST,))
        [reply] = await script_calls.repeat(self._connection, _name(agent_id), [asked])
        return name_of(reply[1]) if reply[0] == b"ok" else None

    async def forget(self, agent_id: str) -> None:
        """Delete it."""
        await self._connection.ask(_name(agent_id), lambda redis: redis.unlink(*self._keys(agent_id)))

    async def close(self) -> None:
        """Release every connection."""
        await self._connection.close()

    def _keys(self, agent_id: str) -> tuple[bytes, bytes]:
        """The keys of the chunks and of what is said of them, both in one slot of a cluster."""
        return (
            f"{self._namespace}:l1_snapshot:{{{agent_id}}}".encode(),
            f"{self._namespace}:l1_snapshot_meta:{{{agent_id}}}".encode(),
        )

    async def _put(self, agent_id: str, packed: Packed, *, known: bool) -> bool:
        chunks, meta = self._keys(agent_id)
        staged = chunks + f":{new_id()}".encode()
        batch: list[Call] = []
        for part in _parts(packed.chunks):
            if batch:
                await self._run(agent_id, batch, known=known)
            batch = [Call(APPEND_CHUNKS, (staged,), (_STAGED // _MILLISECOND, *part))]
        manifest = await self._seal.sealed(self._sealed_name(agent_id, packed), packed.manifest)
        says = (packed.digest.encode(), packed.order, len(packed.chunks), manifest)
        swap = Call(PUT_SNAPSHOT, (chunks, meta, staged), (self._ttl // _MILLISECOND, *says))
        *_, [answer, *_] = await self._run(agent_id, [*batch, swap], known=known)
        if answer == b"incomplete":
            raise MemoryUnavailable(f"Redis, {_name(agent_id)}: it lost some of what it was given to keep")
        return bool(answer == b"ok")

    async def _opened(self, agent_id: str, packed: Packed) -> Packed:
        """Verify the manifest of `packed`. It has a digest of every key, so chunks need no separate codes."""
        _, meta = self._keys(agent_id)
        try:
            manifest = await self._seal.opened(self._sealed_name(agent_id, packed), packed.manifest)
        except CheckpointError as error:
            raise ConsistencyError(f"{name_of(meta)} is not authentic: {error}") from error
        return replace(packed, manifest=manifest)

    def _sealed_name(self, agent_id: str, packed: Packed) -> str:
        return f"{self._namespace}:{agent_id}:{packed.digest}:{packed.order}"

    async def _run(self, agent_id: str, calls: Sequence[Call], *, known: bool) -> list[Reply]:
        return await script_calls.run(self._connection, _name(agent_id), calls, known=known)


def _name(agent_id: str) -> str:
    return f"snapshot of memory {agent_id}"


def _size(packed: Packed) -> int:
    """Size in bytes, at least as large as `GET_SNAPSHOT` counts it."""
    return SIZE + len(packed.digest) + 40 + len(packed.manifest) + sum(len(chunk) + _CHUNK for chunk in packed.chunks)


def _parts(chunks: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The chunks, as many at a time as are sent at once."""
    part: list[bytes] = []
    size = 0
    for chunk in chunks:
        if part and size + len(chunk) > script_calls.PIPELINE_BYTES:
            yield part
            part, size = [], 0
        part.append(chunk)
        size += len(chunk)
    if part:
        yield part


def _packed(meta: bytes, fields: Sequence[bytes | None], chunks: Sequence[bytes]) -> Packed:
    digest, order, count, manifest = fields
    if digest is None or order is None or count is None or manifest is None:
        _refuse(meta, "a field is missing")
    try:
        packed = Packed(digest.decode(), int(order), manifest, tuple(chunks))
        expected = int(count)
    except ValueError:
        _refuse(meta, "a field is damaged")
    if len(chunks) != expected:
        _refuse(meta, f"it is {len(chunks)} chunks instead of {expected}")
    return packed


def _refuse(key: bytes, problem: str) -> NoReturn:
    raise ConsistencyError(f"{name_of(key)} is no snapshot: {problem}")
