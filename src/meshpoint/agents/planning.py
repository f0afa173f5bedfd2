"""Checks what an agent declares about its operations, when it is defined."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import get_args

from pydantic import JsonValue

from meshpoint.errors import ConfigurationError, NotJson
from meshpoint.model.json_values import JsonDict
from meshpoint.model.subtasks import Migration
from meshpoint.ports.agent import Plan, ResumeFrom
from meshpoint.subtasks.migrating import validate_migrations
from meshpoint.subtasks.validity import MAX_NAME_LENGTH, is_valid_name


def build_plan(
    agent: str,
    subtasks: Sequence[str],
    version: str,
    migrations: Sequence[Migration],
    *,
    type: str = "agent",
    exclusive: bool = False,
    preserve: bool = False,
    config: Mapping[str, JsonValue] | None = None,
    resume_from: ResumeFrom = "start",
) -> Plan:
    """Build the plan of an agent.

    Raises:
        ConfigurationError: Two subtasks have the same name, a name cannot be used, the migrations
            are ambiguous, `config` is not a JSON object, or `resume_from` is unknown.
    """
    if resume_from not in get_args(ResumeFrom):
        raise ConfigurationError(
            f"agent {agent!r}, resume_from", f"is {resume_from!r}", 'write "start" or "last-pause"'
        )
    key = f"agent {agent!r}, subtasks"
    if isinstance(subtasks, str):
        raise ConfigurationError(key, f"{subtasks!r} is one string", f"write [{subtasks!r}]")
    for name in subtasks:
        if not is_valid_name(name):
            raise ConfigurationError(
                key,
                f"{name!r} is not a valid name",
                f"use printable text of 1 to {MAX_NAME_LENGTH} characters",
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
        config=_check_config(agent, config),
        resume_from=resume_from,
    )


def _check_config(agent: str, config: Mapping[str, JsonValue] | None) -> dict[str, JsonValue]:
    key = f"agent {agent!r}, config"
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        fix = 'write a dict, as in {"model": "small"}'
        raise ConfigurationError(key, f"is a {builtins.type(config).__name__}", fix)
    try:
        return JsonDict(config, name="config").to_plain()
    except NotJson as error:
        raise ConfigurationError(key, str(error), "use JSON values") from error
