"""Read `MESHPOINT_` environment variables, and reject useless ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from meshpoint.errors import ConfigurationError
from meshpoint.settings.agent import AgentSettings
from meshpoint.settings.mesh import MeshSettings

PREFIX = "MESHPOINT_"


class _Overrides(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__")

    mesh: dict[str, Any] = {}
    agent: dict[str, Any] = {}


def variable_name(section: str, key: str) -> str:
    """Return the name of the variable that overrides `key` of `section`."""
    return f"{PREFIX}{section}__{key}".upper()


def read_overrides(env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the values set in `env`, by section and key. Empty variables are ignored.

    Raises:
        ConfigurationError: A variable has an unknown section, or is a known key without its
            section. Other names that start with the prefix are ignored (Kubernetes derives some
            from service names).
    """
    variables = {name.upper(): value for name, value in env.items() if name.upper().startswith(PREFIX)}
    for name in variables:
        _check_variable(name)
    source = EnvSettingsSource(_Overrides)
    # Replaces the process's variables that the source has read. Only nested names are passed:
    # setting a whole section as JSON in one variable is not supported.
    source.env_vars = {name.lower(): value for name, value in variables.items() if "__" in name and value}
    return dict(source())


def _check_variable(name: str) -> None:
    section, nested, _ = name.removeprefix(PREFIX).lower().partition("__")
    if nested and section not in _Overrides.model_fields:
        fix = f"write {variable_name('mesh', 'key')} or {variable_name('agent', 'key')}"
        raise ConfigurationError(name, "has an unknown section", fix)
    if nested:
        return
    for owner, model in (("mesh", MeshSettings), ("agent", AgentSettings)):
        if section in model.model_fields:
            raise ConfigurationError(name, "has no effect", f"write {variable_name(owner, section)}")
