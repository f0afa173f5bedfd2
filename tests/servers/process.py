"""A private server process.

It uses free ports and a temporary folder, and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

# Runs in the server's process before the server: gives up root, then asks the kernel to end the
# process when its parent dies. The order matters, because a change of user clears that request. It
# is skipped on systems other than Linux.
_GUARD_CODE = """
import ctypes, os, pwd, sys
parent, user, last_signal, *command = sys.argv[1:]
if user:
    account = pwd.getpwnam(user)
    os.initgroups(user, account.pw_gid); os.setgid(account.pw_gid); os.setuid(account.pw_uid)
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, int(last_signal), 0, 0, 0)
if os.getppid() != int(parent):
    sys.exit("the tests have ended")
os.execvp(command[0], command)
"""


class ServerFailed(Exception):
    """A server did not start; carries the end of its log."""


class ServerFolder:
    """A temporary folder that belongs to the server's user."""

    parent: ClassVar[Path | None] = None
    """Where new folders are created. `None` is the default for temporary files."""

    def __init__(self, name: str, users: tuple[str, ...]) -> None:
        self.user = _unprivileged_user(users) if os.geteuid() == 0 else ""
        self.path = Path(tempfile.mkdtemp(prefix=f"meshpoint-{name}-", dir=self.parent))
        self.chown(self.path)

    def chown(self, path: Path) -> Path:
        """Give `path` to the server's user."""
        if self.user:
            account = pwd.getpwnam(self.user)
            os.chown(path, account.pw_uid, account.pw_gid)
        return path

    def write(self, name: str, text: str) -> Path:
        """Write a file for the server's user."""
        path = self.path / name
        path.write_text(text)
        return self.chown(path)

    def spawn(
        self,
        command: list[str],
        env: dict[str, str],
        last_signal: signal.Signals,
        output: Path | None = None,
        source: Path = Path(os.devnull),
    ) -> subprocess.Popen[bytes]:
        """Start `command` here as the server's user.

        Input comes from the file `source`. Output goes to the log, or to the file `output`. Call
        it on the main thread: for the kernel, the parent that must not die is the calling
        *thread*.
        """
        guard = [
            sys.executable,
            "-I",
            "-c",
            _GUARD_CODE,
            str(os.getpid()),
            self.user,
            str(int(last_signal)),
        ]
        with source.open("rb") as stdin, (output or self.path / "log").open("ab") as log:
            return subprocess.Popen(
                guard + command,
                cwd=self.path,
                env=env,
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,  # ^C is for the tests, which stop their servers themselves
            )

    def run(self, command: list[str], env: dict[str, str]) -> None:
        """Run `command` until it ends.

        Raises:
            ServerFailed: its exit code is not 0.
        """
        process = self.spawn(command, env, signal.SIGKILL)
        if process.wait() != 0:
            raise ServerFailed(f"{command[0]} failed:\n{self.log_end()}")

    def log_end(self) -> str:
        """The last lines that the server printed."""
        return "\n".join((self.path / "log").read_text(errors="replace").splitlines()[-20:])

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


class PrivateServer(ABC):
    """One server process. The methods without `async` block; tests use the others."""

    url: str
    max_starts = 20
    start_timeout = 60.0  # seconds to wait for a stop before the process is killed

    def __init__(self, folder: ServerFolder) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def environment(self) -> dict[str, str]: ...

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server accepts requests."""

    stop_signal = signal.SIGTERM
    abort_signal = signal.SIGKILL

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self._closed:
            raise ServerFailed("this server is closed")
        if not self.running:
            self._process = self.folder.spawn(
                self.command(), self.environment(), self.abort_signal
            )

    def wait_ready(self) -> None:
        """Return when the server accepts requests; start it first if it is not running.

        Raises:
            ServerFailed: it does not start; shows its log.
        """
        for pause in self._ready_polls():
            time.sleep(pause)

    def _ready_polls(self) -> Iterator[float]:
        """Pauses in seconds until the server accepts requests.

        A process that ends at once is started again, up to `max_starts` times: after a kill, the
        remains of the previous process may still hold the port or the data. There is no time limit
        for a running process, because the machine may be busy.
        """
        starts = 0
        while not self.is_ready():
            yield 0.1
            if not self.running:
                if starts == self.max_starts:
                    raise ServerFailed(
                        f"{type(self).__name__} does not start:\n{self.folder.log_end()}"
                    )
                starts += 1
                self.launch()

    def end(self, signal_number: signal.Signals) -> None:
        """Send `signal_number` and wait until the process has ended."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal_number)
            try:
                process.wait(self.start_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Stop at once and delete everything."""
        self._closed = True
        self.end(self.abort_signal)
        self.folder.remove()

    async def start(self) -> None:
        """Start, and return when the server accepts requests."""
        self.launch()
        for pause in self._ready_polls():
            await asyncio.sleep(pause)

    async def stop(self, *, immediate: bool = False) -> None:
        """Stop: cleanly, or immediately without notice to clients."""
        await asyncio.to_thread(self.end, self.abort_signal if immediate else self.stop_signal)

    async def restart(self, *, immediate: bool = False) -> None:
        """Stop and start."""
        await self.stop(immediate=immediate)
        await self.start()

    async def kill(self) -> None:
        """SIGKILL."""
        await asyncio.to_thread(self.end, signal.SIGKILL)


_reserved_ports: list[socket.socket] = []


def free_port() -> int:
    """A TCP port without a listener that belongs to this process until it ends.

    A server may listen on it much later, or again after a kill. Meanwhile an outgoing connection
    could hold the port, so it lies below the local ports that Linux gives to those (32768 and up).
    The reservation is a UDP socket on the same port number, so no other test process picks it.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        _reserved_ports.append(reservation)
        return port


def _unprivileged_user(users: tuple[str, ...]) -> str:
    existing_users = {account.pw_name for account in pwd.getpwall()}
    return next((user for user in users if user in existing_users), "nobody")


async def wait_until_exited(pid: int) -> None:
    """Wait until a process has exited. It need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    exited = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
