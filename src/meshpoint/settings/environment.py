"""`MESHPOINT_` variables: what they override, and which of them would do nothing."""

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
    """The variable that overrides `key` of `section`."""
    return f"{PREFIX}{section}__{key}".upper()


def read_overrides(env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The values that `env` sets, by section and key. A variable set to nothing overrides nothing.

    Raises:
        ConfigurationError: a variable of another section, or one without its section. Other names that happen to
            start with the prefix (Kubernetes makes some from the names of services) are left alone.
    """
    variables = {name.upper(): value for name, value in env.items() if name.upper().startswith(PREFIX)}
    for name in variables:
        _check_variable(name)
    source = EnvSettingsSource(_Overrides)
    # The source would read the process's own variables. Only nested names go in: the whole of a section as
    # JSON in one variable is not offered.
    source.env_vars = {name.lower(): value for name, value in variables.items() if "__" in name and value}
    return dict(source())


def _check_variable(name: str) -> None:
    section, nested, _ = name.removeprefix(PREFIX).lower().partition("__")
    if nested and section not in _Overrides.model_fields:
        fix = f"write {variable_name('mesh', 'key')} or {variable_name('agent', 'key')}"
        raise ConfigurationError(name, "is no section", fix)
    if nested:
        return
    for owner, model in (("mesh", MeshSettings), ("agent", AgentSettings)):
        if section in model.model_fields:
            raise ConfigurationError(name, "sets nothing", f"write {variable_name(owner, section)}")
