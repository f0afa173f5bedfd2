"""A subtask's deliverable as text, and back as what its function says that it returns."""

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
from meshpoint.model.typed import DoesNotFit, Typed
from meshpoint.subtasks.functions import closure_variables, unwrap
from meshpoint.subtasks.secret_places import UnrecoverableSecret, find_secret_pointers

_RESOLUTION_ERRORS = (NameError, AttributeError, TypeError, SyntaxError, ValueError, ImportError)
_AWAITABLE_TYPES = (collections.abc.Awaitable, collections.abc.Coroutine, Future)
_ITERATOR_TYPES = (collections.abc.Iterator, collections.abc.AsyncIterator)


class DeliverableCodec:
    """How one function's results are kept: by its return annotation, or as plain JSON where there is none to use.

    As plain JSON, a tuple or a set comes back as a list, a model or dataclass as a dict, a datetime as its text.
    Whoever runs the function returns `read(write(value))`, so that the first run does not differ from later ones.
    """

    _cache: typing.ClassVar[WeakKeyDictionary[Callable[..., Any], DeliverableCodec]] = WeakKeyDictionary()

    def __init__(self, function: Callable[..., Any]) -> None:
        self._declared = _return_type(unwrap(function))
        try:
            self._typed = _get_typed(self._declared)
        except (ConfigurationError, TypeError):  # pydantic cannot describe it
            self._typed = _get_typed(Any)

    @classmethod
    def for_function(cls, function: Callable[..., Any]) -> DeliverableCodec:
        """The one of `function`, made once."""
        inner = unwrap(function)
        try:
            if inner not in cls._cache:
                cls._cache[inner] = cls(inner)
            return cls._cache[inner]
        except TypeError:  # it cannot be referred to weakly, or has no hash
            return cls(inner)

    def write(self, name: str, value: object) -> tuple[str, tuple[str, ...]]:
        """`value` as JSON text, and the places in it whose type says `Secret`, as JSON pointers.

        Raises:
            SubtaskRefused: it does not fit the annotation, has no JSON form, or would not come back from it.
        """
        try:
            if isinstance(value, _ITERATOR_TYPES):
                raise DoesNotFit("it can be read only once; return a list")
            checked = self._typed.check(value)
            written = self._typed.write(checked, round_trip=True)
            pointers = tuple(find_secret_pointers(self._declared, checked, written))
            text = json_text(written)
            self.read(text)
        except (DoesNotFit, UnrecoverableSecret, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise SubtaskRefused(f"subtask {name!r} returned a {kind} which cannot be kept: {error}") from error
        return text, pointers

    def read(self, text: str) -> Any:
        """The value that `write` made `text` of.

        Raises:
            DoesNotFit: the annotation is another one now.
        """
        return self._typed.read(json.loads(text))


def json_text(value: JsonValue) -> str:
    """Compact JSON, with its keys in their order and its characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _return_type(function: Callable[..., Any]) -> Any:
    """What `function` gives when it is called and awaited; Any when that cannot be found out."""
    if isinstance(function, type):
        return function
    try:
        declared = inspect.get_annotations(function).get("return", Any)
        # On its own: a parameter's annotation that only a type checker can resolve is no obstacle.
        stand_in = types.SimpleNamespace(__annotations__={"return": declared})
        scope = {each.__name__: each for each in getattr(function, "__type_params__", ())}
        scope |= dict(closure_variables(function))
        hints = typing.get_type_hints(stand_in, getattr(function, "__globals__", {}), scope, include_extras=True)
    except _RESOLUTION_ERRORS:
        return Any
    return _unwrap_awaitable(hints["return"])


def _unwrap_awaitable(declared: Any) -> Any:
    if typing.get_origin(declared) in _AWAITABLE_TYPES:
        return _unwrap_awaitable(typing.get_args(declared)[-1])
    return Any if declared in _AWAITABLE_TYPES else declared


def _get_typed(declared: Any) -> Typed[Any]:
    try:
        return _build_typed_cached(declared)
    except TypeError:  # an annotation without a hash
        return _build_typed(declared)


def _build_typed(declared: Any) -> Typed[Any]:
    typed: Typed[Any] = Typed(declared, "subtask")
    if declared is Any:
        typed.name = "value"
    return typed


_build_typed_cached = functools.lru_cache(maxsize=256)(_build_typed)
