"""The stored form of a copy: a format marker byte and the checkpoint as JSON, sealed by `seal`."""

from __future__ import annotations

import zstandard

from meshpoint.errors import CheckpointError
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.own_threads import run_in_own_thread

_PLAIN, _ZSTD = b"\x00", b"\x01"
_MIN_COMPRESS_BYTES = 1024
_MIN_THREAD_BYTES = 256 * 1024


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
    return _pack(content) if len(content) < _MIN_THREAD_BYTES else await run_in_own_thread(_pack, content)


async def decode_checkpoint(stored: bytes) -> AgentCheckpoint:
    """Decode a copy. Pass only authenticated bytes: decompressing others could exhaust memory.

    Raises:
        CheckpointError: this release cannot read it as a checkpoint.
    """
    return _unpack(stored) if len(stored) < _MIN_THREAD_BYTES else await run_in_own_thread(_unpack, stored)


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
        return AgentCheckpoint.model_validate_json(content if marker == _PLAIN else zstandard.decompress(content))
    except (ValueError, zstandard.ZstdError) as error:
        raise CheckpointError(f"not a valid checkpoint: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
