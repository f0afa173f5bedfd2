"""Checks what an agent declares about its operations, when it is defined."""

from __future__ import annotations

from collections.abc import Sequence

from meshpoint.errors import ConfigurationError
from meshpoint.model.subtasks import Migration
from meshpoint.ports.agent import Plan
from meshpoint.subtasks.migrating import validate_migrations
from meshpoint.subtasks.names import MAX_NAME_LENGTH, is_valid_name


def build_plan(
    agent: str,
    subtasks: Sequence[str],
    version: str,
    migrations: Sequence[Migration],
    *,
    type: str = "agent",
    exclusive: bool = False,
    preserve: bool = False,
) -> Plan:
    """Build the plan of an agent.

    Raises:
        ConfigurationError: Two subtasks have the same name, a name cannot be used, or the
            migrations are ambiguous.
    """
    key = f"agent {agent!r}, subtasks"
    if isinstance(subtasks, str):
        raise ConfigurationError(key, f"{subtasks!r} is one string", f"write [{subtasks!r}]")
    for name in subtasks:
        if not is_valid_name(name):
            raise ConfigurationError(
                key, f"{name!r} is not a valid name", f"use printable text of 1 to {MAX_NAME_LENGTH} characters"
            )
        if list(subtasks).count(name) > 1:
            raise ConfigurationError(key, f"{name!r} occurs twice", "use unique names")
    return Plan(
        subtasks=tuple(subtasks),
        version=version,
        migrations=tuple(validate_migrations(migrations)),
        type=type,
        exclusive=exclusive,
        preserve=preserve,
    )
