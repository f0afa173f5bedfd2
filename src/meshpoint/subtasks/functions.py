"""Find the function behind partials, bound methods and decorators."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any


def unwrap_once(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what `function` wraps by one layer; `None` if it wraps nothing.

    A layer is a partial, a bound method, `functools.wraps` or an object with `__call__`.
    """
    match function:
        case functools.partial():
            return function.func
        case types.MethodType():
            return function.__func__
        case type():
            return None
    wrapped: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        return wrapped
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return call if isinstance(call, types.FunctionType) else None


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the innermost function."""
    inner = unwrap_once(function)
    return function if inner is None else unwrap(inner)


def closure_variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the closure variables of `function` that are assigned already."""
    inner = unwrap(function)
    if isinstance(inner, types.FunctionType):
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue
