"""AES-GCM envelopes with a ring of keys.

An envelope is

    marker 0x02 · version 0x01 · key id, 4 bytes · salt, 16 · nonce, 12 · sequence, varint · sealed

where `sealed` is the AES-256-GCM ciphertext with its tag. Everything before the nonce, the
sequence and the place are associated data. Each process seals with a subkey of its own, which is
derived from the key and the salt: random nonces of one key would be safe for only 2^32 values,
and a busy mesh writes that many in a week.

A salt of zeros marks an envelope whose nonce is a digest of its content, so that equal contents
can be found by comparison.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import zstandard

from meshpoint.errors import KeyMissing
from meshpoint.ports.sealer import Place

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARKER = b"\x02"
"""First byte of an envelope. No other stored value begins with it."""
TEXT_PREFIX = "sealed:"
"""Begins an envelope in a text column; the rest is Base64."""
_ESCAPE = "sealed::"
"""Begins a text in the clear that would otherwise look like an envelope."""
DIGEST_PREFIX = "hmac:"

_RAW, _ZSTD = b"\x00", b"\x01"
_MIN_COMPRESS_BYTES = 1024
_MAX_PLAIN_BYTES = 2**30
_MAX_VARINT_BYTES = 10
_ZERO = b"\x00"

HEADER = MARKER + b"\x01"
"""The first bytes of each envelope of this version."""
_KEY_ID, _SALT, _NONCE = slice(2, 6), slice(6, 22), slice(22, 34)
_MIN_BYTES = 34 + 1 + 16  # with a sequence of one byte, and the tag
_FIXED_SALT = bytes(16)
_MAX_PER_SALT = 2**28
"""Values sealed with one subkey. Forked processes share a salt, so this is far below the limit."""


@dataclass(frozen=True, slots=True)
class _Key:
    id: bytes
    secret: bytes = field(repr=False)

    @property
    def name(self) -> str:
        return self.id.hex()

    @classmethod
    def derive(cls, root: bytes, scope: str, tenant: str | None) -> _Key:
        """The key of a scope and a tenant. HKDF-Expand: the root is uniformly random."""
        secret = _expand(root, b"scope", scope.encode())
        if tenant is not None:
            secret = _expand(secret, b"tenant", tenant.encode())
        return cls(_expand(secret, b"id")[:4], secret)


def _expand(key: bytes, *labels: bytes) -> bytes:
    """One block of HKDF-Expand with SHA-256."""
    info = b"".join(len(label).to_bytes(2) + label for label in (b"meshpoint", *labels))
    return hmac.digest(key, info + b"\x01", "sha256")


@dataclass(frozen=True, slots=True)
class RingKey:
    """A key of 32 bytes.

    Attributes:
        secret: Empty stands for no key: what follows it only opens.
        tenant: Another key is derived for each tenant, so that no value opens for another one.
        agent: The agent that it belongs to.
    """

    secret: bytes = field(repr=False)
    tenant: str | None = None
    agent: str | None = None


class KeyRing:
    """A `meshpoint.ports.sealer.Sealer`.

    Args:
        keys: Newest first. The newest key of an agent seals its values, if keys name agents.
        setting: The setting that has them, for errors.
        scope: What they seal. Keys of one scope open nothing of another.
    """

    def __init__(self, keys: Sequence[RingKey], *, setting: str, scope: str) -> None:
        from cryptography.exceptions import InvalidTag

        derived = [_Key.derive(key.secret, scope, key.tenant) for key in keys]
        self._by_agent = {
            given.agent: key if given.secret else None
            for given, key in zip(reversed(keys), reversed(derived), strict=True)
            if given.agent is not None
        }
        self._newest = derived[0] if keys[0].secret else None
        self._invalid_tag = InvalidTag
        self._keys = {
            key.id: key for given, key in zip(keys, derived, strict=True) if given.secret
        }
        self.setting = setting
        self._cipher = lru_cache(maxsize=4096)(self._make_cipher)
        self._newest_name = None if self._newest is None else self._newest.name
        self._salt, self._left = b"", 0
        self._sealing: dict[bytes, tuple[bytes, AESGCM]] = {}

    def key_id(self, agent: str = "") -> str | None:
        """See `Sealer`."""
        if not self._by_agent:
            return self._newest_name
        key = self._sealing_key(agent)
        return None if key is None else key.name

    @property
    def key_ids(self) -> tuple[str, ...]:
        """See `Sealer`."""
        return tuple(key.name for key in self._keys.values())

    def _make_cipher(self, key_id: bytes, salt: bytes) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(_expand(self._keys[key_id].secret, b"value", salt))

    def seal(self, content: bytes, place: Place, seq: int = 0) -> bytes:
        """See `Sealer`."""
        if self._left <= 0:
            self._salt, self._left, self._sealing = os.urandom(16), _MAX_PER_SALT, {}
        self._left -= 1
        key = self._require_key(place) if self._by_agent or self._newest is None else self._newest
        found = self._sealing.get(key.id)
        if found is None:
            salt = self._salt
            found = self._sealing[key.id] = (HEADER + key.id + salt, self._cipher(key.id, salt))
        head, cipher = found
        nonce, tail = os.urandom(12), _ZERO if not seq else _varint(seq)
        sealed = cipher.encrypt(nonce, content, head + tail + _encode_place(place))
        return head + nonce + tail + sealed

    def _sealing_key(self, agent: str) -> _Key | None:
        if not self._by_agent:
            return self._newest
        return self._by_agent.get(agent.rpartition("/")[2], self._newest)

    def _require_key(self, place: Place) -> _Key:
        key = self._sealing_key(place[1])
        assert key is not None, "this ring only opens"
        return key

    def seal_fixed(self, content: bytes, place: Place) -> bytes:
        """See `Sealer`."""
        return self._seal_fixed(self._require_key(place), content, place)

    def fixed_variants(self, content: bytes, place: Place) -> Mapping[str, bytes]:
        """See `Sealer`."""
        return {key.name: self._seal_fixed(key, content, place) for key in self._keys.values()}

    def _seal_fixed(self, key: _Key, content: bytes, place: Place) -> bytes:
        where = _encode_place(place)
        bound = len(where).to_bytes(4) + where + content
        nonce = hmac.digest(_expand(key.secret, b"nonce"), bound, "sha256")[:12]
        head, cipher = HEADER + key.id + _FIXED_SALT, self._cipher(key.id, _FIXED_SALT)
        return head + nonce + _ZERO + cipher.encrypt(nonce, content, head + _ZERO + where)

    def open(self, envelope: bytes, place: Place) -> bytes:
        """See `Sealer`."""
        id_ = envelope[_KEY_ID]
        if id_ not in self._keys:
            if len(envelope) < _MIN_BYTES:
                raise ValueError("a sealed value is truncated")
            raise missing_key(envelope, self)
        end = _NONCE.stop
        while envelope[end : end + 1] > b"\x7f" and end < _NONCE.stop + _MAX_VARINT_BYTES:
            end += 1
        head, tail = envelope[: _SALT.stop], envelope[_NONCE.stop : end + 1]
        try:
            return self._cipher(id_, envelope[_SALT]).decrypt(
                envelope[_NONCE], envelope[end + 1 :], head + tail + _encode_place(place)
            )
        except (self._invalid_tag, ValueError) as error:
            raise ValueError(
                f"a value sealed with key {id_.hex()} was changed, or belongs elsewhere "
                f"than {place[0]}"
            ) from error

    def digest(self, content: str, purpose: str, agent: str) -> str:
        """See `Sealer`."""
        return _digest(self._require_key((purpose, agent)), content, purpose)

    def digests(self, content: str, purpose: str) -> tuple[str, ...]:
        """See `Sealer`."""
        return tuple(_digest(key, content, purpose) for key in self._keys.values())


def _digest(key: _Key, content: str, purpose: str) -> str:
    purpose_key = _expand(key.secret, b"digest", purpose.encode())
    mac = hmac.digest(purpose_key, content.encode(errors="surrogatepass"), "sha256")
    return f"{DIGEST_PREFIX}{key.name}:{base64.urlsafe_b64encode(mac[:24]).decode()}"


def _encode_place(place: Place) -> bytes:
    joined = "\0".join(place).encode("utf-8", "surrogatepass")
    if joined.count(0) >= len(place):  # an id with the separator
        joined = json.dumps(place).encode()
    return joined


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def is_envelope(stored: bytes) -> bool:
    """Whether stored bytes are an envelope. They may be damaged."""
    return stored[:1] == MARKER


def is_text_envelope(stored: object) -> bool:
    """Whether a stored text is an envelope. It may be damaged."""
    return (
        isinstance(stored, str)
        and stored.startswith(TEXT_PREFIX)
        and not stored.startswith(_ESCAPE)
    )


def escape_text(text: str) -> str:
    """A text to store in the clear, changed if it looks like an envelope."""
    return _ESCAPE + text if text.startswith(TEXT_PREFIX) else text


def unescape_text(stored: str) -> str:
    """Undo `escape_text`."""
    return stored.removeprefix(_ESCAPE)


def key_of(stored: bytes | str) -> str | None:
    """The id of the key that an envelope or a keyed digest names; `None` for other values."""
    if isinstance(stored, str):
        if stored.startswith(DIGEST_PREFIX):
            return stored[len(DIGEST_PREFIX) :].partition(":")[0]
        if not is_text_envelope(stored):
            return None
        try:
            stored = from_text(stored)
        except ValueError:
            return None
    return stored[_KEY_ID].hex() if stored[:2] == HEADER else None


def seq_of(envelope: bytes) -> int:
    """The sequence in an envelope, not verified."""
    number = shift = 0
    for byte in envelope[_NONCE.stop : _NONCE.stop + _MAX_VARINT_BYTES]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return number


def to_text(envelope: bytes) -> str:
    """An envelope as text."""
    return TEXT_PREFIX + binascii.b2a_base64(envelope, newline=False).decode()


def from_text(stored: str) -> bytes:
    """The envelope in a text.

    Raises:
        ValueError: It is damaged.
    """
    return binascii.a2b_base64(stored[len(TEXT_PREFIX) :], strict_mode=True)


def missing_key(envelope: bytes, ring: KeyRing | None = None, setting: str = "") -> KeyMissing:
    """The error for an envelope whose key is not in `ring`, or without any ring."""
    setting = ring.setting if ring is not None else setting or "encryption_keys"
    return KeyMissing(key_of(envelope) or "of a later release", setting, ring is not None)


def compress(content: bytes) -> bytes:
    """Mark `content`, and compress it if that makes it smaller. `expand` reverses it."""
    if len(content) >= _MIN_COMPRESS_BYTES:
        packed = zstandard.compress(content, level=1)
        if len(packed) < len(content):
            return _ZSTD + packed
    return _RAW + content


def expand(marked: bytes, max_bytes: int = _MAX_PLAIN_BYTES) -> bytes:
    """Reverse `compress`.

    Raises:
        ValueError: It is larger than `max_bytes`, or damaged.
    """
    marker, content = marked[:1], marked[1:]
    if marker == _RAW:
        return content
    if marker != _ZSTD:
        raise ValueError(f"a sealed value begins with unknown marker {marker!r}")
    try:
        size = zstandard.frame_content_size(content)
        if not 0 <= size <= max_bytes:
            raise ValueError(f"a compressed value has {size} bytes; the limit is {max_bytes}")
        return zstandard.decompress(content)
    except zstandard.ZstdError as error:
        raise ValueError(f"a compressed value is damaged: {error}") from error
