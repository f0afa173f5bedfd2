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

from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import SUSPECT_AFTER_RESCUES, TaskState, TaskSummary
from plain_client import PlainClient, Reply
from servers.process import wait_until_exited

from .mesh import SHORT_LEASE, EndedEarly, EventRecord, Mesh, Process

GOOD_TASKS = 8
MAX_ATTEMPTS = 3
BEGIN_AT_DELIVERY = 3
TASK_SECONDS = 1.0
"""Seconds that a good segment takes: longer than a poison task lives."""


@dataclass
class SupervisedReplica:
    """One replica at a time, restarted whenever it ends."""

    mesh: Mesh
    config: Path
    incarnations: list[Process] = field(default_factory=list)
    _started: asyncio.Event = field(default_factory=asyncio.Event)

    async def restart_forever(self) -> None:
        while True:
            with suppress(EndedEarly):
                process = await Process.start(self.config, fork_server=self.mesh.fork_server)
                self.mesh.processes.append(process)
                self.incarnations.append(process)
                self._started.set()
                await process.wait("started")
            await process.wait_ended()

    async def current(self) -> Process:
        """The replica that runs now."""
        await self._started.wait()
        return self.incarnations[-1]

    def matching_events(self, at: str, **detail: Any) -> list[EventRecord]:
        """Matching events of all replicas so far."""
        return [
            event
            for incarnation in self.incarnations
            for event in incarnation.matching_events(at, **detail)
        ]

    async def wait(self, at: str, count: int = 1, **detail: Any) -> list[EventRecord]:
        """Wait until one replica has emitted `count` events `at`."""
        while True:
            incarnation = await self.current()
            with suppress(EndedEarly):
                return await incarnation.wait(at, count, **detail)
            self._started.clear()
            if incarnation is not self.incarnations[-1]:
                self._started.set()

    @property
    def deaths(self) -> int:
        return sum(incarnation.process.returncode is not None for incarnation in self.incarnations)


@asynccontextmanager
async def supervised(mesh: Mesh, config: Path) -> AsyncIterator[SupervisedReplica]:
    replica = SupervisedReplica(mesh, config)
    supervisor_task = asyncio.create_task(replica.restart_forever())
    try:
        yield replica
    finally:
        supervisor_task.cancel()
        with suppress(asyncio.CancelledError):
            await supervisor_task


async def send_ward_requests(
    client: PlainClient, trace: Path, *endings: str | None, **fields: Any
) -> list[asyncio.Future[Reply]]:
    """Send `ward` one request per entry of `endings`."""
    await asyncio.to_thread(trace.touch)
    return [
        await client.send(
            "ward",
            {
                "trace": str(trace),
                "how": ending,
                "seconds": 0 if ending else TASK_SECONDS,
                **fields,
            },
        )
        for ending in endings
    ]


def process_ids(trace: Path, ending: str) -> list[int]:
    """Process ids in which `ending` tasks ran."""
    lines = [line.split() for line in trace.read_text().splitlines()]
    return [int(line[0]) for line in lines if " ".join(line[2:]) == ending]


@pytest.mark.parametrize(
    ("policy", "shared"),
    [
        pytest.param(
            "at_checkpoint", BEGIN_AT_DELIVERY - 1 + SUSPECT_AFTER_RESCUES, id="at_checkpoint"
        ),
        pytest.param("on_receipt", SUSPECT_AFTER_RESCUES, id="on_receipt"),
    ],
)
async def test_tasks_running_next_to_a_poison_task_complete(
    mesh: Mesh, tmp_path: Path, policy: str, shared: int
) -> None:
    config = mesh.backends.config(
        "ward",
        **SHORT_LEASE,
        ack_policy=policy,
        max_attempts=MAX_ATTEMPTS,
        begin_at_delivery=BEGIN_AT_DELIVERY,
    )
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    # No good task ends in a process that the poison kills, so no reply is sent without being
    # recorded as sent.
    good = await send_ward_requests(client, trace, *[None] * (GOOD_TASKS // 2), kills=shared)
    (deadly,) = await send_ward_requests(client, trace, "kill")
    good += await send_ward_requests(client, trace, *[None] * (GOOD_TASKS // 2), kills=shared)
    async with supervised(mesh, config) as replica:
        assert [(await each).outcome for each in good] == [Ok("well")] * GOOD_TASKS
        failed = (await deadly).outcome
        assert isinstance(failed, Failed)
        assert "never finished" in failed.message
        assert "was killed by SIGKILL" in failed.message
        isolated_deaths = await wait_for_events(
            replica, MAX_ATTEMPTS, "isolated_process_died:info"
        )
        assert [event["detail"]["attempt"] for event in isolated_deaths] == list(
            range(1, MAX_ATTEMPTS + 1)
        )
        assert replica.deaths <= shared
        assert len(process_ids(trace, "kill")) == replica.deaths + MAX_ATTEMPTS
        assert (await mesh.row_counts())["open"] == 0
    assert client.duplicates == 0


async def test_two_concurrent_poison_tasks_fail_and_other_tasks_complete(
    mesh: Mesh, tmp_path: Path
) -> None:
    config = mesh.backends.config("ward", **SHORT_LEASE, max_attempts=2)
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    good = await send_ward_requests(client, trace, None, None)
    deadly = await send_ward_requests(client, trace, "kill", "exit 0")
    async with supervised(mesh, config) as replica:
        assert [(await each).outcome for each in good] == [Ok("well")] * 2
        messages = [failure_message((await each).outcome) for each in deadly]
        assert "was killed by SIGKILL" in messages[0]
        assert "ended with exit code 0" in messages[1]
        assert (
            len(await wait_for_events(replica, 4, "isolated_process_died:info", counted=True)) == 4
        )


@pytest.mark.parametrize(
    ("how", "reason"),
    [("exit", "ended with exit code 3"), ("segfault", "was killed by SIGSEGV"), ("memory", "")],
)
async def test_a_poison_task_fails_however_it_ends_its_process(
    mesh: Mesh, tmp_path: Path, how: str, reason: str
) -> None:
    config = mesh.backends.config("ward", **SHORT_LEASE, max_attempts=1)
    client, trace = await mesh.client(), tmp_path / "trace"
    await mesh.declare("ward")
    (deadly,) = await send_ward_requests(client, trace, how)
    async with supervised(mesh, config):
        (good,) = await send_ward_requests(client, trace, None)
        assert (await good).outcome == Ok("well")
        message = failure_message((await deadly).outcome)
        assert reason in message or "MemoryError" in message


async def test_a_task_that_kills_its_process_after_a_pause_fails(
    mesh: Mesh, tmp_path: Path
) -> None:
    config = mesh.backends.config("ward", **SHORT_LEASE, max_attempts=2)
    client, peer, trace = await mesh.client(), await mesh.peer(), tmp_path / "trace"
    await mesh.declare("ward")
    answering = asyncio.create_task(peer.answer_all())
    async with supervised(mesh, config) as replica:
        good = await send_ward_requests(client, trace, None, None, asks=True)
        (deadly,) = await send_ward_requests(client, trace, "kill", asks=True)
        assert [(await each).outcome for each in good] == [Ok("well")] * 2
        assert "was killed by SIGKILL" in failure_message((await deadly).outcome)
        assert (
            len(await wait_for_events(replica, 2, "isolated_process_died:info", counted=True)) == 2
        )
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def send_suspect(
    mesh: Mesh, client: PlainClient, config: Path, trace: Path, how: str
) -> asyncio.Future[Reply]:
    """Send a task whose replica is killed twice after its row was written."""
    await mesh.declare("ward")
    (asked,) = await send_ward_requests(client, trace, how)
    for run in range(1, 3):
        replica = await mesh.replica(config)
        await wait_for_run(trace, how, run)
        await replica.kill()
    return asked


async def wait_for_run(trace: Path, how: str, count: int) -> int:
    """Process id in which the `count`-th run of such a task began."""
    while len(process_ids(trace, how)) < count:
        await asyncio.sleep(0.01)
    return process_ids(trace, how)[count - 1]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_the_isolated_process_of_a_suspect_ends_with_its_killed_replica(
    mesh: Mesh, tmp_path: Path
) -> None:
    config = mesh.backends.config("ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=1)
    client, trace = await mesh.client(), tmp_path / "trace"
    asked = await send_suspect(mesh, client, config, trace, "wait")
    first = await mesh.replica(config)
    pid = await wait_for_run(trace, "wait", 3)
    template = parent_of(pid)
    assert len({pid, template, first.process.pid}) == 3
    await first.kill()
    await wait_until_exited(pid)
    await wait_until_exited(template)
    second = await mesh.replica(config)
    await wait_for_run(trace, "wait", 4)
    (note,) = await second.wait("isolated:info")
    assert note["detail"]["attempt"] == 1
    assert note["detail"]["rescues"] >= 3  # more if a lease expired on a busy machine
    await client.cancel("ward", sub_task_id_of(note))
    outcome = (await asked).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert await second.wait("code_cancelled:info")
    # once cancelled, it does not run again
    assert len(process_ids(trace, "wait")) <= note["detail"]["rescues"] + 1
    assert (await mesh.row_counts())["open"] == 0


async def test_a_blocking_suspect_ends_with_its_killed_replica(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.backends.config("ward", **SHORT_LEASE, ack_policy="on_receipt")
    client, trace = await mesh.client(), tmp_path / "trace"
    await send_suspect(mesh, client, config, trace, "hang")
    replica = await mesh.replica(config)
    pid = await wait_for_run(trace, "hang", 3)
    template = parent_of(pid)
    await replica.kill()
    await wait_until_exited(pid)
    await wait_until_exited(template)


async def test_a_drain_releases_a_suspect(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.backends.config(
        "ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=1, drain_timeout_seconds=0.1
    )
    client, trace = await mesh.client(), tmp_path / "trace"
    await send_suspect(mesh, client, config, trace, "wait")
    first = await mesh.replica(config)
    pid = await wait_for_run(trace, "wait", 3)
    template = parent_of(pid)
    first.signal(signal.SIGTERM)
    assert await first.wait_ended() == 0
    await wait_until_exited(pid)
    await wait_until_exited(template)
    (task,) = await all_tasks(mesh)
    assert (task.state, task.attempt) == (TaskState.READY, 1)
    assert task.rescues >= 2  # more if a lease expired on a busy machine


async def test_a_suspect_that_blocks_its_event_loop_is_killed(mesh: Mesh, tmp_path: Path) -> None:
    config = mesh.backends.config(
        "ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=2, isolated_stall_seconds=3
    )
    client, trace = await mesh.client(), tmp_path / "trace"
    asked = await send_suspect(mesh, client, config, trace, "hang")
    replica = await mesh.replica(config)
    (good,) = await send_ward_requests(client, trace, None)
    assert (await good).outcome == Ok("well")
    assert "its event loop was blocked" in failure_message((await asked).outcome)
    assert len(await wait_for_events(replica, 2, "isolated_process_died:info")) == 2


async def test_an_isolated_process_killed_from_outside_counts_as_one_death(
    mesh: Mesh, tmp_path: Path
) -> None:
    config = mesh.backends.config("ward", **SHORT_LEASE, ack_policy="on_receipt", max_attempts=3)
    client, trace = await mesh.client(), tmp_path / "trace"
    await send_suspect(mesh, client, config, trace, "wait")
    replica = await mesh.replica(config)
    os.kill(await wait_for_run(trace, "wait", 3), signal.SIGKILL)
    (died,) = await replica.wait("isolated_process_died:info")
    assert (died["detail"]["attempt"], died["detail"]["reason"]) == (1, "was killed by SIGKILL")
    await wait_for_run(trace, "wait", 4)
    assert await replica.wait("isolated:info", attempt=2)
    attempts = [note["detail"]["attempt"] for note in replica.matching_events("isolated:info")]
    assert list(dict.fromkeys(attempts)) == [1, 2]


async def wait_for_events(
    replica: Process | SupervisedReplica, count: int, at: str, **detail: Any
) -> list[EventRecord]:
    """Wait for `count` of the replica's events `at`; the reply may arrive before them."""
    while len(events := replica.matching_events(at, **detail)) < count:
        await asyncio.sleep(0.01)
    return events


def failure_message(outcome: Outcome) -> str:
    """Message of a failed outcome."""
    assert isinstance(outcome, Failed)
    return outcome.message


def sub_task_id_of(note: EventRecord) -> TaskId:
    (task_id,) = note["task_ids"]
    return TaskId(task_id)


async def all_tasks(mesh: Mesh) -> list[TaskSummary]:
    """All task rows."""
    async with mesh.store() as store:
        return await store.tasks()
