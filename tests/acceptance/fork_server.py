"""Fork server with all imports done, so that a replica starts in milliseconds instead of a second.

Each replica is a separate process with its own connections. A process that forks must have no
threads and no event loop, so the server runs in a process apart from the tests.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from meshpoint import event_loop

_MAX_LINE_LENGTH = 1 << 24
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkedProcess:
    """A running replica, with the part of `asyncio.subprocess.Process` that the tests use."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, status: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._exit_task = asyncio.create_task(self._read_exit_code(status))

    async def _read_exit_code(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.readline())
        await status.read()  # read to the end, which closes the pipe
        return self.returncode

    async def wait(self) -> int:
        """Wait for the process and return its exit code; negative after a signal."""
        return await asyncio.shield(self._exit_task)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class ForkServer:
    """Starts replicas. Usable from any event loop, one start at a time."""

    def __enter__(self) -> Self:
        self._socket, server_socket = socket.socketpair()
        command = [sys.executable, __file__, str(server_socket.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[server_socket.fileno()])
        server_socket.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.wait()

    async def start(self, arguments: Sequence[str], *, module: str = "replica") -> ForkedProcess:
        """Start a replica, or `main` of another module. A cancelled call kills it."""
        starting = asyncio.create_task(self._start([module, *arguments]))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            forked = await starting
            with suppress(ProcessLookupError):
                forked.send_signal(signal.SIGKILL)
            await asyncio.gather(forked.stdout.read(), forked.wait())
            raise

    async def _start(self, order: Sequence[str]) -> ForkedProcess:
        (stdout, child_stdout), (status, child_status) = os.pipe(), os.pipe()
        # No await in between: the server reads one order at a time.
        socket.send_fds(
            self._socket, [json.dumps(list(order)).encode()], [child_stdout, child_status]
        )
        os.close(child_stdout)
        os.close(child_status)
        status_reader, stdout_reader = await _reader(status), await _reader(stdout)
        return ForkedProcess(int(await status_reader.readline()), stdout_reader, status_reader)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_LENGTH)
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader


def _serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watchers are never waited for
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if not request:
            return
        if os.fork() == 0:
            connection.close()
            _watch(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; killed tests leave no replica."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(order: list[str], stdout: int, status: int) -> NoReturn:
    """Fork the ordered process, then write its process id and later its exit code to `status`."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        os.close(status)
        os.dup2(stdout, sys.stdout.fileno())
        os.close(stdout)
        _run_module(*order)
    os.close(stdout)
    os.write(status, b"%d\n" % pid)
    _, wait_status = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(wait_status))
    os._exit(0)


def _run_module(module: str, *arguments: str) -> NoReturn:
    code = 1
    try:
        event_loop.run(import_module(module).main(list(arguments)))
        code = 0
    except SystemExit as error:
        sys.stderr.write(f"{error.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork a process for each order that arrives on the socket named on the command line."""
    sys.path[:0] = map(str, Path(__file__).parents[:2])
    for name in (
        "acceptance_agents",
        "replica",
        "memory_child",
        "aiosqlite",
        "meshpoint.adapters.postgres_queue",
        "meshpoint.adapters.rabbitmq",
        "meshpoint.adapters.sql",
        "meshpoint.adapters.sqlite_queue",
        "meshpoint.adapters.telemetry.providers",
        "meshpoint.settings.strict_yaml",
        "sqlalchemy.dialects.postgresql.asyncpg",
        "sqlalchemy.dialects.sqlite.aiosqlite",
        "uvloop",
    ):
        import_module(name)
    gc.collect()
    gc.freeze()  # keeps garbage collection at each start from copying pages
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)


if __name__ == "__main__":
    main()
