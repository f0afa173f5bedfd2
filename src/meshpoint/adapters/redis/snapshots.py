"""Snapshots of working memories in Redis, stored separately from the memories themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn, Unpack

from redis.exceptions import NoScriptError

from meshpoint.adapters.encryption import from_text, is_text_envelope, to_text
from meshpoint.adapters.redis import script_calls
from meshpoint.adapters.redis.connection import RedisConnection, RequestLimits
from meshpoint.adapters.redis.script_calls import ScriptCall, ScriptReply, decode_name
from meshpoint.adapters.redis.scripts import APPEND_CHUNKS, GET_DIGEST, GET_SNAPSHOT, PUT_SNAPSHOT
from meshpoint.adapters.redis.seal import CODE_BYTES, Seal, Secret, open_copy
from meshpoint.errors import (
    CheckpointError,
    ConsistencyError,
    KeyMissing,
    MemoryUnavailable,
)
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import new_id
from meshpoint.model.memory import PackedSnapshot, parse_snapshot_time, snapshot_time
from meshpoint.ports.sealer import Sealer

_MAX_SNAPSHOT_BYTES = 129 * 2**20
"""Maximum size of a snapshot, in bytes.

Larger snapshots are stored only in the database; larger values in Redis are refused."""

_MAX_CONNECTIONS = 8
_MAX_DIGEST_BYTES = 200
_MAX_NUMBERS_BYTES = 100  # order, chunk count, timestamp, key_count
_CHUNK_OVERHEAD = 8  # counted per chunk, in bytes
_STAGING_TTL = timedelta(hours=1)
_MILLISECOND = timedelta(milliseconds=1)


class RedisSnapshotStore:
    """A `meshpoint.ports.working_memory.SnapshotStore` in Redis 6.0 or later.

        {namespace}:l1_snapshot:{A}         the chunks; A is the agent id in braces
        {namespace}:l1_snapshot_meta:{A}    digest, order, chunk count, authenticated manifest;
                                            for people: timestamp, key_count, which the manifest
                                            must confirm

    For one event loop.

    Args:
        secret: returns the key that authenticates manifests. A snapshot written without it is
            never used.
        max_bytes: maximum size of a snapshot.
        ttl: how long a snapshot is kept after it was written.
        sealer: encrypts snapshots. Snapshots in the clear are then never used.
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
        max_bytes: int = _MAX_SNAPSHOT_BYTES,
        ttl: timedelta = timedelta(days=14),
        sealer: Sealer | None = None,
        **limits: Unpack[RequestLimits],
    ) -> None:
        self._connection = RedisConnection(
            url,
            setting="agent.memory_snapshot_url",
            unavailable=MemoryUnavailable,
            connections=_MAX_CONNECTIONS,
            **limits,
        )
        self._namespace = namespace
        self._seal = Seal(secret, MemoryUnavailable)
        self._max_bytes, self._ttl, self._sealer = max_bytes, ttl, sealer

    async def put(self, agent_id: str, packed: PackedSnapshot) -> bool:
        """Replace the stored snapshot unless that has a higher `order`. Returns whether it did.

        A few megabytes take one round trip. A failure at any point leaves either the old or the
        new snapshot.

        Raises:
            ConsistencyError: it exceeds `max_bytes`, so it could not be read back.
        """
        if (size := _size(packed)) > self._max_bytes:
            problem = (
                f"{size:,} bytes exceed the limit of {self._max_bytes:,} for snapshots in Redis"
            )
            raise ConsistencyError(f"{_name(agent_id)}: {problem}")
        if self._sealer is not None and self._sealer.key_id() is not None:
            packed = _encrypt(self._sealer, agent_id, packed)
        try:
            return await self._put(agent_id, packed, by_digest=True)
        except NoScriptError:
            return await self._put(agent_id, packed, by_digest=False)

    async def get(self, agent_id: str) -> PackedSnapshot | None:
        """The stored snapshot, or `None`. Its chunks may be damaged; its manifest is verified.

        Raises:
            ConsistencyError: the stored data is damaged, too large, or not authentic.
        """
        chunks, meta = self._keys(agent_id)
        [reply] = await script_calls.run_idempotent(
            self._connection,
            _name(agent_id),
            [ScriptCall(GET_SNAPSHOT, (chunks, meta), (self._max_bytes,))],
        )
        if reply[0] == b"damaged":
            _raise_damaged(reply[1], "it has the wrong type")
        if reply[0] == b"large":
            _raise_damaged(
                reply[1], f"larger than {self._max_bytes:,} bytes, so not written by Meshpoint"
            )
        return (
            None
            if reply[0] == b"none"
            else await self._verify(agent_id, _to_packed(meta, *reply[1:]))
        )

    async def digest(self, agent_id: str) -> str | None:
        """The digest recorded with the stored snapshot, unverified, or `None`."""
        _, meta = self._keys(agent_id)
        call = ScriptCall(GET_DIGEST, (meta,), (_MAX_DIGEST_BYTES,))
        [reply] = await script_calls.run_idempotent(self._connection, _name(agent_id), [call])
        if reply[0] != b"ok":
            return None
        found = decode_name(reply[1])
        if self._sealer is None or not is_text_envelope(found):
            return found
        try:
            return _open_digest(self._sealer, agent_id, found)
        except (KeyMissing, ValueError):
            return None

    async def forget(self, agent_id: str) -> None:
        """Delete the snapshot."""
        await self._connection.execute(
            _name(agent_id), lambda redis: redis.unlink(*self._keys(agent_id))
        )

    async def close(self) -> None:
        """Release every connection."""
        await self._connection.close()

    def _keys(self, agent_id: str) -> tuple[bytes, bytes]:
        """The keys of the chunks and of their metadata, both in one cluster slot."""
        return (
            f"{self._namespace}:l1_snapshot:{{{agent_id}}}".encode(),
            f"{self._namespace}:l1_snapshot_meta:{{{agent_id}}}".encode(),
        )

    async def _put(self, agent_id: str, packed: PackedSnapshot, *, by_digest: bool) -> bool:
        chunks, meta = self._keys(agent_id)
        staged = chunks + f":{new_id()}".encode()
        batch: list[ScriptCall] = []
        for part in _chunk_batches(packed.chunks):
            if batch:
                await self._run(agent_id, batch, by_digest=by_digest)
            batch = [ScriptCall(APPEND_CHUNKS, (staged,), (_STAGING_TTL // _MILLISECOND, *part))]
        manifest = await self._seal.seal(self._sealed_name(agent_id, packed), packed.manifest)
        fields: tuple[bytes | int, ...] = (
            *(packed.digest.encode(), packed.order, len(packed.chunks), manifest),
            *_fields_for_people(packed),
        )
        swap = ScriptCall(
            PUT_SNAPSHOT, (chunks, meta, staged), (self._ttl // _MILLISECOND, *fields)
        )
        *_, [answer, *_] = await self._run(agent_id, [*batch, swap], by_digest=by_digest)
        if answer == b"incomplete":
            raise MemoryUnavailable(f"Redis, {_name(agent_id)}: it lost part of the staged data")
        return bool(answer == b"ok")

    async def _verify(self, agent_id: str, packed: PackedSnapshot) -> PackedSnapshot:
        """Verify the manifest. It has a digest of every key, so chunks need no authentication."""
        _, meta = self._keys(agent_id)
        try:
            manifest = await self._seal.unseal(
                self._sealed_name(agent_id, packed), packed.manifest
            )
        except CheckpointError as error:
            raise ConsistencyError(f"{decode_name(meta)} is not authentic: {error}") from error
        packed = replace(packed, manifest=manifest)
        if self._sealer is None:
            return packed
        if not is_text_envelope(packed.digest) and self._sealer.key_id() is None:
            return packed
        try:
            return _decrypt(self._sealer, agent_id, packed)
        except (CheckpointError, KeyMissing, ValueError) as error:
            raise ConsistencyError(f"{decode_name(meta)} cannot be opened: {error}") from error

    def _sealed_name(self, agent_id: str, packed: PackedSnapshot) -> str:
        return f"{self._namespace}:{agent_id}:{packed.digest}:{packed.order}"

    async def _run(
        self, agent_id: str, calls: Sequence[ScriptCall], *, by_digest: bool
    ) -> list[ScriptReply]:
        return await script_calls.run_scripts(
            self._connection, _name(agent_id), calls, by_digest=by_digest
        )


def _encrypt(sealer: Sealer, agent_id: str, packed: PackedSnapshot) -> PackedSnapshot:
    digest, place = packed.digest, ("redis.snapshot", "", agent_id)
    return replace(
        packed,
        digest=to_text(sealer.seal(digest.encode(), (*place, "digest"))),
        manifest=sealer.seal(packed.manifest, (*place, digest)),
        chunks=tuple(
            sealer.seal(chunk, (*place, digest, str(number)))
            for number, chunk in enumerate(packed.chunks)
        ),
    )


def _decrypt(sealer: Sealer, agent_id: str, packed: PackedSnapshot) -> PackedSnapshot:
    if not is_text_envelope(packed.digest):
        raise ValueError("it is in the clear, although encryption_keys are set")
    digest, place = _open_digest(sealer, agent_id, packed.digest), ("redis.snapshot", "", agent_id)
    return replace(
        packed,
        digest=digest,
        manifest=open_copy(sealer, packed.manifest, (*place, digest)),
        chunks=tuple(
            open_copy(sealer, chunk, (*place, digest, str(number)))
            for number, chunk in enumerate(packed.chunks)
        ),
    )


def _open_digest(sealer: Sealer, agent_id: str, stored: str) -> str:
    return sealer.open(from_text(stored), ("redis.snapshot", "", agent_id, "digest")).decode()


def _name(agent_id: str) -> str:
    return f"snapshot of memory {agent_id}"


def _size(packed: PackedSnapshot) -> int:
    """Size in bytes; at least as large as `GET_SNAPSHOT` counts it."""
    return (
        CODE_BYTES
        + len(packed.digest)
        + _MAX_NUMBERS_BYTES
        + len(packed.manifest)
        + sum(len(chunk) + _CHUNK_OVERHEAD for chunk in packed.chunks)
    )


def _fields_for_people(packed: PackedSnapshot) -> Iterator[bytes]:
    """Names and values of the fields that the manifest also has."""
    if packed.taken_at is not None:
        yield from (b"timestamp", snapshot_time(packed.taken_at).isoformat().encode())
    if packed.key_count is not None:
        yield from (b"key_count", b"%d" % packed.key_count)


def _chunk_batches(chunks: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Batches of chunks, each small enough for one pipeline."""
    batch: list[bytes] = []
    size = 0
    for chunk in chunks:
        if batch and size + len(chunk) > script_calls.PIPELINE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += len(chunk)
    if batch:
        yield batch


def _to_packed(
    meta: bytes, fields: Sequence[bytes | None], chunks: Sequence[bytes]
) -> PackedSnapshot:
    digest, order, count, manifest, timestamp, key_count = fields
    if digest is None or order is None or count is None or manifest is None:
        _raise_damaged(meta, "a field is missing")
    try:
        packed = PackedSnapshot(
            digest.decode(),
            int(order),
            manifest,
            tuple(chunks),
            taken_at=None if timestamp is None else parse_snapshot_time(timestamp.decode()),
            key_count=None if key_count is None else int(key_count),
        )
        expected = int(count)
    except ValueError:
        _raise_damaged(meta, "a field is damaged")
    if len(chunks) != expected:
        _raise_damaged(meta, f"it has {quantity(len(chunks), 'chunk')} instead of {expected}")
    return packed


def _raise_damaged(key: bytes, problem: str) -> NoReturn:
    raise ConsistencyError(f"{decode_name(key)} is not a snapshot: {problem}")
