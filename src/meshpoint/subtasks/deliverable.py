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
from meshpoint.subtasks.functions import closure_of, innermost
from meshpoint.subtasks.secret_places import LostSecret, secret_places

_UNRESOLVED = (NameError, AttributeError, TypeError, SyntaxError, ValueError, ImportError)
_AWAITED = (collections.abc.Awaitable, collections.abc.Coroutine, Future)
_STREAMS = (collections.abc.Iterator, collections.abc.AsyncIterator)


class Deliverable:
    """How one function's results are kept: by its return annotation, or as plain JSON where there is none to use.

    As plain JSON, a tuple or a set comes back as a list, a model or dataclass as a dict, a datetime as its text.
    Whoever runs the function returns `read(write(value))`, so that the first run does not differ from later ones.
    """

    _made: typing.ClassVar[WeakKeyDictionary[Callable[..., Any], Deliverable]] = WeakKeyDictionary()

    def __init__(self, function: Callable[..., Any]) -> None:
        self._declared = _returned(innermost(function))
        try:
            self._typed = _typed(self._declared)
        except (ConfigurationError, TypeError):  # pydantic cannot describe it
            self._typed = _typed(Any)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Deliverable:
        """The one of `function`, made once."""
        inner = innermost(function)
        try:
            if inner not in cls._made:
                cls._made[inner] = cls(inner)
            return cls._made[inner]
        except TypeError:  # it cannot be referred to weakly, or has no hash
            return cls(inner)

    def write(self, name: str, value: object) -> tuple[str, tuple[str, ...]]:
        """`value` as JSON text, and the places in it whose type says `Secret`, as JSON pointers.

        Raises:
            SubtaskRefused: it does not fit the annotation, has no JSON form, or would not come back from it.
        """
        try:
            if isinstance(value, _STREAMS):
                raise DoesNotFit("it can be read only once; return a list")
            checked = self._typed.check(value)
            written = self._typed.write(checked, round_trip=True)
            places = tuple(secret_places(self._declared, checked, written))
            text = json_text(written)
            self.read(text)
        except (DoesNotFit, LostSecret, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise SubtaskRefused(f"subtask {name!r} returned a {kind} which cannot be kept: {error}") from error
        return text, places

    def read(self, text: str) -> Any:
        """The value that `write` made `text` of.

        Raises:
            DoesNotFit: the annotation is another one now.
        """
        return self._typed.read(json.loads(text))


def json_text(value: JsonValue) -> str:
    """Compact JSON, with its keys in their order and its characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _returned(function: Callable[..., Any]) -> Any:
    """What `function` gives when it is called and awaited; Any when that cannot be found out."""
    if isinstance(function, type):
        return function
    try:
        declared = inspect.get_annotations(function).get("return", Any)
        # On its own: a parameter's annotation that only a type checker can resolve is no obstacle.
        stand_in = types.SimpleNamespace(__annotations__={"return": declared})
        scope = {each.__name__: each for each in getattr(function, "__type_params__", ())}
        scope |= dict(closure_of(function))
        hints = typing.get_type_hints(stand_in, getattr(function, "__globals__", {}), scope, include_extras=True)
    except _UNRESOLVED:
        return Any
    return _awaited(hints["return"])


def _awaited(declared: Any) -> Any:
    if typing.get_origin(declared) in _AWAITED:
        return _awaited(typing.get_args(declared)[-1])
    return Any if declared in _AWAITED else declared


def _typed(declared: Any) -> Typed[Any]:
    try:
        return _cached(declared)
    except TypeError:  # an annotation without a hash
        return _described(declared)


def _described(declared: Any) -> Typed[Any]:
    typed: Typed[Any] = Typed(declared, "subtask")
    if declared is Any:
        typed.name = "value"
    return typed


_cached = functools.lru_cache(maxsize=256)(_described)
