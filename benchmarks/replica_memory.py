"""A replica in its own process, and the memory use of processes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.waiting_agent import COUNT_FILE_VARIABLE

_ROOT = Path(__file__).parent.parent
_SAMPLE_SECONDS = 0.5  # seconds
_IDLE_CPU_SHARE = 0.1  # of a processor
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a process: resident bytes, bytes not shared with others, Python objects."""

    resident: int
    unique: int
    objects: int


def measure_own_memory() -> ProcessMemory:
    """This process's memory after garbage collection."""
    gc.collect()
    memory = psutil.Process().memory_full_info()
    return ProcessMemory(memory.rss, memory.uss, len(gc.get_objects()))


class MeasuredReplica:
    """A replica run by `meshpoint run` in `folder`. An async context manager."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._count_file = folder / "counted.json"
        self._config = folder / "agent.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> MeasuredReplica:
        command = [
            sys.executable,
            "-m",
            "meshpoint.cli",
            "run",
            "--supervised",
            "--log-level",
            "warning",
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            COUNT_FILE_VARIABLE: str(self._count_file),
        }
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
    def _process_info(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    async def wait_until_idle(self) -> None:
        """Wait until the process does little more than sweep."""
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            quiet = 0
            while quiet < 4:
                before = self._process_info.cpu_times()
                await asyncio.sleep(_SAMPLE_SECONDS)
                after = self._process_info.cpu_times()
                busy = after.user + after.system - before.user - before.system
                quiet = quiet + 1 if busy < _IDLE_CPU_SHARE * _SAMPLE_SECONDS else 0

    async def measure_memory(self, *, trimmed: bool = False) -> ProcessMemory:
        """Its memory after garbage collection.

        With `trimmed`, after also returning free memory to the system.
        """
        self._count_file.unlink(missing_ok=True)
        self._process_info.send_signal(signal.SIGUSR2 if trimmed else signal.SIGUSR1)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while not self._count_file.exists():
                await asyncio.sleep(0.05)
        memory = self._process_info.memory_full_info()
        return ProcessMemory(
            memory.rss, memory.uss, json.loads(self._count_file.read_text())["objects"]
        )
