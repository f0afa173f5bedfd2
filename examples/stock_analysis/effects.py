"""Which code really ran, recorded by the code itself rather than by Meshpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

listeners: list[Callable[[str, str], None]] = []
"""Each is called with the name of a subtask and "began" or "completed"."""


def counted(subtask: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Call the listeners when the code of a subtask begins and when it completes."""

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            _notify(subtask, "began")
            deliverable = await function(*args, **kwargs)
            _notify(subtask, "completed")
            return deliverable

        return run

    return decorate


def _notify(subtask: str, event: str) -> None:
    for listener in listeners:
        listener(subtask, event)
