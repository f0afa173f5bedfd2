"""Choose the mesh to connect to: a file or the variables, and values that override them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshpoint.errors import ConfigurationError
from meshpoint.settings.agent import StoreSettings, stores_of_agents
from meshpoint.settings.loading import Settings, build_section, load
from meshpoint.settings.mesh import MeshSettings


@dataclass(frozen=True, slots=True)
class OptionNames:
    """What error messages call the values that override a file, and how to name a broker."""

    config: str
    broker_url: str
    namespace: str
    fix: str


def load_mesh(
    config: Path | None, broker_url: str | None, namespace: str | None, options: OptionNames
) -> MeshSettings:
    """Load the mesh of `config`, with `broker_url` and `namespace` overriding its values.

    Without `config`, the mesh comes from variables and defaults.

    Raises:
        ConfigurationError: The settings cannot work.
    """
    mesh = load([config] if config else []).mesh
    overrides = {
        key: value
        for key, value in (("broker_url", broker_url), ("namespace", namespace))
        if value is not None
    }
    if not overrides:
        return mesh
    names = {"broker_url": options.broker_url, "namespace": options.namespace}
    return build_section(MeshSettings, mesh.model_dump() | overrides, names, "mesh")


def require_mesh(
    config: Path | None, broker_url: str | None, namespace: str | None, options: OptionNames
) -> MeshSettings:
    """Like `load_mesh`, for callers that send: requires a broker to be named explicitly.

    The default broker is a file in the working directory, which may never have been served.

    Raises:
        ConfigurationError: No broker is named, or the settings cannot work.
    """
    if (
        config is None
        and broker_url is None
        and "broker_url" not in load([]).mesh.model_fields_set
    ):
        raise ConfigurationError(options.config, "no mesh is named", options.fix)
    return load_mesh(config, broker_url, namespace, options)


def stores_of(settings: Settings) -> list[StoreSettings]:
    """The store of each database of the agents or, without agents, of the mesh."""
    agents, mesh_url = settings.agents, settings.mesh.database_url
    if not agents and mesh_url is not None:
        keys = settings.mesh.key_ring
        return [StoreSettings.at(mesh_url, key="mesh.database_url", keys=keys)]
    return stores_of_agents(agents)
