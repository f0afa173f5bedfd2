"""Authenticates what Redis returns, with a key that Redis never sees.

Everyone who can write to Redis could otherwise forge a checkpoint. The key lies in the mesh's database.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TypeAlias

from meshpoint.errors import CheckpointError

SIZE = 32
"""Bytes of an authentication code."""

Secret: TypeAlias = Callable[[], Awaitable[bytes]]
"""Returns the key of the mesh, between 16 and 64 bytes. Asked once."""


class Seal:
    """Codes that prove who wrote a value, and under which name."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._key: bytes | None = None

    async def sealed(self, name: str, content: bytes) -> bytes:
        """`content` behind its authentication code.

        Raises:
            Unavailable: the database that has the key does not answer.
        """
        return await self._code(name, content) + content

    async def opened(self, name: str, stored: bytes) -> bytes:
        """The content that `sealed` wrote under `name`.

        Raises:
            CheckpointError: it was written without the key, or under another name, or has changed since.
            Unavailable: the database that has the key does not answer.
        """
        code, content = stored[:SIZE], stored[SIZE:]
        if not hmac.compare_digest(code, await self._code(name, content)):
            raise CheckpointError("its authentication code does not match its content")
        return content

    async def _code(self, name: str, content: bytes) -> bytes:
        if self._key is None:
            self._key = await self._secret()
        code = blake2b(key=self._key, digest_size=SIZE)
        code.update(f"{len(name)}:{name}".encode())
        code.update(content)
        return code.digest()
