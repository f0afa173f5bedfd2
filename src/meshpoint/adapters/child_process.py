"""Isolated runs as child processes.

They have the same interpreter, import path, environment and working directory.

A child reads the settings, including secrets, from its standard input, where no other process can
see them. Later the same pipe carries stop requests, and closes when this process dies for any
reason. Through a second pipe the child sends its segment's events, which are emitted here, and the
result of the run. Its output goes to our standard error.

Where possible, a child is forked from a template (`adapters.template_process`); otherwise it is a
new interpreter.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from meshpoint.adapters.logging_observer import log_settings
from meshpoint.adapters.template_process import ForkedProcess, Template
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.tasks import Run
from meshpoint.ports.isolation import Exit, ExitKind, StopSignal
from meshpoint.ports.observer import Observer

log = logging.getLogger("meshpoint.isolated")

_STDERR = 2
_MAX_LINE_BYTES = 1 << 16
_EXIT_GRACE = 1.0
"""Seconds. Everything a process wrote before it ended is in the pipe already."""
_BOOTSTRAP = """
import json, sys
given = json.loads(sys.stdin.buffer.readline())
sys.path[:] = given["path"]
from meshpoint.isolated import main
main(given)
"""


_Process = ForkedProcess | asyncio.subprocess.Process


class ChildProcesses:
    """Starts a process for each isolated run of one agent.

    `settings` are the agent's settings as JSON. A process whose event loop is blocked for `stall`
    is killed.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        observer: Observer,
        stall: timedelta,
        template: Template | None = None,
    ) -> None:
        self._settings, self._observer, self._stall = settings, observer, stall.total_seconds()
        self._template = template or Template()

    async def start(self, run: Run, on_started: Callable[[], None]) -> ChildProcess:
        """Run the segment that `run` owns."""
        with ExitStack() as child_fds:
            commands_fd, commands_write_fd = os.pipe()
            child_fds.callback(os.close, commands_fd)
            report_read_fd, report_fd = os.pipe()
            child_fds.callback(os.close, report_fd)
            reader, writer = await _reader(report_read_fd), await _writer(commands_write_fd)
            try:
                process = await self._process(run, commands_fd, report_fd)
            except BaseException:
                writer.close()  # the reader sees EOF and closes itself
                raise
        child = ChildProcess(process, writer, reader, self._observer, self._stall, on_started)
        child.send(
            {
                "settings": self._settings,
                "path": sys.path,
                "report_fd": report_fd,
                "style": log_settings(),
                "run": asdict(run),
            }
        )
        return child

    async def close(self) -> None:
        """Kill the template."""
        await self._template.stop()

    async def _process(self, run: Run, commands_fd: int, report_fd: int) -> _Process:
        if self._template.is_supported:
            try:
                return await self._template.fork(
                    run.task_id, commands_fd, report_fd, timeout=self._stall
                )
            except OSError as error:
                log.warning(
                    "task %s: fork failed, starting a new interpreter: %s", run.task_id, error
                )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # use our import path, not one derived from the working directory
            "-c",
            _BOOTSTRAP,
            f"{run.agent}/{run.task_id}",  # shown in process listings
            stdin=commands_fd,
            stdout=_STDERR,
            pass_fds=[report_fd],
            start_new_session=True,  # the terminal's Ctrl-C must reach only us
        )


class ChildProcess:
    """One running child."""

    def __init__(
        self,
        process: _Process,
        stdin: asyncio.WriteTransport,
        reports: asyncio.StreamReader,
        observer: Observer,
        stall: float,
        on_started: Callable[[], None],
    ) -> None:
        self._process = process
        self._stdin = stdin
        self._reports = reports
        self._observer = observer
        self._stall, self._on_started = stall, on_started
        self._exit: Exit | None = None
        self._last_heartbeat_at = 0.0

    async def wait(self) -> Exit:
        """Wait until the process has ended."""
        reading = asyncio.create_task(self._read_reports())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=_EXIT_GRACE)
            code = await ended
        finally:
            self._stdin.close()
            reading.cancel()
            ended.cancel()
        return self._exit or Exit(ExitKind.DIED, _describe_exit(code))

    def signal(self, stop_signal: StopSignal) -> None:
        """Ask it to stop."""
        self.send(stop_signal)

    def send(self, value: Any) -> None:
        """Write one line to it, unless it has ended."""
        if not self._stdin.is_closing():
            self._stdin.write(json.dumps(value).encode() + b"\n")

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _read_reports(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_heartbeat_at = loop.time()
        suspected = False
        while True:
            kill_at = self._last_heartbeat_at + self._stall + (_EXIT_GRACE if suspected else 0)
            try:
                async with asyncio.timeout_at(kill_at):
                    line = await self._reports.readline()
            except TimeoutError:
                if suspected:
                    self._exit = Exit(
                        ExitKind.DIED,
                        f"was killed: its event loop was blocked for {self._stall:g} s",
                    )
                    self.kill()
                    return
                # Our own event loop may have been blocked while signs of life arrived in the pipe.
                suspected, self._last_heartbeat_at = True, loop.time() - self._stall
                continue
            if not line:
                return
            try:
                self._handle_report(json.loads(line))
            except (ValueError, KeyError, TypeError):
                log.warning("unreadable output from an isolated run: %.100r", line)
            suspected = suspected and loop.time() >= self._last_heartbeat_at + self._stall

    def _handle_report(self, report: Mapping[str, Any]) -> None:
        if "event" in report:
            self._observer.emit(_decode_event(report["event"]))
        elif "exit" in report:
            self._exit = Exit(ExitKind[report["exit"]], str(report.get("reason", "")))
        elif "started" in report:
            self._on_started()
        elif "alive" in report:  # events prove nothing: a thread renews leases
            self._last_heartbeat_at = asyncio.get_running_loop().time()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "ended with an unknown exit code"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _decode_event(fields: Mapping[str, Any]) -> Event:
    return Event(
        Step(fields["step"]),
        Phase(fields["phase"]),
        AgentName(fields["agent"]),
        ReplicaId(fields["replica"]),
        tuple(map(TaskId, fields["task_ids"])),
        fields["detail"],
    )


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader


async def _writer(descriptor: int) -> asyncio.WriteTransport:
    pipe = os.fdopen(descriptor, "wb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
    return transport
