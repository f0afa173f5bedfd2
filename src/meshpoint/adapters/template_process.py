"""Template processes: each has imported Meshpoint and its drivers, but no agent code, and forks isolated runs.

A fork costs milliseconds of CPU time; the imports of a new interpreter cost about a second. The template
(`isolated.template`) is itself a fresh interpreter, so no memory or descriptors of this process leak into a child. It
forks one child at a time, which then runs as if this process had started it.

The template's standard input is a socket. The first message lists the modules to import. Each later message is a fork
request with three descriptors: the child's standard input, the pipe for its reports, and a socket. Through that
socket the template sends a pidfd for the child, and later its exit code. With the pidfd, this process detects the
child's exit, and can kill it, even if the template is frozen or dead.

The kernel kills the template when this process dies, and the child when the template dies. A template that does not
respond is killed; the next fork starts a new one.
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
_IDLE = 60.0
"""Seconds after which an idle template exits."""
_LAST_WORDS = 1.0
"""Seconds to wait for the exit code; a working template reports it at once."""
_LONGEST_ANSWER = 1 << 10
_LIBRARIES = frozenset({"aio_pika", "aiormq", "aiosqlite", "asyncpg", "redis", "sqlalchemy", "uvloop"})
_BOOTSTRAP = """
import json, socket, sys
orders = socket.socket(fileno=0)
given = json.loads(orders.recv(1 << 20))
sys.path[:] = given["path"]
from meshpoint.isolated import template
template(orders, given["modules"], given["idle"])
"""


class Template:
    """Forks processes from a template, which starts on demand and exits `idle` seconds after its last child."""

    def __init__(self, idle: float = _IDLE) -> None:
        self._idle = idle
        self._process: asyncio.subprocess.Process | None = None
        self._orders: socket.socket | None = None
        self._place: object = None
        self.possible = _has_pidfds()

    @property
    def pid(self) -> int | None:
        """Process id of the running template, or `None`."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def fork(self, name: str, words: int, tells: int, *, within: float) -> Forked:
        """Fork a child with these descriptors as its standard input and its report pipe.

        Raises:
            OSError: the template could not start, died, or did not respond within `within` seconds.
        """
        if self.pid is None or self._place != _place():
            await self.end()
            await self._start()
        assert self._orders is not None
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            answers.setblocking(False)
            with theirs:
                socket.send_fds(self._orders, [name.encode()], [words, tells, theirs.fileno()])
            async with asyncio.timeout(within):
                await _readable(answers.fileno())
            _, descriptors, _, _ = socket.recv_fds(answers, _LONGEST_ANSWER, 1)
            if not descriptors:
                raise ConnectionAbortedError("the template ended")
        except BaseException:
            answers.close()
            await self.end()  # the kernel also kills its child, if already forked
            raise
        return Forked(descriptors[0], answers)

    async def end(self) -> None:
        """Kill the template and wait for it to exit."""
        process, orders = self._process, self._orders
        self._process = self._orders = None
        if orders is not None:
            orders.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> None:
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            orders.setblocking(False)
            given = {"path": sys.path, "modules": _modules(), "idle": self._idle}
            orders.send(json.dumps(given).encode())
            self._place = _place()
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOTSTRAP,
                    stdin=theirs.fileno(),
                    stdout=_STDERR,
                    start_new_session=True,
                )
        except BaseException:
            orders.close()
            raise
        self._orders = orders


class Forked:
    """A child forked by a template."""

    def __init__(self, process: int, answers: socket.socket) -> None:
        self._process = os.fdopen(process, "rb", buffering=0)
        self._answers = answers

    async def wait(self) -> int | None:
        """Wait for it to exit. Returns the exit code (negative: a signal), or `None` if the template reports none."""
        with self._process, self._answers:
            await _readable(self._process.fileno())
            try:
                async with asyncio.timeout(_LAST_WORDS):
                    await _readable(self._answers.fileno())
                return int(self._answers.recv(_LONGEST_ANSWER))
            except (OSError, ValueError):
                return None

    def kill(self) -> None:
        """Send it SIGKILL."""
        if not self._process.closed:
            signal.pidfd_send_signal(self._process.fileno(), signal.SIGKILL)


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another platform, an old kernel, or a sandbox
        return False
    return True


def _place() -> Any:
    """Environment, import path and working directory. A template that inherited different ones is replaced."""
    here = os.stat(".")
    return dict(os.environ), tuple(sys.path), (here.st_dev, here.st_ino)


def _modules() -> list[str]:
    """Names of the loaded adapters and drivers, which an isolated run needs too."""
    return [
        name for name in sys.modules if name.startswith("meshpoint.adapters.") or name.partition(".")[0] in _LIBRARIES
    ]


async def _readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
