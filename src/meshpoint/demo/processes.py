"""Replica processes: start them, read their events, kill them. None outlives the demo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from meshpoint.demo.story import ReplicaEvent
from meshpoint.errors import MeshpointError
from meshpoint.model.events import Phase, Step
from meshpoint.settings import Settings

_MAX_LINE_BYTES = 1 << 20
_DRAIN_TIMEOUT = 5.0
"""Seconds that a replica has to drain at the end."""


class ReplicaFailed(MeshpointError):
    """A replica ended before it served. The message has its last line of output."""


class ReplicaProcess:
    """The process of one replica."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.pid, self._process = name, process.pid, process
        self._stderr_tail: deque[str] = deque(maxlen=20)
        self._stderr_reader = asyncio.create_task(self._read_stderr())

    @classmethod
    async def start(cls, name: str, settings: Settings) -> ReplicaProcess:
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
        assert process.stdin is not None
        process.stdin.write(settings.model_dump_json().encode() + b"\n")
        return cls(name, process)

    async def read_events(self) -> AsyncIterator[ReplicaEvent]:
        """Yield the events of the replica until its process has ended."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            with suppress(ValueError):  # a line truncated by SIGKILL
                yield _parse_event(line)
        await self._process.wait()
        await self._stderr_reader

    def startup_error(self) -> ReplicaFailed:
        """Return the reason why the replica ended, in one line: of a traceback, the exception."""
        last_line = next((line for line in reversed(self._stderr_tail) if line[:1].isalnum()), "no output")
        return ReplicaFailed(f"replica {self.name} did not start: {last_line.strip()}")

    def kill(self) -> None:
        """Send SIGKILL, which allows no cleanup."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Let the replica drain, and kill it if that takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                self.kill()
        await self._process.wait()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._stderr_tail.append(line.decode(errors="replace"))


def _parse_event(line: bytes) -> ReplicaEvent:
    data = json.loads(line)
    return ReplicaEvent(
        Step(data["step"]), Phase(data["phase"]), data["agent"], data["task_ids"], data["detail"], data["at"]
    )
