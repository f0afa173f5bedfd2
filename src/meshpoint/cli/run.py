"""`meshpoint run`: serve agents, in this process or in several child processes."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint import event_loop
from meshpoint.cli import sources
from meshpoint.errors import ConfigurationError

if TYPE_CHECKING:
    from meshpoint.cli.exits import ExitCode
    from meshpoint.settings import Settings

log = logging.getLogger("meshpoint.run")

EXAMPLES = """\b
Examples:
  meshpoint run travel.yaml
  meshpoint run travel.yaml flights.yaml          several agents in one process
  meshpoint run travel.yaml --replicas 3          three processes that share the work
  meshpoint run travel.yaml --log-json --log-level warning
"""

_SIGNAL_DEBOUNCE = 1.0
"""Seconds within which a replica counts signals as one.

A platform may signal both the supervisor and its replicas, and the supervisor then signals the
replicas again.
"""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("run", epilog=EXAMPLES)(run)


def run(
    configs: sources.Configs,
    replicas: Annotated[
        int, typer.Option("--replicas", "-n", metavar="N", min=1, max=1000, help="Number of processes.")
    ] = 1,
    log_level: sources.LogLevel = "info",
    log_json: sources.LogJson = False,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve agents until SIGTERM or Ctrl-C, then drain.

    The drain takes at most drain_timeout_seconds plus release_timeout_seconds. If agent code is
    still running then, the process ends with exit code 8. A second signal ends it at once. With
    several replicas, a replica that dies is restarted.
    """
    from meshpoint.adapters.logging_observer import logging_to

    level, settings = sources.parse_log_level(log_level), sources.load_served_settings(configs)
    if replicas > 1 and settings.mesh.broker_url.startswith("memory"):
        raise ConfigurationError("mesh.broker_url", "processes cannot share memory://", "use sqlite:///meshpoint.db")
    with logging_to(sys.stderr, level, as_json=log_json):
        if replicas == 1:
            event_loop.run(_serve(settings, supervised))
            return
        code = asyncio.run(_supervise(_child_command(configs, level, log_json), replicas))
    raise typer.Exit(code)


async def _serve(settings: Settings, supervised: bool) -> None:
    from meshpoint import wiring
    from meshpoint.cli.watchdog import DrainExitObserver, Watchdog
    from meshpoint.engine.stopping import StopRequest

    stop, loop = StopRequest(), asyncio.get_running_loop()
    options = [agent.options() for agent in settings.agents]

    def request_stop(reason: str) -> None:
        with suppress(RuntimeError):  # the event loop has already ended
            loop.call_soon_threadsafe(stop.because, reason)

    limit = max((each.drain_timeout + each.release_timeout).total_seconds() for each in options)
    signal_debounce = _SIGNAL_DEBOUNCE if supervised else 0
    with Watchdog(request_stop, limit=limit, supervised=supervised, signal_debounce=signal_debounce) as watchdog:
        if hasattr(loop, "on_restart"):
            loop.on_restart = watchdog.install_wakeup_fd
        await wiring.serve(settings, observer=DrainExitObserver(len(options), watchdog.exit_now), stop=stop)


async def _supervise(command: list[str], replicas: int) -> ExitCode:
    from meshpoint.adapters.system_clock import SystemClock
    from meshpoint.cli.supervisor import Process, Supervisor

    async def spawn() -> Process:
        # A new session keeps the terminal's Ctrl-C from the child, which would otherwise receive
        # it twice. The kernel closes the pipe to its standard input when this process dies.
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)

    supervisor = Supervisor(spawn, replicas, SystemClock())
    with _handle_signals(supervisor.stop, message="stopping the replicas"):
        return await supervisor.run()


def _child_command(configs: list[Path], level: str, log_json: bool) -> list[str]:
    command = [sys.executable, "-m", "meshpoint.cli", "run", "--supervised", "--log-level", level]
    return [*command, *(["--log-json"] if log_json else []), "--", *map(str, configs)]


@contextmanager
def _handle_signals(callback: Callable[[], None], *, message: str) -> Iterator[None]:
    """Log `message` and call `callback` on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s received: %s", number.name, message)
        callback()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
