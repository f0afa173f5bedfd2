"""Replicas of earlier releases: `meshpoint run` with sources from the repository's history."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from .mesh import HERE

EARLIER_BACKENDS = ["embedded", pytest.param("production", marks=pytest.mark.servers)]
"""Earlier releases have no queues on PostgreSQL."""


@dataclass
class EarlierReplica:
    """A replica of an earlier release."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    _has_written: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, sources: Path, config: Path) -> Self:
        """Start a replica and wait until it consumes."""
        options = ("--log-json", "--log-level", "debug")  # with the reasons of releases
        replica = cls(await run_earlier(sources, "run", str(config), *options))
        process = replica.process
        assert process.stderr is not None
        async for line in process.stderr:
            replica.lines.append(line.decode())
            if json.loads(line).get("step") == "started":
                replica._reading = asyncio.create_task(replica._read())
                return replica
        raise AssertionError("".join(replica.lines))

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())
            self._has_written.set()

    async def wait_for(self, text: str) -> None:
        """Wait until its log contains `text`."""
        while not any(text in line for line in self.lines):
            self._has_written.clear()
            await self._has_written.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it. By default it drains."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        await self.process.wait()
        if self._reading is not None:
            await self._reading


async def run_earlier(sources: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Start a command of an earlier release."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "meshpoint.cli", *arguments),
        env={**os.environ, "PYTHONPATH": f"{sources / 'src'}{os.pathsep}{HERE}"},
        stderr=asyncio.subprocess.PIPE,
    )
