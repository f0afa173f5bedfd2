"""The stored form of a copy: a marker byte and the checkpoint as JSON, behind the authentication code of `seal`."""

from __future__ import annotations

import zstandard

from meshpoint.errors import CheckpointError
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.own_threads import in_own_thread

_PLAIN, _ZSTD = b"\x00", b"\x01"
_COMPRESS_FROM = 1024
_THREAD_FROM = 256 * 1024


async def encoded(checkpoint: AgentCheckpoint) -> bytes:
    """`checkpoint` as it rests.

    Raises:
        CheckpointError: it holds what JSON cannot.
    """
    try:
        content = checkpoint.model_dump_json().encode()
    except ValueError as error:
        raise CheckpointError(f"checkpoint {checkpoint.seq} of {checkpoint.operation_id}: {_line(error)}") from error
    return _pack(content) if len(content) < _THREAD_FROM else await in_own_thread(_pack, content)


async def decoded(stored: bytes) -> AgentCheckpoint:
    """Decode authenticated bytes: decompressing anything else could exhaust memory.

    Raises:
        CheckpointError: it is no checkpoint that this release can read.
    """
    return _unpack(stored) if len(stored) < _THREAD_FROM else await in_own_thread(_unpack, stored)


def _pack(content: bytes) -> bytes:
    body = _PLAIN + content
    if len(content) >= _COMPRESS_FROM:
        body = min(body, _ZSTD + zstandard.compress(content, level=1), key=len)
    return body


def _unpack(stored: bytes) -> AgentCheckpoint:
    marker, content = stored[:1], stored[1:]
    if marker not in {_PLAIN, _ZSTD}:
        raise CheckpointError(f"its content begins with the unknown marker {marker!r}")
    try:
        return AgentCheckpoint.model_validate_json(content if marker == _PLAIN else zstandard.decompress(content))
    except (ValueError, zstandard.ZstdError) as error:
        raise CheckpointError(f"its content is no checkpoint: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
