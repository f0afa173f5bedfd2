"""A dict and a list that only ever contain JSON values, at any depth.

A value that a checkpoint could not store is rejected on assignment, with its full key path, rather
than at the pause an hour later. Containers are copied when assigned and returned as `JsonDict` and
`JsonList`, so that nested changes are checked too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from json.encoder import encode_basestring_ascii
from typing import Any, SupportsIndex

from pydantic import JsonValue

from meshpoint.errors import NotJson

MAX_DEPTH = 100
"""Maximum nesting: JSON parsers have limits, and a list that contains itself is infinite."""

_MAX_DIGITS = 4_000
_MAX_INTEGER = 10**_MAX_DIGITS
_MIN_INTEGER = -_MAX_INTEGER
"""Integers must lie between these. Python refuses to parse or print more than 4,300 digits."""

_MAX_EXACT_INT = 2**53
"""Smaller integers have an exact float, and some tools write 2.0 as 2."""

_MAX_ITERATED_VALUES = 100_000
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


class JsonDict(dict[str, JsonValue]):
    """A dict of JSON values. `name` is the first part of the key path in errors.

    Raises:
        NotJson: a key is not a string, or a value at any depth is not JSON; the message has the
            full key path.
    """

    __slots__ = ("_depth", "_name", "_parent")

    def __init__(
        self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), *, name: str = ""
    ) -> None:
        super().__init__()
        self._name, self._depth = name, 0
        self._parent: JsonDict | JsonList | None = None
        if values:
            self.update(values)

    def __setitem__(self, key: str, value: JsonValue) -> None:
        super().__setitem__(*_check_item(key, value, self))

    def update(self, values: Any = (), /, **more: JsonValue) -> None:
        """Set several values, or none if any of them is rejected."""
        checked = [_check_item(key, value, self) for key, value in dict(values, **more).items()]
        for key, value in checked:
            super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None, /) -> Any:
        """The value of `key`, after setting it to `default` if missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, values: Any) -> JsonDict:  # type: ignore[override, misc]
        self.update(values)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (JsonDict, self.to_plain(), self._name)

    def to_plain(self) -> dict[str, JsonValue]:
        """A deep copy made of plain dicts and lists, independent of later changes."""
        return {key: _to_plain(value) for key, value in self.items()} if self else {}


class JsonList(list[JsonValue]):
    """A list of JSON values. `name` is the first part of the key path in errors.

    Raises:
        NotJson: a value at any depth is not JSON; the message has the full key path.
    """

    __slots__ = ("_depth", "_name", "_parent")

    def __init__(self, values: Iterable[Any] = (), *, name: str = "") -> None:
        super().__init__()
        self._name, self._depth = name, 0
        self._parent: JsonDict | JsonList | None = None
        if values != ():
            self.extend(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            super().__setitem__(index, self._check_all(value, range(len(self))[index].start))
        else:
            super().__setitem__(index, _check_value(value, self, index))

    def append(self, value: JsonValue) -> None:
        """Append one value."""
        super().append(_check_value(value, self, len(self)))

    def insert(self, index: SupportsIndex, value: JsonValue) -> None:
        """Insert one value before `index`."""
        super().insert(index, _check_value(value, self, index))

    def extend(self, values: Iterable[JsonValue]) -> None:
        """Append several values, or none if any of them is rejected."""
        super().extend(self._check_all(values, len(self)))

    def __iadd__(self, values: Iterable[JsonValue]) -> JsonList:  # type: ignore[override, misc]
        self.extend(values)
        return self

    def __imul__(self, times: SupportsIndex) -> JsonList:
        # Copy each repetition, so that changing one element does not change the others.
        plain = self.to_plain()
        self[:] = [value for _ in range(int(times)) for value in plain]
        return self

    def _check_all(self, values: Iterable[JsonValue], first_index: int) -> list[JsonValue]:
        return [
            _check_value(value, self, index) for index, value in enumerate(values, first_index)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (JsonList, self.to_plain(), self._name)

    def to_plain(self) -> list[JsonValue]:
        """A deep copy made of plain dicts and lists, independent of later changes."""
        return [_to_plain(value) for value in self] if self else []


def check_json(value: object, name: str) -> JsonValue:
    """Check that `value` is JSON and return a plain deep copy.

    Raises:
        NotJson: it is not; the message has the path inside `value`, starting with `name`.
    """
    try:
        copied: JsonValue = _copy_checked(value, 1)
        return copied
    except ValueError:  # needs conversion, or an error with the full key path
        return _to_plain(JsonDict({name: value})[name])


def copy_containers(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples, with a list in place of each iterator.

    A serializer would never finish with an infinite iterator.

    Raises:
        NotJson: an iterator yields more than 100,000 values.
    """
    if type(value) in _SCALARS:
        return value
    try:
        return _copy_container(value)
    except RecursionError:  # the serializer reports it
        return value


def _copy_container(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {
            key: item if type(item) in _SCALARS else _copy_container(item)
            for key, item in value.items()
        }
    if kind is list or kind is tuple:
        return kind([each if type(each) in _SCALARS else _copy_container(each) for each in value])
    if not issubclass(kind, Iterator):
        return value
    values = list(islice(value, _MAX_ITERATED_VALUES + 1))
    if len(values) > _MAX_ITERATED_VALUES:
        raise NotJson(
            f"{kind.__name__}: an iterator of more than {_MAX_ITERATED_VALUES} values; "
            "return a list"
        )
    return _copy_container(values)


def json_digest(value: JsonValue) -> str:
    """A short digest of `value`, independent of key order."""
    return _short_hash(_canonical(value).encode()).hexdigest()


_short_hash = partial(hashlib.blake2b, digest_size=16)


def call_digest(peer: str, call_input: JsonValue) -> str:
    """`json_digest([peer, call_input])`. Each replay needs it again for each recorded call."""
    if type(call_input) is int or (
        type(call_input) is str and len(call_input) <= _MAX_REMEMBERED_CHARACTERS
    ):
        return _remembered_digest(peer, call_input)
    return _call_digest(peer, call_input)


def _call_digest(peer: str, call_input: JsonValue) -> str:
    kind = type(call_input)
    if kind is int or kind is str:  # without the encoder, which takes twice as long as the digest
        scalar = call_input if kind is int else encode_basestring_ascii(str(call_input))
        text = f"[{encode_basestring_ascii(peer)},{scalar}]"
    else:
        text = _canonical([peer, call_input])
    return _short_hash(text.encode()).hexdigest()


_MAX_REMEMBERED_CHARACTERS = 100
_remembered_digest = lru_cache(maxsize=4096)(_call_digest)


def document_digest(value: JsonValue) -> str:
    """`sha256:` and a digest of `value`, which people and tools may have reformatted.

    The order of keys, white space, and 2 instead of 2.0 make no difference.
    """
    text = json.dumps(
        _normalize_numbers(value),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _normalize_numbers(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer() and abs(value) < _MAX_EXACT_INT:
            return int(value)
        case dict():
            return {key: _normalize_numbers(each) for key, each in value.items()}
        case list():
            return [_normalize_numbers(each) for each in value]
    return value


def _copy_checked(value: Any, depth: int) -> Any:
    """A deep copy of JSON made of plain builtins. Raises `ValueError` for any other value."""
    kind = type(value)
    if kind is str:
        if not value.isascii():
            value.encode()  # UnicodeEncodeError is a ValueError
    elif kind is dict and depth <= MAX_DEPTH:
        copied = {}
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError("a key needs conversion")
            if not key.isascii():
                key.encode()
            copied[key] = _copy_checked(item, depth + 1)
        return copied
    elif kind is list and depth <= MAX_DEPTH:
        return [_copy_checked(each, depth + 1) for each in value]
    elif not (
        value is None
        or kind is bool
        or (kind is int and _MIN_INTEGER < value < _MAX_INTEGER)
        or (kind is float and math.isfinite(value))
    ):
        raise ValueError(f"{kind.__name__} needs conversion")
    return value


def _check_item(key: object, value: object, owner: JsonDict) -> tuple[str, JsonValue]:
    if not isinstance(key, str):
        raise NotJson(f"{_path(owner) or 'key'}: the key {key!r} is not a string")
    checked_key = _check_text(key, owner, key)
    return checked_key, _check_value(value, owner, checked_key)


def _check_value(value: object, owner: JsonDict | JsonList, key: object) -> JsonValue:
    """Convert `value` for `owner`: scalars to exact builtins, containers to wrapped copies."""
    match value:
        case None | bool():
            return value
        case str():
            return _check_text(value, owner, key)
        case int():
            if not _MIN_INTEGER < value < _MAX_INTEGER:
                raise NotJson(
                    f"{_child_path(owner, key)}: an integer of over {_MAX_DIGITS} digits "
                    "is not readable JSON"
                )
            return int.__int__(value)
        case float():
            if not math.isfinite(value):
                raise NotJson(f"{_child_path(owner, key)}: {value} is not JSON")
            return float.__float__(value)
        case dict() | list():
            return _wrap(value, owner, key)
    raise NotJson(
        f"{_child_path(owner, key)}: {type(value).__name__} is not JSON; "
        "use None, bool, int, float, str, list or dict"
    )


def _check_text(value: str, owner: JsonDict | JsonList, key: object) -> str:
    if not str.isascii(value):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            path = _child_path(owner, key)
            raise NotJson(
                f"{path!r}: the text cannot be encoded as UTF-8 ({error.reason})"
            ) from error
    return str.__str__(value)


def _wrap(
    value: dict[str, JsonValue] | list[JsonValue], owner: JsonDict | JsonList, key: object
) -> JsonValue:
    if owner._depth >= MAX_DEPTH:
        raise NotJson(f"{_root_name(owner)}: nested more than {MAX_DEPTH} deep")
    child: JsonDict | JsonList = JsonDict() if isinstance(value, dict) else JsonList()
    # Errors use the name while the child is being filled, because it is not in its owner yet.
    child._name, child._depth, child._parent = _path_step(key), owner._depth + 1, owner
    if isinstance(child, JsonDict):
        child.update(value)
    else:
        child.extend(value)
    return child


def _child_path(owner: JsonDict | JsonList, key: object) -> str:
    return (_path(owner) + _path_step(key)).lstrip(".")


def _path(node: JsonDict | JsonList) -> str:
    """The current path of `node`, computed only for errors because list elements move."""
    parent = node._parent
    if parent is None:
        return node._name
    pairs: Iterable[tuple[object, JsonValue]] = (
        parent.items() if isinstance(parent, dict) else enumerate(parent)
    )
    step = next((_path_step(key) for key, value in pairs if value is node), node._name)
    return _path(parent) + step


def _root_name(node: JsonDict | JsonList) -> str:
    parent = node._parent
    return (node._name or "value") if parent is None else _root_name(parent)


def _path_step(key: object) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key}]"


def _to_plain(value: JsonValue) -> JsonValue:
    return value.to_plain() if isinstance(value, JsonDict | JsonList) else value


def _rebuild(kind: type[JsonDict] | type[JsonList], values: Any, name: str) -> JsonDict | JsonList:
    return kind(values, name=name)


def differing_field(one: JsonValue, other: JsonValue) -> str | None:
    """The path of the first field in which two values differ, such as `stops.city`.

    `None` if they are equal, or are not both objects.
    """
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None
    for key in [*one, *(key for key in other if key not in one)]:
        if key not in one or key not in other:
            return key
        if json_digest(one[key]) != json_digest(other[key]):
            inner = differing_field(one[key], other[key])
            return key if inner is None else f"{key}.{inner}"
    return None
