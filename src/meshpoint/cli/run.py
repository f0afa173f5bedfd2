"""`meshpoint run` and `meshpoint sweep`: serve agents, or only sweep their database once."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint import event_loop
from meshpoint.cli.output import print_json, print_table, print_text
from meshpoint.cli.sources import AsJson, add_working_directory
from meshpoint.errors import ConfigurationError
from meshpoint.extras import TELEMETRY

if TYPE_CHECKING:
    from meshpoint.cli.exits import ExitCode
    from meshpoint.settings import Settings
    from meshpoint.wiring import MetricsAddress

log = logging.getLogger("meshpoint.run")

MAX_PORT = 65_535
_Configs = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG...", help="YAML files; the agents of all files are used."),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
]

RUN_EXAMPLES = """\b
Examples:
  meshpoint run travel.yaml
  meshpoint run travel.yaml flights.yaml          several agents in one process
  meshpoint run travel.yaml --replicas 3          three processes that share the work
  meshpoint run travel.yaml --log-json --log-level warning
  meshpoint run travel.yaml --metrics-port 9464
"""
SWEEP_EXAMPLES = """\b
Examples:
  meshpoint sweep travel.yaml
  meshpoint sweep travel.yaml --json
"""

_LOG_LEVELS = ("debug", "info", "warning", "error")

_SIGNAL_DEBOUNCE = 1.0
"""Seconds within which a replica counts signals as one.

A platform may signal both the supervisor and its replicas, and the supervisor then signals the
replicas again.
"""


def run(
    configs: _Configs,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", "-n", metavar="N", min=1, max=1000, help="Number of processes."
        ),
    ] = 1,
    log_level: LogLevel = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log JSON lines even on a terminal.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            min=1,
            max=MAX_PORT,
            help="Serve /metrics, /healthz and /readyz; replica N of several at PORT + N - 1.",
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="HOST", help="Address for --metrics-port.")
    ] = "127.0.0.1",
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve agents until SIGTERM or Ctrl-C, then drain.

    The drain takes at most drain_timeout_seconds plus release_timeout_seconds. If agent code is
    still running then, the process ends with exit code 8. A second signal ends it at once. With
    several replicas, a replica that dies is restarted.
    """
    from meshpoint.wiring import logging_to

    level, settings = parse_log_level(log_level), load_agents(configs)
    if replicas > 1 and settings.mesh.broker_url.startswith("memory"):
        raise ConfigurationError(
            "mesh.broker_url", "processes cannot share memory://", "use sqlite:///meshpoint.db"
        )
    addresses = _metrics_addresses(metrics_host, metrics_port, replicas)
    with logging_to(sys.stderr, level, as_json=log_json):
        if replicas == 1:
            event_loop.run(_serve(settings, supervised, addresses[0]))
            return
        commands = [_child_command(configs, level, log_json, each) for each in addresses]
        code = asyncio.run(_supervise(commands))
    raise typer.Exit(code)


def sweep(configs: _Configs, log_level: LogLevel = "warning", as_json: AsJson = False) -> None:
    """Run one sweep and print what it did.

    A sweep enforces deadlines, handles expired leases and sends committed messages that are still
    unsent.

    Running replicas sweep by themselves; a manual sweep does not conflict with theirs.
    """
    from meshpoint.wiring import logging_to, sweep_once

    level, settings = parse_log_level(log_level), load_agents(configs)
    with logging_to(sys.stderr, level):
        done = asyncio.run(sweep_once(settings))
    if as_json:
        print_json(done)
    elif any(done.values()):
        print_table(("due", "done"), [(what, str(count)) for what, count in done.items() if count])
    else:
        print_text("nothing was due")


def load_agents(configs: list[Path]) -> Settings:
    """Load the settings of files that must contain an agent.

    Adds the working directory to `sys.path`, so that entrypoints can be modules there.

    Raises:
        ConfigurationError: The settings cannot work, or contain no agent.
    """
    from meshpoint.settings import load

    settings = load(configs)
    if not settings.agents:
        raise ConfigurationError(
            "agents", f"none in {', '.join(map(str, configs))}", "add a section 'agent:'"
        )
    add_working_directory()
    return settings


def parse_log_level(level: str) -> str:
    """Return `level` in lower case.

    Raises:
        ConfigurationError: It is not a log level.
    """
    if level.lower() not in _LOG_LEVELS:
        raise ConfigurationError(
            "--log-level", f"{level!r} is not a log level", f"use one of {', '.join(_LOG_LEVELS)}"
        )
    return level.lower()


class _StopRequest(asyncio.Event):
    """An event that starts the drain, with its reason, such as the name of a signal."""

    reason: str | None = None

    def trigger(self, reason: str) -> None:
        """Start the drain. Only the first reason is kept."""
        if not self.is_set():
            self.reason = reason
        self.set()


def _metrics_addresses(host: str, port: int | None, replicas: int) -> list[MetricsAddress | None]:
    """The address of each replica's metrics.

    Raises:
        ConfigurationError: A library is missing, or there are not enough ports.
    """
    from meshpoint.wiring import MetricsAddress

    if port is None:
        return [None] * replicas
    TELEMETRY.require("--metrics-port")
    if port + replicas - 1 > MAX_PORT:
        problem = f"{replicas} replicas need the ports {port} to {port + replicas - 1}"
        raise ConfigurationError("--metrics-port", problem, f"use ports up to {MAX_PORT}")
    return [MetricsAddress(host, port + number) for number in range(replicas)]


async def _serve(settings: Settings, supervised: bool, metrics: MetricsAddress | None) -> None:
    from meshpoint import wiring
    from meshpoint.cli.watchdog import DrainExitObserver, Watchdog

    stop, loop = _StopRequest(), asyncio.get_running_loop()
    options = [agent.options() for agent in settings.agents]

    def request_stop(reason: str) -> None:
        with suppress(RuntimeError):  # the event loop has already ended
            loop.call_soon_threadsafe(stop.trigger, reason)

    limit = max((each.drain_timeout + each.release_timeout).total_seconds() for each in options)
    signal_debounce = _SIGNAL_DEBOUNCE if supervised else 0
    with Watchdog(
        request_stop, limit=limit, supervised=supervised, signal_debounce=signal_debounce
    ) as watchdog:
        if hasattr(loop, "on_restart"):
            loop.on_restart = watchdog.install_wakeup_fd
        await wiring.serve(
            settings,
            observer=DrainExitObserver(len(options), watchdog.exit_now),
            stop=stop,
            metrics=metrics,
        )


async def _supervise(commands: list[list[str]]) -> ExitCode:
    from meshpoint.cli.supervisor import Process, Supervisor
    from meshpoint.wiring import make_clock

    async def spawn(number: int) -> Process:
        # A new session keeps the terminal's Ctrl-C from the child, which would otherwise receive
        # it twice. The kernel closes the pipe to its standard input when this process dies.
        return await asyncio.create_subprocess_exec(
            *commands[number - 1], stdin=asyncio.subprocess.PIPE, start_new_session=True
        )

    supervisor, loop = Supervisor(spawn, len(commands), make_clock()), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s received: stopping the replicas", number.name)
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return await supervisor.run()


def _child_command(
    configs: list[Path], level: str, log_json: bool, metrics: MetricsAddress | None
) -> list[str]:
    command = [sys.executable, "-m", "meshpoint.cli", "run", "--supervised", "--log-level", level]
    if log_json:
        command.append("--log-json")
    if metrics is not None:
        command += ["--metrics-host", metrics.host, "--metrics-port", str(metrics.port)]
    return [*command, "--", *map(str, configs)]
