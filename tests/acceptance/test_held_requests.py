"""No live replica holds or sees a request, but its task is not reported as missing.

A killed replica holds its requests until the broker notices, and a stopped one still longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import meshpoint
from meshpoint import Mesh as Connection
from meshpoint import TaskHandle, TaskNotFound
from meshpoint.client import attachment, status_query
from meshpoint.model.outcomes import Ok

from .mesh import Mesh, Process

ASKS = 1
"""Replies "unknown" before the caller may give up. Usually 5."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon, so that all questions are asked before the broker notices."""
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.05,))
    monkeypatch.setattr(attachment, "_MIN_UNKNOWN_REPLIES", ASKS)
    monkeypatch.setattr(attachment, "_QUEUED_DELAYS", (0.05,))
    monkeypatch.setattr(status_query, "_UNKNOWN_DELAYS", ASKS * (0.05,))
    monkeypatch.setattr(status_query, "_REPLY_SECONDS", 0.5)  # the stopped one gets some queries


@pytest.fixture
async def callers(mesh: Mesh) -> AsyncIterator[list[Connection]]:
    """Two connections of one service."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                meshpoint.connect(
                    mesh.backends.broker_url, namespace=mesh.backends.namespace, name="shop"
                )
            )
            for _ in range(2)
        ]


async def read_states(handle: TaskHandle[object], other: Process) -> set[str]:
    """The states that a caller reads until `other` runs the task."""
    running = asyncio.ensure_future(other.wait("segment:before"))
    states = set[str]()
    while not running.done():
        states.add((await handle.status()).state)
    await running
    return states


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_a_task_whose_request_is_held_by_a_lost_replica_is_found(
    mesh: Mesh, callers: list[Connection], tmp_path: Path, fault: str
) -> None:
    config, gate = mesh.backends.config("root"), tmp_path / "gate"
    lost = await mesh.replica(config, "--at", "segment:before", "--do", fault)
    sender, other_process = callers
    await sender.send("root", {"numbers": [], "gate": str(gate)}, task_id="order-17")
    await lost.wait("segment:before")
    replica = await mesh.replica(config)
    handle = other_process.task("root", "order-17")
    outcome = asyncio.ensure_future(handle.outcome())
    assert await read_states(handle, replica) <= {"queued", "running", "unknown"}
    gate.touch()
    assert await outcome == Ok([])


async def test_a_task_that_was_never_sent_is_not_found(
    mesh: Mesh, callers: list[Connection]
) -> None:
    config = mesh.backends.config("root")
    for _ in range(3):
        await mesh.replica(config)
    with pytest.raises(TaskNotFound):
        await callers[0].task("root", "order-18").result()
    with pytest.raises(TaskNotFound):
        await callers[0].task("root", "order-18").status()
