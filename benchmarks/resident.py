"""A replica in its own process, and that process's memory use."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.patient import COUNTED

_ROOT = Path(__file__).parent.parent
_LOOK = 0.5  # seconds
_AT_REST = 0.1  # of a processor
_PATIENCE = 600


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of a process: resident bytes, bytes not shared with others, Python objects."""

    resident: int
    unique: int
    objects: int


class Resident:
    """A replica run by `meshpoint run` in `folder`. An async context manager."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._counted = folder / "counted.json"
        self._config = folder / "agent.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Resident:
        command = [sys.executable, "-m", "meshpoint.cli", "run", "--supervised", "--log-level", "warning"]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), COUNTED: str(self._counted)}
        # When this process dies, the replica's standard input closes and it drains.
        self._process = await asyncio.create_subprocess_exec(
            *command,
            str(self._config),
            env=environment,
            cwd=self._config.parent,
            stdin=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()

    @property
    def _seen(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    async def at_rest(self) -> None:
        """Wait until the process does little more than sweep."""
        async with asyncio.timeout(_PATIENCE):
            quiet = 0
            while quiet < 4:
                before = self._seen.cpu_times()
                await asyncio.sleep(_LOOK)
                after = self._seen.cpu_times()
                busy = after.user + after.system - before.user - before.system
                quiet = quiet + 1 if busy < _AT_REST * _LOOK else 0

    async def held(self, *, trimmed: bool = False) -> Held:
        """Its memory after garbage collection.

        With `trimmed`, after also returning free memory to the system.
        """
        self._counted.unlink(missing_ok=True)
        self._seen.send_signal(signal.SIGUSR2 if trimmed else signal.SIGUSR1)
        async with asyncio.timeout(_PATIENCE):
            while not self._counted.exists():
                await asyncio.sleep(0.05)
        memory = self._seen.memory_full_info()
        return Held(memory.rss, memory.uss, json.loads(self._counted.read_text())["objects"])
