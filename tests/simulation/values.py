"""What agents and checks share: names, results by request, and hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

DATABASE = "database"
"""Name of the store that plays the database. The others have the names of their processes."""
CheckInvariant = Callable[[bool, str], None]
"""Records a violation if its first argument is false."""
Think = Callable[[], Awaitable[None]]
"""Spends an agent's time: a moment, or more than a lease."""
OnReturned = Callable[[str, str, str], None]
"""Called with task, subtask or step, and result when it returns."""
OnReceived = Callable[[str, Sequence[tuple[str, str]]], None]
"""Called with a task, and the names and ids of all signals that it has received."""


def leaf_value(number: int) -> int:
    """Result of `leaf`."""
    return 2 * number


def nested_value(number: int) -> int:
    """Result of `nested`."""
    return leaf_value(number) + leaf_value(number + 1)
