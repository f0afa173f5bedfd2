"""Tasks that kill their process, and their neighbours: one replica that a supervisor starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshpoint.client import Client, Reply
from meshpoint.model.outcomes import Failed, Ok

from .kit import EndedBefore, Mesh, Process, Told, within

GOOD = 8
DEATHS = 3
SPELL = 1.0
"""Seconds that a good segment takes: longer than a poison lives."""


@dataclass
class Supervised:
    """One replica at a time, started again whenever it ends."""

    mesh: Mesh
    config: Path
    lives: list[Process] = field(default_factory=list)
    _begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self) -> None:
        while True:
            with suppress(EndedBefore):
                process = await Process.start(self.config)
                self.mesh.processes.append(process)
                self.lives.append(process)
                self._begun.set()
                await process.wait("started")
            await process.ended()

    async def life(self) -> Process:
        """The replica that runs now."""
        await self._begun.wait()
        return self.lives[-1]

    def of(self, at: str, **detail: Any) -> list[Told]:
        """Events of all lives."""
        return [event for life in self.lives for event in life.of(at, **detail)]

    async def wait(self, at: str, count: int = 1, **detail: Any) -> list[Told]:
        """The events `at` of one life, once there are so many."""
        while True:
            life = await self.life()
            with suppress(EndedBefore):
                return await life.wait(at, count, **detail)
            self._begun.clear()
            if life is not self.lives[-1]:
                self._begun.set()

    @property
    def deaths(self) -> int:
        return sum(life.process.returncode is not None for life in self.lives)


@asynccontextmanager
async def supervised(mesh: Mesh, config: Path) -> AsyncIterator[Supervised]:
    replica = Supervised(mesh, config)
    keeping = asyncio.create_task(replica.keep())
    try:
        yield replica
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


async def doses(client: Client, trace: Path, *hows: str | None, **more: Any) -> list[asyncio.Future[Reply]]:
    """Ask `ward` for a task of each kind."""
    await asyncio.to_thread(trace.touch)
    return [
        await client.send("ward", {"trace": str(trace), "how": how, "seconds": 0 if how else SPELL, **more})
        for how in hows
    ]


def ran(trace: Path, how: str) -> list[int]:
    """The processes in which poisons of a kind ran."""
    lines = [line.split() for line in trace.read_text().splitlines()]
    return [int(line[0]) for line in lines if " ".join(line[2:]) == how]


POLICIES = pytest.mark.parametrize("policy", ["at_checkpoint", "on_receipt"])


@POLICIES
async def test_the_neighbours_of_a_poison_complete(mesh: Mesh, tmp_path: Path, policy: str) -> None:
    config = mesh.rung.config("ward", ack_policy=policy, max_attempts=DEATHS)
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    good = await doses(client, trace, *[None] * (GOOD // 2))
    (deadly,) = await doses(client, trace, "kill")
    good += await doses(client, trace, *[None] * (GOOD // 2))
    async with supervised(mesh, config) as replica:
        assert [(await within(each)).outcome for each in good] == [Ok("well")] * GOOD
        failed = (await within(deadly)).outcome
        assert isinstance(failed, Failed)
        assert "no run came to its end" in failed.message
        assert "was killed by SIGKILL" in failed.message
        apart = replica.of("isolated_died:noted")
        assert [told["detail"]["attempt"] for told in apart] == list(range(1, DEATHS + 1))
        assert len(ran(trace, "kill")) == replica.deaths + DEATHS
        assert (await mesh.rows())["open"] == 0
    assert client.duplicates == 0
