"""Authentication of data read from Redis, with a key that Redis never sees.

Without it, any client with write access to Redis could forge a checkpoint. The key is stored in
the mesh's database.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TypeAlias

from meshpoint.adapters.encryption import HEADER
from meshpoint.errors import CheckpointError, KeyMissing, Unavailable
from meshpoint.ports.sealer import Place, Sealer

CODE_BYTES = 32
"""Length of an authentication code, in bytes."""

Secret: TypeAlias = Callable[[], Awaitable[bytes]]
"""Returns the key of the mesh, 16 to 64 bytes. Called once."""


def is_sealed(content: bytes) -> bool:
    """Whether a copy is encrypted. Its clear formats never begin with these two bytes."""
    return content.startswith(HEADER)


def open_copy(sealer: Sealer, content: bytes, place: Place) -> bytes:
    """Decrypt a copy.

    Raises:
        CheckpointError: it is in the clear, or does not open. The database has what it copies.
    """
    if not is_sealed(content):
        raise CheckpointError("it is in the clear, although encryption_keys are set")
    try:
        return sealer.open(content, place)
    except (KeyMissing, ValueError) as error:
        raise CheckpointError(str(error)) from error


class Seal:
    """Computes and verifies authentication codes, which also cover the name of a value."""

    def __init__(self, secret: Secret, unavailable: type[Unavailable] = Unavailable) -> None:
        self._secret, self._unavailable = secret, unavailable
        self._key: bytes | None = None

    async def seal(self, name: str, content: bytes) -> bytes:
        """Return `content` prefixed with its authentication code.

        Raises:
            Unavailable: the database that stores the key does not answer.
        """
        return await self._code(name, content) + content

    async def unseal(self, name: str, stored: bytes) -> bytes:
        """Return the content that `seal` wrote under `name`, once verified.

        Raises:
            CheckpointError: it was changed, or written without the key or under another name.
            Unavailable: the database that stores the key does not answer.
        """
        code, content = stored[:CODE_BYTES], stored[CODE_BYTES:]
        if not hmac.compare_digest(code, await self._code(name, content)):
            raise CheckpointError("its authentication code does not match its content")
        return content

    async def _code(self, name: str, content: bytes) -> bytes:
        if self._key is None:
            self._key = await self._load_key(name)
        code = blake2b(key=self._key, digest_size=CODE_BYTES)
        code.update(f"{len(name)}:{name}".encode())
        code.update(content)
        return code.digest()

    async def _load_key(self, name: str) -> bytes:
        try:
            return await self._secret()
        except Unavailable as error:
            raise self._unavailable(
                f"{name}: its authentication key is unavailable: {error}"
            ) from error
