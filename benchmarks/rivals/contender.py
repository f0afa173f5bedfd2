"""The benchmark's end of the protocol with a rival's process; `driver` is the other end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

_MAX_LINE_LENGTH = 1 << 26
_DRAIN_SECONDS = 20.0
"""Seconds for a rival to drain at the end."""


class RivalFailed(Exception):
    """A rival did not start or failed a round."""


@dataclass(frozen=True, slots=True)
class Round:
    """A rival's report on one round. Latencies are in seconds, sorted."""

    seconds: float
    latencies: Sequence[float]

    def quantile(self, share: float) -> float:
        """The latency in milliseconds not exceeded by `share` of all tasks."""
        return self.latencies[min(int(len(self.latencies) * share), len(self.latencies) - 1)] * 1e3


class Contender:
    """A rival's process. It and its children have their own process group."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process
        self.pid = process.pid

    @classmethod
    async def start(cls, name: str, command: Sequence[str]) -> Self:
        """Start `command` and wait until it is ready.

        Raises:
            RivalFailed: it ended first.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_LENGTH,
            start_new_session=True,
        )
        contender = cls(name, process)
        try:
            await contender._read_response()
        except BaseException:
            await contender.close()
            raise
        return contender

    async def run_round(self, fan_out: int, in_flight: int, seconds: float) -> Round:
        """Run jobs for about `seconds`.

        Raises:
            RivalFailed: a job failed or had a wrong result.
        """
        assert self._process.stdin is not None
        command = {"fan_out": fan_out, "in_flight": in_flight, "seconds": seconds}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        response = await self._read_response()
        return Round(response["seconds"], sorted(response["latencies"]))

    async def close(self) -> None:
        """Let it drain for a limited time, then kill the process group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    async def _read_response(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        response: dict[str, Any] = (
            json.loads(line) if line else {"error": "its process has ended; see above"}
        )
        if "error" in response:
            raise RivalFailed(f"{self.name}: {response['error']}")
        return response
