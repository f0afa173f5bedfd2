"""Combine files and variables into `Settings`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshpoint.errors import ConfigurationError
from meshpoint.settings import environment, files, problems
from meshpoint.settings.agent import AgentSettings
from meshpoint.settings.mesh import MeshSettings
from meshpoint.settings.root import Settings

_SECTIONS = ("mesh", "agent", "agents")


@dataclass(slots=True)
class _RawSettings:
    """The content of the files: one mesh, and each agent with its label for error messages."""

    mesh: dict[str, Any] = field(default_factory=dict)
    agents: list[tuple[str, Any]] = field(default_factory=list)


def load(paths: Sequence[Path | str], env: Mapping[str, str] = os.environ) -> Settings:
    """Load the settings of all `paths`, overridden by the `MESHPOINT_` variables of `env`.

    The result has the agents of all files; a mesh key given in several files must have the same
    value in each. Without files, it has the defaults of the mesh and no agents. Relative SQLite
    files are resolved against the working directory.

    Raises:
        ConfigurationError: The settings cannot work. The message is one line with the key and the
            fix.
    """
    raw = _RawSettings()
    for path in map(Path, paths):
        _add_file(raw, path, files.read(path, env), label=f"{path}: " if len(paths) > 1 else "")
    overrides = environment.read_overrides(env)
    mesh = _build_mesh(raw, overrides.get("mesh", {}))
    agents = _build_agents(raw, overrides.get("agent", {}), mesh)
    try:
        return Settings(mesh=mesh, agents=tuple(agents))
    except ConfigurationError as error:
        labels = {f"agents[{index}]": label for index, (label, _) in enumerate(raw.agents)}
        section, dot, key = error.key.partition(".")
        raise ConfigurationError(f"{labels.get(section, section)}{dot}{key}", error.problem, error.fix) from error


def _add_file(raw: _RawSettings, path: Path, content: dict[str, Any], label: str) -> None:
    for key in content:
        if key not in _SECTIONS:
            raise problems.unknown_key(f"{path}: {key}", key, _SECTIONS)
    if "agent" in content and "agents" in content:
        raise ConfigurationError(f"{path}: agent", "is used together with agents", "keep one of them")
    _add_mesh(raw, path, content.get("mesh"))
    if isinstance(content.get("agent"), list):
        raise ConfigurationError(f"{label}agent", "is a list", "write 'agents:' above several agents")
    if "agent" in content:
        raw.agents.append((f"{label}agent", content["agent"]))
    agents = content.get("agents") or []
    if not isinstance(agents, list):
        raise ConfigurationError(
            f"{label}agents", "is not a list", "start each agent with '- name: …', or write agent:"
        )
    raw.agents += [(f"{label}agents[{index}]", agent) for index, agent in enumerate(agents)]


def _add_mesh(raw: _RawSettings, path: Path, mesh: Any) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, dict):
        raise ConfigurationError(f"{path}: mesh", "has no keys", "write 'key: value' lines below it")
    for key, value in mesh.items():
        if key in raw.mesh and raw.mesh[key] != value:
            problem = "differs from the value in an earlier file"
            raise ConfigurationError(f"{path}: mesh.{key}", problem, "use the same mesh in all files of one run")
    raw.mesh |= mesh


def _reject_misplaced(values: Any, label: str, model: type[BaseModel], other: type[BaseModel], section: str) -> None:
    for key in values if isinstance(values, dict) else ():
        if key in other.model_fields and key not in model.model_fields:
            raise ConfigurationError(f"{label}.{key}", f"is a key of {section}", f"move it under '{section}:'")


def _build_mesh(raw: _RawSettings, overrides: dict[str, Any]) -> MeshSettings:
    _reject_misplaced(raw.mesh, "mesh", MeshSettings, AgentSettings, "agent")
    names = {key: environment.variable_name("mesh", key) for key in overrides}
    return problems.build_section(MeshSettings, raw.mesh | overrides, names, "mesh")


def _build_agents(raw: _RawSettings, overrides: dict[str, Any], mesh: MeshSettings) -> list[AgentSettings]:
    names = {key: environment.variable_name("agent", key) for key in overrides}
    if overrides and len(raw.agents) > 1:
        fix = "write ${VAR} in the files instead"
        raise ConfigurationError(next(iter(names.values())), f"cannot apply to {len(raw.agents)} agents", fix)
    if overrides and not raw.agents:
        return []
    inherited = {"max_message_bytes": mesh.max_message_bytes}
    return [_build_agent(label, values, inherited, overrides, names) for label, values in raw.agents]


def _build_agent(
    label: str, values: Any, inherited: dict[str, Any], overrides: dict[str, Any], names: dict[str, str]
) -> AgentSettings:
    _reject_misplaced(values, label, AgentSettings, MeshSettings, "mesh")
    merged = {**inherited, **values, **overrides} if isinstance(values, dict) else values
    try:
        return problems.build_section(AgentSettings, merged, names, label)
    except ConfigurationError as error:
        section, dot, key = error.key.partition(".")
        if section != "agent" or not dot:
            raise
        raise ConfigurationError(names.get(key, f"{label}.{key}"), error.problem, error.fix) from error
