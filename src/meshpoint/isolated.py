"""Entry point of a child process that runs one segment, with its own connections.

`adapters.child_process` starts it, directly or through `template`. That module documents the
protocol of its pipes; `adapters.template_process` documents the protocol of the template's socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pydantic import JsonValue

from meshpoint import event_loop, wiring
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.events import Event
from meshpoint.model.tasks import Run
from meshpoint.ports.isolation import ExitKind, StopSignal
from meshpoint.settings import Settings

log = logging.getLogger("meshpoint.isolated")

_HEARTBEAT_INTERVAL = 1.0
"""Seconds between heartbeats."""
_ATOMIC_WRITE_BYTES = 4096
"""Maximum bytes that a pipe writes atomically."""
_MAX_SHORTENED = 1_000
"""Maximum characters of a text in an event that is too large to be written atomically."""
_OOM_SCORE_ADJ = "1000"
_PR_SET_PDEATHSIG = 1


def main(job: Mapping[str, Any]) -> NoReturn:
    """Run the segment in `job`, then end this process even if agent code is still running."""
    _die_with_parent()
    _prefer_oom_kill()
    reporter = ParentReporter(int(job["report_fd"]))
    code = 1
    with wiring.logging_to(sys.stderr, job["style"]["level"], as_json=job["style"]["as_json"]):
        try:
            event_loop.run(_run(job, reporter))
            code = 0
        except ConfigurationError as error:
            reporter.exit(ExitKind.IMPOSSIBLE, f"cannot run the task: {error}")
        except Unavailable as error:
            reporter.exit(ExitKind.NOT_STARTED, f"could not start: {error}")
        except BaseException:
            log.exception("an isolated run failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(job: Mapping[str, Any], reporter: ParentReporter) -> None:
    settings, run = Settings.model_validate(job["settings"]), Run(**job["run"])
    (agent,) = settings.agents
    options, loop = agent.options(), asyncio.get_running_loop()
    stop, cancel = asyncio.Event(), asyncio.Event()
    # Some platforms signal every process of a service. The segment may then run as long as
    # segments in the parent.
    loop.add_signal_handler(
        signal.SIGTERM, lambda: loop.call_later(options.drain_timeout.total_seconds(), stop.set)
    )
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    event_by_request = {StopSignal.CANCEL: cancel, StopSignal.DRAIN: stop}
    _start_listener(lambda word: loop.call_soon_threadsafe(event_by_request[word].set))
    heartbeat = asyncio.create_task(_send_heartbeats(reporter))
    broker = wiring.make_broker(settings.mesh, "isolated")
    worker = wiring.make_worker(
        agent, settings.mesh.namespace, broker, reporter, wiring.isolated_options(options)
    )
    try:
        await broker.open()
        settled = await worker.run_one(run, on_started=reporter.started, stop=stop, cancel=cancel)
    finally:
        await broker.close()
        heartbeat.cancel()
    if settled:
        reporter.exit(ExitKind.SETTLED)


async def _send_heartbeats(reporter: ParentReporter) -> None:
    while True:
        reporter.heartbeat()
        await asyncio.sleep(_HEARTBEAT_INTERVAL)


class ParentReporter:
    """An observer that reports events, heartbeats and the result to the parent process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()
        os.set_inheritable(descriptor, False)  # not inherited by processes that agent code starts
        os.set_blocking(descriptor, False)

    def emit(self, event: Event) -> None:
        """Send an event; it is lost if the parent does not read."""
        payload = {
            "step": event.step,
            "phase": event.phase,
            "agent": event.agent,
            "replica": event.replica,
            "task_ids": event.task_ids,
            "detail": dict(event.all_details()),
        }
        if not self._write({"event": payload}):
            shortened = _shorten(event.all_details())
            if not self._write({"event": {**payload, "detail": shortened}}):
                self._write({"event": {**payload, "detail": {}}})

    def heartbeat(self) -> None:
        """Report that the event loop is running."""
        self._write({"alive": True})

    def started(self) -> None:
        """Report that this process renews the lease from now on."""
        self._write({"started": True}, blocking=True)

    def exit(self, kind: ExitKind, reason: str = "") -> None:
        """Report the result of the run."""
        self._write({"exit": kind.name, "reason": reason[:1000]}, blocking=True)

    def _write(self, value: Mapping[str, Any], *, blocking: bool = False) -> bool:
        line = json.dumps(value, default=str).encode() + b"\n"
        if len(line) > _ATOMIC_WRITE_BYTES:
            return False
        with self._lock, suppress(BrokenPipeError):
            while True:
                try:
                    os.write(self._descriptor, line)
                except BlockingIOError:
                    if not blocking:
                        return True
                    select.select([], [self._descriptor], [])
                else:
                    return True
        return True


def _shorten(detail: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Cut long texts at the end, but tracebacks at the start: they end with the error."""
    return {
        key: value
        if not isinstance(value, str) or len(value) <= _MAX_SHORTENED
        else f"…{value[-_MAX_SHORTENED:]}"
        if key == "traceback"
        else f"{value[:_MAX_SHORTENED]}…"
        for key, value in detail.items()
    }


def _start_listener(handle: Callable[[StopSignal], object]) -> None:
    """Handle commands of the parent in a thread, since agent code may block the event loop.

    If the parent dies, end this process at once.
    """

    def listen() -> None:
        for line in sys.stdin.buffer:
            handle(StopSignal(json.loads(line)))
        os._exit(1)

    threading.Thread(target=listen, name="meshpoint parent", daemon=True).start()


def template(
    control_socket: socket.socket, modules: Sequence[str], idle_timeout: float
) -> NoReturn:
    """Import `modules`, then fork a process for each request, one at a time.

    Agent code is never imported here. Exits with its parent, after `idle_timeout` seconds without
    a child, or at the first error. The parent then starts processes without a template.
    """
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # may be sent to every process; children handle it
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    for name in modules:
        with suppress(Exception):  # a child that needs it reports the error
            import_module(name)
    gc.collect()
    gc.freeze()  # keeps collections in children from copying every page
    control_socket.settimeout(idle_timeout)
    with suppress(TimeoutError):
        while True:
            task_id, descriptors, _, _ = socket.recv_fds(control_socket, _ATOMIC_WRITE_BYTES, 3)
            if not task_id:
                break
            _fork(task_id, *descriptors)
    os._exit(0)


def _fork(task_id: bytes, commands_fd: int, report_fd: int, status_fd: int) -> None:
    """Fork a process; send its pidfd, then its exit code, through `status_fd`."""
    parent_pid = os.getpid()
    with socket.socket(fileno=status_fd) as status_socket:
        pid = os.fork()
        if pid == 0:
            status_socket.close()
            _run_child(parent_pid, task_id, commands_fd, report_fd)
        os.close(commands_fd)
        os.close(report_fd)
        process = os.pidfd_open(pid)
        with suppress(BrokenPipeError):
            socket.send_fds(status_socket, [task_id], [process])
        os.close(process)
        _, wait_status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            status_socket.send(b"%d" % os.waitstatus_to_exitcode(wait_status))


def _run_child(parent: int, task_id: bytes, commands_fd: int, report_fd: int) -> NoReturn:
    """Set up the child as `adapters.child_process` would, and run it.

    `commands_fd` becomes its standard input.
    """
    try:
        _die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        os.dup2(commands_fd, sys.stdin.fileno())
        os.close(commands_fd)
        with suppress(OSError):
            Path("/proc/self/comm").write_bytes(task_id)  # shown in process listings
        if job := sys.stdin.buffer.readline():
            main({**json.loads(job), "report_fd": report_fd})
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent, even while agent code holds the GIL."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prefer_oom_kill() -> None:
    """Make this process the OOM killer's first choice."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
