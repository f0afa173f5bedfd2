"""Digests of JSON values that do not depend on their formatting."""

from __future__ import annotations

import hashlib
import json

from pydantic import JsonValue

_MAX_EXACT_INT = 2**53
"""Smaller integers have an exact float, and some tools write 2.0 as 2."""


def json_digest(value: JsonValue) -> str:
    """Return `sha256:` and the digest of `value`.

    The order of keys, white space, and 2 instead of 2.0 make no difference.
    """
    text = json.dumps(_normalize(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _normalize(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer() and abs(value) < _MAX_EXACT_INT:
            return int(value)
        case dict():
            return {key: _normalize(each) for key, each in value.items()}
        case list():
            return [_normalize(each) for each in value]
    return value
