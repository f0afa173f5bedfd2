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
from itertools import islice
from typing import Any, SupportsIndex

from pydantic import JsonValue

from meshpoint.errors import NotJson

MAX_DEPTH = 100
"""Maximum nesting: JSON parsers have limits, and a list that contains itself is infinite."""

_MOST_DIGITS = 4_000
_MOST = 10**_MOST_DIGITS
_LEAST = -_MOST
"""Integers must lie between these. Python refuses to parse or print more than 4,300 digits."""

_MOST_ITERATED = 100_000
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


class JsonDict(dict[str, JsonValue]):
    """A dict of JSON values. `name` is the first part of the key path in errors.

    Raises:
        NotJson: a key is not a string, or a value at any depth is not JSON; the message has the
            full key path.
    """

    __slots__ = ("_depth", "_name", "_parent")

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), *, name: str = "") -> None:
        super().__init__()
        self._name, self._depth = name, 0
        self._parent: JsonDict | JsonList | None = None
        if values:
            self.update(values)

    def __setitem__(self, key: str, value: JsonValue) -> None:
        super().__setitem__(*_checked_item(key, value, self))

    def update(self, values: Any = (), /, **more: JsonValue) -> None:
        """Set several values, or none if any of them is rejected."""
        checked = [_checked_item(key, value, self) for key, value in dict(values, **more).items()]
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
        return {key: _plain(value) for key, value in self.items()}


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
            super().__setitem__(index, self._checked_all(value, range(len(self))[index].start))
        else:
            super().__setitem__(index, _checked(value, self, index))

    def append(self, value: JsonValue) -> None:
        """Append one value."""
        super().append(_checked(value, self, len(self)))

    def insert(self, index: SupportsIndex, value: JsonValue) -> None:
        """Insert one value before `index`."""
        super().insert(index, _checked(value, self, index))

    def extend(self, values: Iterable[JsonValue]) -> None:
        """Append several values, or none if any of them is rejected."""
        super().extend(self._checked_all(values, len(self)))

    def __iadd__(self, values: Iterable[JsonValue]) -> JsonList:  # type: ignore[override, misc]
        self.extend(values)
        return self

    def __imul__(self, times: SupportsIndex) -> JsonList:
        # Copy each repetition, so that changing one element does not change the others.
        once = self.to_plain()
        self[:] = [value for _ in range(int(times)) for value in once]
        return self

    def _checked_all(self, values: Iterable[JsonValue], first: int) -> list[JsonValue]:
        return [_checked(value, self, index) for index, value in enumerate(values, first)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (JsonList, self.to_plain(), self._name)

    def to_plain(self) -> list[JsonValue]:
        """A deep copy made of plain dicts and lists, independent of later changes."""
        return [_plain(value) for value in self]


def check_json(value: object, name: str) -> JsonValue:
    """Check that `value` is JSON and return a plain deep copy.

    Raises:
        NotJson: it is not; the message has the path inside `value`, starting with `name`.
    """
    try:
        copied: JsonValue = _copied(value, 1)
        return copied
    except _NotPlain:  # needs conversion, or an error with the full key path
        return _plain(JsonDict({name: value})[name])


def without_iterators(value: Any) -> Any:
    """Replace each iterator in nested dicts, lists and tuples with a list.

    A serializer would never finish with an infinite iterator.

    Raises:
        NotJson: an iterator yields more than 100,000 values.
    """
    try:
        return _listed(value)
    except RecursionError:  # the serializer reports it
        return value


def _listed(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: each if type(each) in _SCALARS else _listed(each) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind([each if type(each) in _SCALARS else _listed(each) for each in value])
    if kind in _SCALARS or not issubclass(kind, Iterator):
        return value
    values = list(islice(value, _MOST_ITERATED + 1))
    if len(values) > _MOST_ITERATED:
        raise NotJson(f"{kind.__name__}: an iterator of more than {_MOST_ITERATED} values; return a list")
    return _listed(values)


def copy_of(value: JsonValue) -> JsonValue:
    """A deep copy of `value`, which must be JSON."""
    match value:
        case dict():
            return {key: copy_of(each) for key, each in value.items()}
        case list():
            return [copy_of(each) for each in value]
        case _:
            return value


def digest_of(value: JsonValue) -> str:
    """A short digest of `value`, independent of key order."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


class _NotPlain(Exception):
    """The value is not JSON made of plain builtins."""


def _copied(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is str and _has_utf8(value):
        return value
    if (
        value is None
        or kind is bool
        or (kind is int and _LEAST < value < _MOST)
        or (kind is float and math.isfinite(value))
    ):
        return value
    if kind is dict and depth <= MAX_DEPTH and all(type(key) is str and _has_utf8(key) for key in value):
        return {key: _copied(each, depth + 1) for key, each in value.items()}
    if kind is list and depth <= MAX_DEPTH:
        return [_copied(each, depth + 1) for each in value]
    raise _NotPlain


def _has_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_item(key: object, value: object, owner: JsonDict) -> tuple[str, JsonValue]:
    if not isinstance(key, str):
        raise NotJson(f"{_path(owner) or 'key'}: the key {key!r} is not a string")
    checked_key = _checked(key, owner, key)
    assert isinstance(checked_key, str)
    return checked_key, _checked(value, owner, checked_key)


def _checked(value: object, owner: JsonDict | JsonList, key: object) -> JsonValue:
    """Convert `value` for `owner`: scalars to exact builtins, containers to wrapped copies."""
    match value:
        case None | bool():
            return value
        case str():
            return _checked_text(value, owner, key)
        case int():
            if not _LEAST < value < _MOST:
                raise NotJson(f"{_at(owner, key)}: an integer of over {_MOST_DIGITS} digits is not readable JSON")
            return int.__int__(value)
        case float():
            if not math.isfinite(value):
                raise NotJson(f"{_at(owner, key)}: {value} is not JSON")
            return float.__float__(value)
        case dict() | list():
            return _wrapped(value, owner, key)
    raise NotJson(
        f"{_at(owner, key)}: {type(value).__name__} is not JSON; use None, bool, int, float, str, list or dict"
    )


def _checked_text(value: str, owner: JsonDict | JsonList, key: object) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotJson(f"{_at(owner, key)!r}: the text cannot be encoded as UTF-8 ({error.reason})") from error
    return str.__str__(value)


def _wrapped(value: dict[str, JsonValue] | list[JsonValue], owner: JsonDict | JsonList, key: object) -> JsonValue:
    if owner._depth >= MAX_DEPTH:
        raise NotJson(f"{_root(owner)}: nested more than {MAX_DEPTH} deep")
    child: JsonDict | JsonList = JsonDict() if isinstance(value, dict) else JsonList()
    # Errors use the name while the child is being filled, because it is not in its owner yet.
    child._name, child._depth, child._parent = _step(key), owner._depth + 1, owner
    if isinstance(child, JsonDict):
        child.update(value)
    else:
        child.extend(value)
    return child


def _at(owner: JsonDict | JsonList, key: object) -> str:
    return (_path(owner) + _step(key)).lstrip(".")


def _path(node: JsonDict | JsonList) -> str:
    """The current path of `node`, computed only for errors because list elements move."""
    parent = node._parent
    if parent is None:
        return node._name
    pairs: Iterable[tuple[object, JsonValue]] = parent.items() if isinstance(parent, dict) else enumerate(parent)
    step = next((_step(key) for key, value in pairs if value is node), node._name)
    return _path(parent) + step


def _root(node: JsonDict | JsonList) -> str:
    parent = node._parent
    return (node._name or "value") if parent is None else _root(parent)


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key}]"


def _plain(value: JsonValue) -> JsonValue:
    return value.to_plain() if isinstance(value, JsonDict | JsonList) else value


def _rebuild(kind: type[JsonDict] | type[JsonList], values: Any, name: str) -> JsonDict | JsonList:
    return kind(values, name=name)
