"""Fork server with all imports done, so that a replica starts in milliseconds instead of a second.

Each replica is a separate process with its own connections. A process that forks must have no
threads and no event loop, so the server runs in a process apart from the tests.
"""

from __future__ import annotations

import asyncio
import ctypes
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

_LONGEST_LINE = 1 << 24
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Forked:
    """A running replica, with the part of `asyncio.subprocess.Process` that the tests use."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, status: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._end(status))

    async def _end(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.readline())
        await status.read()  # read to the end, which closes the pipe
        return self.returncode

    async def wait(self) -> int:
        """Wait for the process and return its exit code; negative after a signal."""
        return await asyncio.shield(self._ending)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Nursery:
    """Starts replicas. Usable from any event loop, one start at a time."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait()

    async def start(self, arguments: Sequence[str]) -> Forked:
        """Start a replica with these arguments. A cancelled call kills it."""
        starting = asyncio.create_task(self._start(arguments))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            forked = await starting
            with suppress(ProcessLookupError):
                forked.send_signal(signal.SIGKILL)
            await asyncio.gather(forked.stdout.read(), forked.wait())
            raise

    async def _start(self, arguments: Sequence[str]) -> Forked:
        (stdout, its_stdout), (status, its_status) = os.pipe(), os.pipe()
        # No await in between: the server reads one order at a time.
        socket.send_fds(self._socket, [json.dumps(list(arguments)).encode()], [its_stdout, its_status])
        os.close(its_stdout)
        os.close(its_status)
        told, said = await _reader(status), await _reader(stdout)
        return Forked(int(await told.readline()), said, told)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def _serve(orders: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watchers are never waited for
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 2)
        if not order:
            return
        if os.fork() == 0:
            orders.close()
            _watch(json.loads(order), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; killed tests leave no replica."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(arguments: list[str], stdout: int, status: int) -> NoReturn:
    """Fork the replica, then write its process id and later its exit code to `status`."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _end_with_parent()
        os.close(status)
        os.dup2(stdout, sys.stdout.fileno())
        os.close(stdout)
        _replicate(arguments)
    os.close(stdout)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _replicate(arguments: list[str]) -> NoReturn:
    code = 1
    try:
        event_loop.run(import_module("replica").main(arguments))
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
    """Fork a replica for each order that arrives on the socket named on the command line."""
    sys.path.insert(0, str(Path(__file__).parent))
    for name in ("cast", "replica", "meshpoint.adapters.rabbitmq", "meshpoint.adapters.sql"):
        import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        _serve(orders)


if __name__ == "__main__":
    main()
