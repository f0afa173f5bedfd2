"""Which code really ran: told by the code itself, and not by Meshpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

listeners: list[Callable[[str, str], None]] = []
"""Each hears the name of a subtask and "began" or "completed"."""


def counted(subtask: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Tell the listeners when the code of a subtask begins, and when it has come to its end."""

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            _tell(subtask, "began")
            deliverable = await function(*args, **kwargs)
            _tell(subtask, "completed")
            return deliverable

        return run

    return decorate


def _tell(subtask: str, what: str) -> None:
    for listener in listeners:
        listener(subtask, what)
