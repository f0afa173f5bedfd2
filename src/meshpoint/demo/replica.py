"""One replica of the demo: the process `python -m meshpoint.demo.replica`, and its parent's side.

It reads its settings as one line of JSON from standard input, so that passwords do not appear in
the process list. It writes events as lines of JSON. It drains when standard input closes, which
also happens when its parent dies: no replica outlives the demo.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Self

from meshpoint import event_loop, wiring
from meshpoint.errors import MeshpointError
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.settings import Settings

_STDIN, _STDOUT = 0, 1
_MAX_LINE_BYTES = 1 << 20
_DRAIN_TIMEOUT = 5.0
"""Seconds that a replica has to drain at the end."""
_REPORTED = {
    (Step.STARTED, Phase.INFO),
    (Step.SEGMENT, Phase.BEFORE),
    (Step.SEGMENT, Phase.AFTER),
    (Step.SEGMENT, Phase.FAILED),
    (Step.CHECKPOINT, Phase.AFTER),
    (Step.ACK, Phase.AFTER),
    (Step.RESCUE, Phase.AFTER),
    (Step.END, Phase.AFTER),
    (Step.FENCED, Phase.INFO),
    (Step.DEGRADED, Phase.INFO),
    (Step.STORE_UNAVAILABLE, Phase.INFO),
    (Step.BROKER_UNAVAILABLE, Phase.INFO),
    (Step.STORE_AVAILABLE, Phase.INFO),
}


class _EventReporter:
    """Writes events to standard output. Thread-safe, since a separate thread renews leases."""

    def __init__(self) -> None:
        self._write_lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Write `event` if the demo uses it."""
        if (event.step, event.phase) not in _REPORTED:
            return
        record = {
            "step": event.step.value,
            "phase": event.phase.value,
            "agent": event.agent,
            "replica": event.replica,
            "task_ids": list(event.task_ids),
            "detail": dict(event.detail),
            "at": time.monotonic(),
        }
        line = memoryview(json.dumps(record).encode() + b"\n")
        with self._write_lock:
            while line:
                line = line[os.write(_STDOUT, line) :]


class ReplicaFailed(MeshpointError):
    """A replica ended before it served. The message has its last line of output."""


class ReplicaProcess:
    """The process of one replica."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process must have pipes")
        self.name, self.pid, self._process = name, process.pid, process
        self._stdin, self._events = process.stdin, process.stdout
        self._stderr_tail: deque[str] = deque(maxlen=20)
        self._stderr_reader = asyncio.create_task(self._read_stderr(process.stderr))

    @classmethod
    async def start(cls, name: str, settings: Settings) -> Self:
        """Start a replica with `settings`. Returns before it serves."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "meshpoint.demo.replica",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # the parent handles Ctrl-C and ends its replicas
        )
        started = cls(name, process)
        started._stdin.write(settings.model_dump_json().encode() + b"\n")
        return started

    async def read_events(self) -> AsyncIterator[tuple[Event, float]]:
        """Yield the events of the replica and their times, until its process has ended.

        The times are from the monotonic clock, which all processes of a host share.
        """
        async for line in self._events:
            with suppress(ValueError):  # a line truncated by SIGKILL
                yield _parse_event(line)
        await self._process.wait()
        await self._stderr_reader

    def startup_error(self) -> ReplicaFailed:
        """Return the reason why the replica ended, in one line: of a traceback, the exception."""
        last_line = next(
            (line for line in reversed(self._stderr_tail) if line[:1].isalnum()), "no output"
        )
        return ReplicaFailed(f"replica {self.name} did not start: {last_line.strip()}")

    def kill(self) -> None:
        """Send SIGKILL, which allows no cleanup."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Let the replica drain, and kill it if that takes too long."""
        self._stdin.close()
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                self.kill()
        await self._process.wait()

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            self._stderr_tail.append(line.decode(errors="replace"))


def _parse_event(line: bytes) -> tuple[Event, float]:
    data = json.loads(line)
    event = Event(
        Step(data["step"]),
        Phase(data["phase"]),
        AgentName(data["agent"]),
        ReplicaId(data["replica"]),
        tuple(map(TaskId, data["task_ids"])),
        data["detail"],
    )
    return event, data["at"]


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_stdin_closed() -> None:
        loop.remove_reader(_STDIN)
        stop.set()

    loop.add_reader(_STDIN, on_stdin_closed)  # nothing follows the settings: readable means closed
    await wiring.serve(settings, observer=_EventReporter(), stop=stop)


def main() -> None:
    """Serve until standard input closes."""
    with open(_STDIN, "rb", buffering=0, closefd=False) as stdin:
        settings = Settings.model_validate_json(stdin.readline())
    try:
        event_loop.run(_serve(settings))
    except MeshpointError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
