"""Encryption at rest: seal what leaves the process, and open it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

Place: TypeAlias = tuple[str, ...]
"""Where a sealed value belongs: the table and column, or the kind of copy, and then the ids.

A value opens only in the place that it was sealed for.
"""


class Sealer(Protocol):
    """Seals values with the newest key of a ring, and opens them with the key that they name.

    Any thread may use it.
    """

    def key_id(self, agent: str = "") -> str | None:
        """The key that seals what belongs to `agent`; `None` if that is written in the clear."""

    @property
    def key_ids(self) -> tuple[str, ...]:
        """All keys of the ring, newest first."""

    @property
    def setting(self) -> str:
        """The setting that has the keys."""

    def seal(self, content: bytes, place: Place, seq: int = 0) -> bytes:
        """Encrypt `content` for `place`. The envelope also has `seq`, authenticated."""

    def seal_fixed(self, content: bytes, place: Place) -> bytes:
        """Encrypt `content` so that equal contents in one place have equal envelopes."""

    def fixed_variants(self, content: bytes, place: Place) -> Mapping[str, bytes]:
        """What `seal_fixed` returns under each key, by key, to search for the content."""

    def open(self, envelope: bytes, place: Place) -> bytes:
        """Decrypt an envelope.

        Raises:
            KeyMissing: The ring lacks its key.
            ValueError: It was changed, or sealed for another place.
        """

    def digest(self, content: str, purpose: str, agent: str) -> str:
        """A keyed digest of `content`, which names its key."""

    def digests(self, content: str, purpose: str) -> tuple[str, ...]:
        """What `digest` returns under each key, to search for the content."""
