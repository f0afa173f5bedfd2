"""Replicas as processes: `meshpoint run`, which may be killed at any time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

_FOLDER = Path(__file__).parent
_START_TIMEOUT = 600.0
"""Seconds that a replica has to start, or to end."""


class Replica:
    """One process that serves the agent of `screen.yaml`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._started = asyncio.Event()
        self._last_output: deque[str] = deque(maxlen=20)
        self._listener = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    @asynccontextmanager
    async def start(cls, variables: Mapping[str, str]) -> AsyncIterator[Replica]:
        """A replica that serves already. It drains when the block ends, if it still lives.

        Raises:
            RuntimeError: it ended before it served; says its last words.
        """
        command = [sys.executable, "-m", "meshpoint.cli", "run", "screen.yaml", "--log-json"]
        environment = {**os.environ, **variables}
        replica = cls(
            await asyncio.create_subprocess_exec(
                *command, cwd=_FOLDER, env=environment, stderr=asyncio.subprocess.PIPE
            )
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await replica._wait_until_serving()
            yield replica
        finally:
            await replica._close()

    async def kill(self) -> None:
        """SIGKILL: no farewell, no cleaning up."""
        self._process.kill()
        await self._process.wait()

    async def _wait_until_serving(self) -> None:
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait({started, self._listener}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not self._started.is_set():
            raise RuntimeError("a replica did not start:\n" + "".join(self._last_output))

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._last_output.append(line.decode(errors="replace"))
            if line.startswith(b"{") and json.loads(line).get("step") == "started":
                self._started.set()

    async def _close(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                await self.kill()
            await self._listener
