"""From `--config`, `--broker`, `--db` and their like to settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.errors import ConfigurationError, MeshpointError

if TYPE_CHECKING:
    from meshpoint.settings import AgentSettings, MeshSettings, Settings

Configs = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; their agents add up.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file of the mesh.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="URL", help="Broker, in place of the file's.")]
Namespace = Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Mesh, in place of the file's.")]
Database = Annotated[str | None, typer.Option("--db", metavar="URL", help="Database, in place of the file's.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[
    int, typer.Option("--limit", min=1, max=1_000_000, metavar="N", help="How many, newest first, up to a million.")
]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines on a terminal too.")]

LOG_LEVELS = ("debug", "info", "warning", "error")


def load_served_settings(configs: list[Path]) -> Settings:
    """The settings of files that must name an agent. Their modules may also stand in the working directory.

    Raises:
        ConfigurationError: the files cannot work, or name no agent.
    """
    from meshpoint.settings import load

    settings = load(configs)
    if not settings.agents:
        raise ConfigurationError("agents", f"none in {', '.join(map(str, configs))}", "add a section 'agent:'")
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    return settings


_PRIVATE_QUEUE_TTL = 300.0
"""Seconds that the queue for a command's reply may be without its command, as in an outage of the network."""


def load_mesh(config: Path | None, broker: str | None = None, namespace: str | None = None) -> MeshSettings:
    """The mesh of `config` (without one: of the variables and defaults), with `broker` and `namespace` replaced.

    It is for a command that comes and goes: its private queue is not kept long after it.

    Raises:
        ConfigurationError: it cannot work.
    """
    from meshpoint.settings import MeshSettings, load, problems

    mesh = load([config] if config else []).mesh
    overrides = {key: value for key, value in (("broker_url", broker), ("namespace", namespace)) if value is not None}
    options = {"broker_url": "--broker", "namespace": "--namespace"}
    if overrides:
        mesh = problems.build_section(MeshSettings, mesh.model_dump() | overrides, options, "mesh")
    return mesh.model_copy(update={"private_queue_ttl_seconds": _PRIVATE_QUEUE_TTL})


def require_mesh(config: Path | None, broker: str | None, namespace: str | None) -> MeshSettings:
    """As `load_mesh`, for a command that sends: in the default broker of a folder nobody may ever have served.

    Raises:
        ConfigurationError: nothing names a broker, or the mesh cannot work.
    """
    from meshpoint.settings import load

    if config is None and broker is None and "broker_url" not in load([]).mesh.model_fields_set:
        raise ConfigurationError("--config", "no mesh is named", "give --config FILE or --broker URL")
    return load_mesh(config, broker, namespace)


def load_databases(config: Path | None, database: str | None) -> list[AgentSettings]:
    """One agent for each database of `config`, or one that stands for `database`.

    Raises:
        ConfigurationError: neither names a database.
    """
    from meshpoint.settings import AgentSettings, load

    if database is not None:
        try:
            return [AgentSettings(name="cli", entrypoint="m:a", session_service="sql", session_db_url=database)]
        except ConfigurationError as error:
            raise ConfigurationError("--db", error.problem, error.fix) from error
    if config is None:
        raise ConfigurationError("--config", "no database is named", "give --config FILE or --db URL")
    agents = load([config]).agents
    by_url = {agent.session_db_url: agent for agent in reversed(agents) if agent.session_service == "sql"}
    if not by_url:
        fix = "add session_service: sql to an agent, or give --db URL"
        raise ConfigurationError(str(config), "no agent in it keeps its tasks in a database", fix)
    return list(by_url.values())


def check_file_exists(url: str) -> None:
    """Looking must not make a file: opening a store would.

    Raises:
        MeshpointError: `url` names a SQLite file that does not exist, or cannot be reached.
    """
    scheme, _, file = url.partition(":///")
    try:
        missing = scheme.startswith("sqlite") and not Path(file.partition("?")[0]).exists()
    except OSError as error:
        raise MeshpointError(f"{file} cannot be opened: {error.strerror}") from error
    if missing:
        raise MeshpointError(f"there is no file {file}: no replica has run on it yet")


def parse_log_level(level: str) -> str:
    """`level` in lower case.

    Raises:
        ConfigurationError: there is no such level.
    """
    if level.lower() not in LOG_LEVELS:
        raise ConfigurationError("--log-level", f"{level!r} is no level", f"use one of {', '.join(LOG_LEVELS)}")
    return level.lower()
