"""Turn `--config`, `--broker`, `--db` and similar options into settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.errors import ConfigurationError, MeshpointError

if TYPE_CHECKING:
    from meshpoint.settings import AgentSettings, MeshSettings, Settings

Configs = Annotated[
    list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; the agents of all files are used.")
]
Config = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file of the mesh.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="URL", help="Broker URL; overrides the file.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="Namespace of the mesh; overrides the file.")
]
Database = Annotated[str | None, typer.Option("--db", metavar="URL", help="Database URL; overrides the file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[
    int, typer.Option("--limit", min=1, max=1_000_000, metavar="N", help="Maximum number of results, newest first.")
]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines even on a terminal.")]

LOG_LEVELS = ("debug", "info", "warning", "error")


def load_served_settings(configs: list[Path]) -> Settings:
    """Load the settings of files that must contain an agent.

    Adds the working directory to `sys.path`, so that entrypoints can be modules there.

    Raises:
        ConfigurationError: The settings cannot work, or contain no agent.
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
"""Seconds that the queue for replies survives without its command, as in a network outage."""


def load_mesh(config: Path | None, broker: str | None = None, namespace: str | None = None) -> MeshSettings:
    """Load the mesh of `config`, with `broker` and `namespace` overriding its values.

    Without `config`, the mesh comes from variables and defaults. Its private queues expire soon,
    since a command is short-lived.

    Raises:
        ConfigurationError: The settings cannot work.
    """
    from meshpoint.settings import MeshSettings, load, problems

    mesh = load([config] if config else []).mesh
    overrides = {key: value for key, value in (("broker_url", broker), ("namespace", namespace)) if value is not None}
    options = {"broker_url": "--broker", "namespace": "--namespace"}
    if overrides:
        mesh = problems.build_section(MeshSettings, mesh.model_dump() | overrides, options, "mesh")
    return mesh.model_copy(update={"private_queue_ttl_seconds": _PRIVATE_QUEUE_TTL})


def require_mesh(config: Path | None, broker: str | None, namespace: str | None) -> MeshSettings:
    """Like `load_mesh`, for commands that send: requires a broker to be named explicitly.

    The default broker is a file in the working directory, which may never have been served.

    Raises:
        ConfigurationError: No broker is named, or the settings cannot work.
    """
    from meshpoint.settings import load

    if config is None and broker is None and "broker_url" not in load([]).mesh.model_fields_set:
        raise ConfigurationError("--config", "no mesh is named", "use --config FILE or --broker URL")
    return load_mesh(config, broker, namespace)


def load_databases(config: Path | None, database: str | None) -> list[AgentSettings]:
    """Return one agent for each database of `config`, or one for `database`.

    Raises:
        ConfigurationError: Neither names a database.
    """
    from meshpoint.settings import AgentSettings, load

    if database is not None:
        try:
            return [AgentSettings(name="cli", entrypoint="m:a", session_service="sql", session_db_url=database)]
        except ConfigurationError as error:
            raise ConfigurationError("--db", error.problem, error.fix) from error
    if config is None:
        raise ConfigurationError("--config", "no database is named", "use --config FILE or --db URL")
    agents = load([config]).agents
    by_url = {agent.session_db_url: agent for agent in reversed(agents) if agent.session_service == "sql"}
    if not by_url:
        fix = "add session_service: sql to an agent, or use --db URL"
        raise ConfigurationError(str(config), "no agent in it stores its tasks in a database", fix)
    return list(by_url.values())


def check_file_exists(url: str) -> None:
    """Check that a SQLite file exists, since opening a store would create it.

    Raises:
        MeshpointError: `url` names a SQLite file that does not exist or cannot be reached.
    """
    scheme, _, file = url.partition(":///")
    try:
        missing = scheme.startswith("sqlite") and not Path(file.partition("?")[0]).exists()
    except OSError as error:
        raise MeshpointError(f"{file} cannot be opened: {error.strerror}") from error
    if missing:
        raise MeshpointError(f"the file {file} does not exist: no replica has used it yet")


def parse_log_level(level: str) -> str:
    """Return `level` in lower case.

    Raises:
        ConfigurationError: It is not a log level.
    """
    if level.lower() not in LOG_LEVELS:
        raise ConfigurationError(
            "--log-level", f"{level!r} is not a log level", f"use one of {', '.join(LOG_LEVELS)}"
        )
    return level.lower()
