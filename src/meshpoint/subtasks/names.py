"""Valid names of subtasks."""

from __future__ import annotations

MAX_NAME_LENGTH = 100
"""Characters."""


def is_valid_name(name: object) -> bool:
    """Whether `name` can name a subtask. Names are keys in the database and printed unescaped."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name.strip() == name
