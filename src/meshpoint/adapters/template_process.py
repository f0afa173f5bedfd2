"""Template processes, which fork isolated runs.

Each has imported Meshpoint and its drivers, but no agent code.

A fork costs milliseconds of CPU time; the imports of a new interpreter cost about a second. The
template (`isolated.template`) is itself a fresh interpreter, so no memory or descriptors of this
process leak into a child. It forks one child at a time, which then runs as if this process had
started it.

The template's standard input is a socket. The first message lists the modules to import. Each
later message is a fork request with three descriptors: the child's standard input, the pipe for
its reports, and a socket. Through that socket the template sends a pidfd for the child, and later
its exit code. With the pidfd, this process detects the child's exit, and can kill it, even if the
template is frozen or dead.

The kernel kills the template when this process dies, and the child when the template dies. A
template that does not respond is killed; the next fork starts a new one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

_STDERR = 2
_IDLE_TIMEOUT = 60.0
"""Seconds after which an idle template exits."""
_EXIT_CODE_TIMEOUT = 1.0
"""Seconds to wait for the exit code; a working template reports it at once."""
_MAX_REPLY_BYTES = 1 << 10
_LIBRARIES = frozenset(
    {"aio_pika", "aiormq", "aiosqlite", "asyncpg", "redis", "sqlalchemy", "uvloop"}
)
_BOOTSTRAP = """
import json, socket, sys
orders = socket.socket(fileno=0)
given = json.loads(orders.recv(1 << 20))
sys.path[:] = given["path"]
from meshpoint.isolated import template
template(orders, given["modules"], given["idle"])
"""


class Template:
    """Forks processes from a template, which starts on demand.

    It exits `idle_timeout` seconds after its last child.
    """

    def __init__(self, idle_timeout: float = _IDLE_TIMEOUT) -> None:
        self._idle_timeout = idle_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._control_socket: socket.socket | None = None
        self._environment: object = None
        self.is_supported = _supports_pidfd()

    @property
    def pid(self) -> int | None:
        """Process id of the running template, or `None`."""
        return (
            self._process.pid
            if self._process is not None and self._process.returncode is None
            else None
        )

    async def fork(
        self, name: str, commands_fd: int, report_fd: int, *, timeout: float
    ) -> ForkedProcess:
        """Fork a child with these descriptors as its standard input and its report pipe.

        Raises:
            OSError: the template could not start, died, or did not respond within `timeout`
                seconds.
        """
        control_socket = self._control_socket
        if (
            control_socket is None
            or self.pid is None
            or self._environment != _current_environment()
        ):
            await self.stop()
            control_socket = await self._start()
        status_socket, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            status_socket.setblocking(False)
            with template_end:
                socket.send_fds(
                    control_socket,
                    [name.encode()],
                    [commands_fd, report_fd, template_end.fileno()],
                )
            async with asyncio.timeout(timeout):
                await _wait_readable(status_socket.fileno())
            _, descriptors, _, _ = socket.recv_fds(status_socket, _MAX_REPLY_BYTES, 1)
            if not descriptors:
                raise ConnectionAbortedError("the template ended")
        except BaseException:
            status_socket.close()
            await self.stop()  # the kernel also kills its child, if already forked
            raise
        return ForkedProcess(descriptors[0], status_socket)

    async def stop(self) -> None:
        """Kill the template and wait for it to exit."""
        process, control_socket = self._process, self._control_socket
        self._process = self._control_socket = None
        if control_socket is not None:
            control_socket.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> socket.socket:
        control_socket, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            control_socket.setblocking(False)
            config = {"path": sys.path, "modules": _loaded_modules(), "idle": self._idle_timeout}
            control_socket.send(json.dumps(config).encode())
            self._environment = _current_environment()
            with template_end:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOTSTRAP,
                    stdin=template_end.fileno(),
                    stdout=_STDERR,
                    start_new_session=True,
                )
        except BaseException:
            control_socket.close()
            raise
        self._control_socket = control_socket
        return control_socket


class ForkedProcess:
    """A child forked by a template."""

    def __init__(self, pidfd: int, status_socket: socket.socket) -> None:
        self._pidfd_file = os.fdopen(pidfd, "rb", buffering=0)
        self._status_socket = status_socket

    async def wait(self) -> int | None:
        """Wait for it to exit.

        Returns the exit code (negative: a signal), or `None` if the template reports none.
        """
        with self._pidfd_file, self._status_socket:
            await _wait_readable(self._pidfd_file.fileno())
            try:
                async with asyncio.timeout(_EXIT_CODE_TIMEOUT):
                    await _wait_readable(self._status_socket.fileno())
                return int(self._status_socket.recv(_MAX_REPLY_BYTES))
            except (OSError, ValueError):
                return None

    def kill(self) -> None:
        """Send it SIGKILL."""
        if not self._pidfd_file.closed:
            signal.pidfd_send_signal(self._pidfd_file.fileno(), signal.SIGKILL)


def _supports_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another platform, an old kernel, or a sandbox
        return False
    return True


def _current_environment() -> Any:
    """Environment, import path and working directory.

    A template that inherited different ones is replaced.
    """
    here = os.stat(".")
    return dict(os.environ), tuple(sys.path), (here.st_dev, here.st_ino)


def _loaded_modules() -> list[str]:
    """Names of the loaded adapters and drivers, which an isolated run needs too."""
    return [
        name
        for name in sys.modules
        if name.startswith("meshpoint.adapters.") or name.partition(".")[0] in _LIBRARIES
    ]


async def _wait_readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
