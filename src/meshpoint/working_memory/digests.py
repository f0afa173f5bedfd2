"""Digests of memories: 32 bytes, equal for equal content, independent of write order.

The content is serialized canonically: keys, fields and members are sorted, lists keep their order,
and a score is its eight bytes (-0.0 becomes 0.0). Each part is preceded by its length, so that
different contents never have the same form. Expiry times are not part of it. `ConsistencyVerifier`
compares a restored memory with the digests of the stored one.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from itertools import chain
from typing import cast

from meshpoint.errors import ConsistencyError
from meshpoint.model.memory import Item, Kind

FORMAT = 1
"""Prefix of each digest. It changes with the canonical form."""

_TAGS = {Kind.STRING: b"s", Kind.LIST: b"l", Kind.HASH: b"h", Kind.SET: b"m", Kind.ZSET: b"z"}
_pack_length = struct.Struct(">Q").pack
_pack_score = struct.Struct(">d").pack


def item_digest(item: Item) -> bytes:
    """Return the digest of one key and its content."""
    parts = [item.key.encode(), *_content_parts(item)]
    framed = chain.from_iterable((_pack_length(len(part)), part) for part in parts)
    return sha256(_TAGS[item.kind] + b"".join(framed)).digest()


def item_digests(items: Iterable[Item]) -> dict[str, bytes]:
    """Return the digest of each key."""
    return {item.key: item_digest(item) for item in items}


def memory_digest(digests: Mapping[str, bytes]) -> str:
    """Return the digest of a whole memory, as `format:hex`, given the digests of its keys."""
    hasher = sha256()
    for key, digest in sorted((key.encode(), digest) for key, digest in digests.items()):
        hasher.update(_pack_length(len(key)) + key + digest)
    return f"{FORMAT}:{hasher.hexdigest()}"


def fingerprint(items: Collection[Item], digests: Mapping[str, bytes] | None = None) -> str:
    """Return the digest of a whole memory; if keys have expiry times, `@` and their digest follow.

    Two memories with the same fingerprint are equal now and stay equal as keys expire. Pass
    `digests` if the digests of the keys are already computed.
    """
    content = memory_digest(item_digests(items) if digests is None else digests)
    expirations = sorted(
        (item.key.encode(), item.expires_at) for item in items if item.expires_at is not None
    )
    if not expirations:
        return content
    expiry_hash = sha256(
        b"".join(_pack_length(len(key)) + key + _pack_length(end) for key, end in expirations)
    )
    return f"{content}@{expiry_hash.hexdigest()[:16]}"


EMPTY_FINGERPRINT = fingerprint(())
"""The fingerprint of a memory without keys."""


class ConsistencyVerifier:
    """Compares items with their stored digests, key by key."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = digests

    def verify(self, items: Iterable[Item], label: str) -> None:
        """Check that `items` match the digests exactly.

        Raises:
            ConsistencyError: They do not. The error has `label`, and the keys that are missing,
                extra or changed.
        """
        items = tuple(items)
        found = item_digests(items)
        duplicates = {
            key for key, count in Counter(item.key for item in items).items() if count > 1
        }
        if found == self._digests and not duplicates:
            return
        raise ConsistencyError(
            f"{label} differs from its digests",
            missing=sorted(self._digests.keys() - found.keys()),
            extra=sorted(duplicates | (found.keys() - self._digests.keys())),
            changed=sorted(
                key
                for key in found.keys() & self._digests.keys()
                if found[key] != self._digests[key]
            ),
        )


def _content_parts(item: Item) -> Iterable[bytes]:
    match item.kind:
        case Kind.STRING:
            return (cast(bytes, item.content),)
        case Kind.LIST:
            return cast(tuple[bytes, ...], item.content)
        case Kind.HASH:
            fields = cast(Mapping[bytes, bytes], item.content)
            return chain.from_iterable(sorted(fields.items()))
        case Kind.SET:
            return sorted(cast(frozenset[bytes], item.content))
        case Kind.ZSET:
            scores = cast(Mapping[bytes, float], item.content)
            return chain.from_iterable(
                (member, _pack_score(score + 0.0)) for member, score in sorted(scores.items())
            )
