"""Settings, with the constraints between sections; combines files and variables into them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from meshpoint.errors import ConfigurationError
from meshpoint.model.declared_type import first_problem, has_too_many_errors, loggable_cause
from meshpoint.settings import files
from meshpoint.settings.agent import AgentSettings
from meshpoint.settings.database_key import SHORT_KEY, Layer, check_not_empty, merge_layers
from meshpoint.settings.mesh import MeshSettings, Section

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_AnyModel = TypeVar("_AnyModel", bound=BaseModel)

_PREFIX = "MESHPOINT_"
_SECTIONS = ("mesh", "agent", "agents")
_MIN_SIMILARITY = 0.6
"""Similarity, from 0 to 1, above which a known key is suggested."""
_MAX_SHOWN_CHARACTERS = 60
_UNIT_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


class Settings(Section):
    """A mesh, and the agents that one process serves."""

    mesh: MeshSettings = Field(default_factory=MeshSettings)
    agents: tuple[AgentSettings, ...] = ()

    @model_validator(mode="after")
    def _check_agents(self) -> Settings:
        names: set[str] = set()
        for index, agent in enumerate(self.agents):
            if agent.name in names:
                problem = f"two agents are called {agent.name!r}"
                raise ConfigurationError(f"agents[{index}].name", problem, "use unique names")
            names.add(agent.name)
            agent.check_mesh(self.mesh, f"agents[{index}]")
        return self


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
    overrides = read_overrides(env)
    mesh = _build_mesh(raw, overrides.get("mesh", {}))
    agents = _build_agents(raw, overrides, mesh)
    try:
        return Settings(mesh=mesh, agents=tuple(agents))
    except ConfigurationError as error:
        labels = {f"agents[{index}]": label for index, (label, _) in enumerate(raw.agents)}
        section, dot, key = error.key.partition(".")
        raise ConfigurationError(
            f"{labels.get(section, section)}{dot}{key}", error.problem, error.fix
        ) from error


def _add_file(raw: _RawSettings, path: Path, content: dict[str, Any], label: str) -> None:
    for key in content:
        if key not in _SECTIONS:
            raise _unknown_key(f"{path}: {key}", key, _SECTIONS)
    if "agent" in content and "agents" in content:
        raise ConfigurationError(
            f"{path}: agent", "is used together with agents", "keep one of them"
        )
    _add_mesh(raw, path, content.get("mesh"))
    if isinstance(content.get("agent"), list):
        raise ConfigurationError(
            f"{label}agent", "is a list", "write 'agents:' above several agents"
        )
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
        raise ConfigurationError(
            f"{path}: mesh", "has no keys", "write 'key: value' lines below it"
        )
    for key, value in mesh.items():
        if key in raw.mesh and raw.mesh[key] != value:
            problem = "differs from the value in an earlier file"
            raise ConfigurationError(
                f"{path}: mesh.{key}", problem, "use the same mesh in all files of one run"
            )
    raw.mesh |= mesh


def _build_mesh(raw: _RawSettings, overrides: dict[str, Any]) -> MeshSettings:
    names = {key: variable_name("mesh", key) for key in overrides}
    values = raw.mesh | overrides
    check_not_empty(values, f"mesh.{SHORT_KEY}")
    return build_section(MeshSettings, values, names, "mesh")


@dataclass(frozen=True, slots=True)
class _AgentDefaults:
    """What the agents have from the mesh, and from the variables of the section `agent`."""

    mesh: MeshSettings
    mesh_url_name: str
    overrides: dict[str, Any]
    names: dict[str, str]


def _build_agents(
    raw: _RawSettings, variables: Mapping[str, dict[str, Any]], mesh: MeshSettings
) -> list[AgentSettings]:
    overrides = variables.get("agent", {})
    names = {key: variable_name("agent", key) for key in overrides}
    if overrides and len(raw.agents) > 1:
        fix = "write ${VAR} in the files instead"
        raise ConfigurationError(
            next(iter(names.values())), f"cannot apply to {len(raw.agents)} agents", fix
        )
    from_variable = SHORT_KEY in variables.get("mesh", {})
    mesh_url_name = variable_name("mesh", SHORT_KEY) if from_variable else f"mesh.{SHORT_KEY}"
    defaults = _AgentDefaults(mesh, mesh_url_name, overrides, names)
    return [_build_agent(label, values, defaults) for label, values in raw.agents]


def _build_agent(label: str, values: Any, defaults: _AgentDefaults) -> AgentSettings:
    names = defaults.names
    if isinstance(values, dict):
        mesh = defaults.mesh
        layers = [
            Layer(values, lambda key: f"{label}.{key}"),
            Layer(defaults.overrides, lambda key: variable_name("agent", key)),
        ]
        merged, origins = merge_layers(mesh.database_url, defaults.mesh_url_name, layers)
        inherited = {
            "max_message_bytes": mesh.max_message_bytes,
            "encryption_keys": mesh.encryption_keys,
        }
        values = {**inherited, **merged}
        names = origins | names
    try:
        return build_section(AgentSettings, values, names, label)
    except ConfigurationError as error:
        section, dot, key = error.key.partition(".")
        if section != "agent" or not dot:
            raise
        raise ConfigurationError(
            names.get(key, f"{label}.{key}"), error.problem, error.fix
        ) from error


class _Overrides(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__")

    mesh: dict[str, Any] = {}
    agent: dict[str, Any] = {}


def variable_name(section: str, key: str) -> str:
    """Return the name of the variable that overrides `key` of `section`."""
    return f"{_PREFIX}{section}__{key}".upper()


def read_overrides(env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the values set in `env`, by section and key. Empty variables are ignored.

    Raises:
        ConfigurationError: A variable has an unknown section, or is a known key without its
            section. Other names that start with the prefix are ignored (Kubernetes derives some
            from service names).
    """
    variables = {
        name.upper(): value for name, value in env.items() if name.upper().startswith(_PREFIX)
    }
    for name in variables:
        _check_variable(name)
    source = EnvSettingsSource(_Overrides)
    # Replaces the process's variables that the source has read. Only nested names are passed:
    # setting a whole section as JSON in one variable is not supported.
    source.env_vars = {
        name.lower(): value for name, value in variables.items() if "__" in name and value
    }
    return dict(source())


def _check_variable(name: str) -> None:
    section, nested, _ = name.removeprefix(_PREFIX).lower().partition("__")
    if nested and section not in _Overrides.model_fields:
        fix = f"write {variable_name('mesh', 'key')} or {variable_name('agent', 'key')}"
        raise ConfigurationError(name, "has an unknown section", fix)
    if nested:
        return
    for owner, model in (("mesh", MeshSettings), ("agent", AgentSettings)):
        if section in model.model_fields:
            raise ConfigurationError(
                name, "has no effect", f"write {variable_name(owner, section)}"
            )


def build_section(
    model: type[_AnyModel], values: Any, names: Mapping[str, str], label: str
) -> _AnyModel:
    """Validate `values` as `model`.

    Args:
        label: Name of the section in messages.
        names: Names in messages for keys that were set elsewhere, such as by a variable.

    Raises:
        ConfigurationError: The first problem found. Unknown keys come first, since a misspelt key
            is both unknown and missing.
    """
    if not isinstance(values, dict):
        raise ConfigurationError(
            label, "has no keys", f"write 'key: value' lines below it, or remove {label!r}"
        )
    for key in values:
        if key not in model.model_fields:
            where = names.get(str(key), f"{label}.{key}")
            raise _unknown_key(where, str(key), model.model_fields)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _translate(error, model, names, label) from loggable_cause(error)


def _unknown_key(where: str, key: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown `key`, with its section or the most similar known key."""
    known = sorted(known)
    for section, model in (("mesh", MeshSettings), ("agent", AgentSettings)):
        if key in model.model_fields and key not in known:
            return ConfigurationError(
                where, f"is a key of {section}", f"move it under '{section}:'"
            )
    nearest = get_close_matches(key.lower(), known, n=1, cutoff=_MIN_SIMILARITY)
    fix = f"did you mean {nearest[0]!r}?" if nearest else f"known keys are {', '.join(known)}"
    return ConfigurationError(where, "is not a known key", fix)


def _translate(
    error: ValidationError, model: type[BaseModel], names: Mapping[str, str], label: str
) -> ConfigurationError:
    if has_too_many_errors(error):
        return ConfigurationError(label, first_problem(error), "correct it")
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    where = names.get(key, f"{label}.{key}" if key else label)
    meaning = model.model_fields[key].description if key in model.model_fields else None
    unit = ", in seconds" if key.endswith("_seconds") else ""
    fix = f"meaning: {meaning}{unit}" if meaning else "correct it"
    if first["type"] == "missing":
        return ConfigurationError(where, "is missing", f"add it; {fix}")
    return ConfigurationError(where, _problem(first, key), fix)


def _problem(error: ErrorDetails, key: str) -> str:
    message = error["msg"].partition(", unable to parse")[0].replace("Input should be", "must be")
    message = message.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    message = message[:1].lower() + message[1:]
    shown = repr(error["input"])
    if key.endswith("_url") or len(shown) > _MAX_SHOWN_CHARACTERS:
        return message  # a URL may contain a password
    return f"{message}, not {shown}{_suggest_seconds(error['input'], key)}"


def _suggest_seconds(value: Any, key: str) -> str:
    """Return the number to write for a duration with a unit, such as "5 min"."""
    if not (key.endswith("_seconds") and isinstance(value, str)):
        return ""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?) ?(ms|s|sec|min|m|h|d)", value.strip())
    return f"; write {float(found[1]) * _UNIT_SECONDS[found[2]]:.15g}" if found else ""
