"""Serialize a subtask's deliverable to JSON, and back to the declared return type."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import json
import types
import typing
from asyncio import Future
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import JsonValue

from meshpoint.errors import ConfigurationError, SubtaskRefused
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.subtasks.secret_places import UnrecoverableSecret, find_secret_pointers
from meshpoint.subtasks.versions import closure_variables, unwrap

_RESOLUTION_ERRORS = (NameError, AttributeError, TypeError, SyntaxError, ValueError, ImportError)
_AWAITABLE_TYPES = (collections.abc.Awaitable, collections.abc.Coroutine, Future)
_ITERATOR_TYPES = (collections.abc.Iterator, collections.abc.AsyncIterator)


class DeliverableCodec:
    """Serializes the results of one function by its return annotation.

    Without a usable annotation, it uses plain JSON: a tuple or a set is restored as a list, a
    model or dataclass as a dict, and a datetime as a string. Callers return `read(write(value))`
    even on the first run, so that it does not differ from later ones.
    """

    _cache: typing.ClassVar[WeakKeyDictionary[Callable[..., Any], DeliverableCodec]] = (
        WeakKeyDictionary()
    )

    def __init__(self, function: Callable[..., Any]) -> None:
        self._declared = _return_type(unwrap(function))
        try:
            self._typed = _get_typed(self._declared)
        except (ConfigurationError, TypeError):  # pydantic cannot describe it
            self._typed = _get_typed(Any)

    @classmethod
    def for_function(cls, function: Callable[..., Any]) -> DeliverableCodec:
        """Return the cached codec of `function`."""
        inner = unwrap(function)
        try:
            if inner not in cls._cache:
                cls._cache[inner] = cls(inner)
            return cls._cache[inner]
        except TypeError:  # it does not support weak references or hashing
            return cls(inner)

    def write(self, name: str, value: object) -> tuple[str, tuple[str, ...]]:
        """Serialize `value` to JSON; also return JSON pointers to the parts typed as `Secret`.

        Raises:
            SubtaskRefused: The value does not fit the annotation, has no JSON form, or could not
                be restored from it.
        """
        try:
            if isinstance(value, _ITERATOR_TYPES):
                raise TypeMismatch("it can be iterated only once; return a list")
            checked = self._typed.check(value)
            written = self._typed.write(checked, round_trip=True)
            pointers = tuple(find_secret_pointers(self._declared, checked, written))
            text = json_text(written)
            self.read(text)
        except (TypeMismatch, UnrecoverableSecret, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise SubtaskRefused(
                f"subtask {name!r} returned a {kind} that cannot be recorded: {error}"
            ) from error
        return text, pointers

    def read(self, text: str) -> Any:
        """Restore the value from the JSON that `write` returned.

        Raises:
            TypeMismatch: The annotation has changed, and the value does not fit it.
        """
        return self._typed.read(json.loads(text))


def json_text(value: JsonValue) -> str:
    """Serialize to compact JSON. Keys keep their order, and characters are not escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _return_type(function: Callable[..., Any]) -> Any:
    """Return the type of the awaited result of `function`; `Any` if unknown."""
    if isinstance(function, type):
        return function
    try:
        declared = inspect.get_annotations(function).get("return", Any)
        # Resolved alone: the annotations of parameters may be resolvable by type checkers only.
        stand_in = types.SimpleNamespace(__annotations__={"return": declared})
        scope = {each.__name__: each for each in getattr(function, "__type_params__", ())}
        scope |= dict(closure_variables(function))
        hints = typing.get_type_hints(
            stand_in, getattr(function, "__globals__", {}), scope, include_extras=True
        )
    except _RESOLUTION_ERRORS:
        return Any
    return _unwrap_awaitable(hints["return"])


def _unwrap_awaitable(declared: Any) -> Any:
    if typing.get_origin(declared) in _AWAITABLE_TYPES:
        return _unwrap_awaitable(typing.get_args(declared)[-1])
    return Any if declared in _AWAITABLE_TYPES else declared


def _get_typed(declared: Any) -> DeclaredType[Any]:
    try:
        return _build_typed_cached(declared)
    except TypeError:  # an annotation without a hash
        return _build_typed(declared)


def _build_typed(declared: Any) -> DeclaredType[Any]:
    typed: DeclaredType[Any] = DeclaredType(declared, "subtask")
    if declared is Any:
        typed.name = "value"
    return typed


_build_typed_cached = functools.lru_cache(maxsize=256)(_build_typed)
