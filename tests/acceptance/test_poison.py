"""Tasks that kill their process and their neighbours; a supervisor restarts the only replica."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshpoint.client import Client, Reply
from meshpoint.model.checkpoint import SUSPECT_FROM, TaskState, TaskSummary
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from servers.process import until_gone

from .kit import SHORT_LEASE, EndedBefore, Mesh, Process, Told

GOOD = 8
DEATHS = 3
BEGIN_AT_DELIVERY = 3
SPELL = 1.0
"""Seconds that a good segment takes: longer than a poison task lives."""


@dataclass
class Supervised:
    """One replica at a time, restarted whenever it ends."""

    mesh: Mesh
    config: Path
    lives: list[Process] = field(default_factory=list)
    _begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self) -> None:
        while True:
            with suppress(EndedBefore):
                process = await Process.start(self.config, nursery=self.mesh.nursery)
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
        """Matching events of all replicas so far."""
        return [event for life in self.lives for event in life.of(at, **detail)]

    async def wait(self, at: str, count: int = 1, **detail: Any) -> list[Told]:
        """Wait until one replica has emitted `count` events `at`."""
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
    """Send `ward` one request per entry of `hows`."""
    await asyncio.to_thread(trace.touch)
    return [
        await client.send("ward", {"trace": str(trace), "how": how, "seconds": 0 if how else SPELL, **more})
        for how in hows
    ]


def ran(trace: Path, how: str) -> list[int]:
    """Process ids in which `how` tasks ran."""
    lines = [line.split() for line in trace.read_text().splitlines()]
    return [int(line[0]) for line in lines if " ".join(line[2:]) == how]


@pytest.mark.parametrize(
    ("policy", "shared"),
    [
        pytest.param("at_checkpoint", BEGIN_AT_DELIVERY - 1 + SUSPECT_FROM, id="at_checkpoint"),
        pytest.param("on_receipt", SUSPECT_FROM, id="on_receipt"),
    ],
)
async def test_the_neighbours_of_a_poison_complete(mesh: Mesh, tmp_path: Path, policy: str, shared: int) -> None:
    config = mesh.rung.config(
        "ward", **SHORT_LEASE, ack_policy=policy, max_attempts=DEATHS, begin_at_delivery=BEGIN_AT_DELIVERY
    )
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    # No good task ends in a process that the poison kills, so no reply is sent without being
    # recorded as sent.
    good = await doses(client, trace, *[None] * (GOOD // 2), kills=shared)
    (deadly,) = await doses(client, trace, "kill")
    good += await doses(client, trace, *[None] * (GOOD // 2), kills=shared)
    async with supervised(mesh, config) as replica:
        assert [(await each).outcome for each in good] == [Ok("well")] * GOOD
        failed = (await deadly).outcome
        assert isinstance(failed, Failed)
        assert "no run came to its end" in failed.message
        assert "was killed by SIGKILL" in failed.message
        apart = await told(replica, DEATHS, "isolated_died:noted")
        assert [told["detail"]["attempt"] for told in apart] == list(range(1, DEATHS + 1))
        assert replica.deaths <= shared
        assert len(ran(trace, "kill")) == replica.deaths + DEATHS
        assert (await mesh.rows())["open"] == 0
    assert client.duplicates == 0


async def test_two_poisons_at_once(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config("ward", **SHORT_LEASE, max_attempts=2)
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    good = await doses(client, trace, None, None)
    deadly = await doses(client, trace, "kill", "exit 0")
    async with supervised(mesh, config) as replica:
        assert [(await each).outcome for each in good] == [Ok("well")] * 2
        messages = [failure((await each).outcome) for each in deadly]
        assert "was killed by SIGKILL" in messages[0]
        assert "ended with exit code 0" in messages[1]
        assert len(await told(replica, 4, "isolated_died:noted", counted=True)) == 4


@pytest.mark.parametrize(
    ("how", "reason"), [("exit", "ended with exit code 3"), ("segfault", "was killed by SIGSEGV"), ("memory", "")]
)
async def test_ways_to_end_a_process(mesh: Mesh, tmp_path: Path, how: str, reason: str) -> None:
    config = mesh.rung.config("ward", **SHORT_LEASE, max_attempts=1)
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    (deadly,) = await doses(client, trace, how)
    async with supervised(mesh, config):
        (good,) = await doses(client, trace, None)
        assert (await good).outcome == Ok("well")
        message = failure((await deadly).outcome)
        assert reason in message or "MemoryError" in message


async def test_a_poison_after_a_pause(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config("ward", **SHORT_LEASE, max_attempts=2)
    client, peer, trace = await mesh.client(), await mesh.peer(), tmp_path / "trace"
    await mesh.declare("ward")
    answering = asyncio.create_task(peer.answer_all())
    async with supervised(mesh, config) as replica:
        good = await doses(client, trace, None, None, asks=True)
        (deadly,) = await doses(client, trace, "kill", asks=True)
        assert [(await each).outcome for each in good] == [Ok("well")] * 2
        assert "was killed by SIGKILL" in failure((await deadly).outcome)
        assert len(await told(replica, 2, "isolated_died:noted", counted=True)) == 2
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def suspected(mesh: Mesh, client: Client, config: Path, trace: Path, how: str) -> asyncio.Future[Reply]:
    """Send a task whose replica is killed twice after its row was written."""
    await mesh.declare("ward")
    (asked,) = await doses(client, trace, how)
    for run in range(1, 3):
        replica = await mesh.replica(config)
        await until_traced(trace, how, run)
        await replica.kill()
    return asked


async def until_traced(trace: Path, how: str, count: int) -> int:
    """Process id in which the `count`-th run of such a task began."""
    while len(ran(trace, how)) < count:
        await asyncio.sleep(0.01)
    return ran(trace, how)[count - 1]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_replica_that_is_killed_takes_the_process_of_a_suspect_along(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config("ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=1)
    client, trace = await mesh.client(), tmp_path / "trace"
    asked = await suspected(mesh, client, config, trace, "wait")
    first = await mesh.replica(config)
    pid = await until_traced(trace, "wait", 3)
    template = parent_of(pid)
    assert len({pid, template, first.process.pid}) == 3
    await first.kill()
    await until_gone(pid)
    await until_gone(template)
    second = await mesh.replica(config)
    await until_traced(trace, "wait", 4)
    (note,) = await second.wait("isolated:noted")
    assert note["detail"]["attempt"] == 1
    assert note["detail"]["rescues"] >= 3  # more if a lease expired on a busy machine
    await client.cancel("ward", asked_id(note))
    outcome = (await asked).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert await second.wait("code_cancelled:noted")
    # once cancelled, it does not run again
    assert len(ran(trace, "wait")) <= note["detail"]["rescues"] + 1
    assert (await mesh.rows())["open"] == 0


async def test_a_replica_that_is_killed_takes_a_suspect_that_blocks_along(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config("ward", **SHORT_LEASE, ack_policy="on_receipt")
    client, trace = await mesh.client(), tmp_path / "trace"
    await suspected(mesh, client, config, trace, "hang")
    replica = await mesh.replica(config)
    pid = await until_traced(trace, "hang", 3)
    template = parent_of(pid)
    await replica.kill()
    await until_gone(pid)
    await until_gone(template)


async def test_a_drain_releases_a_suspect(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config(
        "ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=1, drain_timeout_seconds=0.1
    )
    client, trace = await mesh.client(), tmp_path / "trace"
    await suspected(mesh, client, config, trace, "wait")
    first = await mesh.replica(config)
    pid = await until_traced(trace, "wait", 3)
    template = parent_of(pid)
    first.signal(signal.SIGTERM)
    assert await first.ended() == 0
    await until_gone(pid)
    await until_gone(template)
    (task,) = await tasks_of(mesh)
    assert (task.state, task.attempt) == (TaskState.READY, 1)
    assert task.rescues >= 2  # more if a lease expired on a busy machine


async def test_a_suspect_that_blocks_its_event_loop_is_killed(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config(
        "ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=2, isolated_stall_seconds=3
    )
    client, trace = await mesh.client(), tmp_path / "trace"
    asked = await suspected(mesh, client, config, trace, "hang")
    replica = await mesh.replica(config)
    (good,) = await doses(client, trace, None)
    assert (await good).outcome == Ok("well")
    assert "its event loop was blocked" in failure((await asked).outcome)
    assert len(await told(replica, 2, "isolated_died:noted")) == 2


async def test_a_process_that_is_killed_from_outside_counts_once(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.rung.config("ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=3)
    client, trace = await mesh.client(), tmp_path / "trace"
    await suspected(mesh, client, config, trace, "wait")
    replica = await mesh.replica(config)
    os.kill(await until_traced(trace, "wait", 3), signal.SIGKILL)
    (died,) = await replica.wait("isolated_died:noted")
    assert (died["detail"]["attempt"], died["detail"]["reason"]) == (1, "was killed by SIGKILL")
    await until_traced(trace, "wait", 4)
    assert await replica.wait("isolated:noted", attempt=2)
    attempts = [note["detail"]["attempt"] for note in replica.of("isolated:noted")]
    assert list(dict.fromkeys(attempts)) == [1, 2]


async def told(replica: Process | Supervised, count: int, at: str, **detail: Any) -> list[Told]:
    """Wait for `count` of the replica's events `at`; the reply may arrive before them."""
    while len(events := replica.of(at, **detail)) < count:
        await asyncio.sleep(0.01)
    return events


def failure(outcome: Outcome) -> str:
    """Message of a failed outcome."""
    assert isinstance(outcome, Failed)
    return outcome.message


def asked_id(note: Told) -> str:
    (task_id,) = note["task_ids"]
    return str(task_id)


async def tasks_of(mesh: Mesh) -> list[TaskSummary]:
    """All task rows."""
    store = mesh.store()
    await store.open()
    try:
        return await store.tasks()
    finally:
        await store.close()
