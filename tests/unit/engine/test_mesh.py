"""`mesh.idle()` returns when nothing is left to do before the clock moves, and not earlier."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from fake_peer import FakePeer
from idle_loop import IdleLoop, idle
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Ok

from .agents import asker, doubler, summer
from .mesh import Mesh


async def test_idle_waits_for_the_last_of_many_steps() -> None:
    steps: list[int] = []

    async def step(number: int) -> None:
        steps.append(number)
        if number < 1_000:
            asyncio.get_running_loop().create_task(step(number + 1))

    await step(1)
    await idle()
    assert len(steps) == 1_000


async def test_idle_waits_for_a_thread() -> None:
    may_end = threading.Event()
    call = asyncio.ensure_future(asyncio.to_thread(may_end.wait))
    waiting = asyncio.ensure_future(idle())
    try:
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done()
    finally:
        may_end.set()
    await waiting
    assert call.done()


async def test_idle_waits_for_a_timer_that_is_due_soon() -> None:
    timer = asyncio.ensure_future(asyncio.sleep(0.02))
    await idle()
    assert timer.done()


async def test_idle_does_not_wait_for_a_later_timer() -> None:
    timer = asyncio.ensure_future(asyncio.sleep(3600))
    await idle()
    assert not timer.done()
    timer.cancel()


async def test_all_waiters_wake() -> None:
    await asyncio.gather(idle(), idle())


async def test_idle_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread works, the loop blocks."""
    loop, waits = asyncio.get_running_loop(), list[float | None]()
    assert isinstance(loop, IdleLoop)
    report_idle = loop.report_idle

    def record(timeout: float | None) -> bool:
        waits.append(timeout)
        return report_idle(timeout)

    monkeypatch.setattr(loop, "report_idle", record)
    ended = threading.Event()
    call = asyncio.ensure_future(asyncio.to_thread(ended.wait, 0.2))
    await idle()
    assert call.done()
    assert 1 <= len(waits) <= 3


async def test_a_mesh_does_nothing_more_until_its_clock_moves(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(doubler, summer, asker("asker", "peer", timeout=timedelta(seconds=20)))
    tasks = [await client.ask("summer", list(range(number))) for number in range(1, 30)]
    waiting = await client.ask("asker", 1)
    await mesh.idle()
    assert [client.replies(task_id) for task_id in tasks] == [
        [Ok(number * (number - 1))] for number in range(1, 30)
    ]
    assert mesh.unacked("summer") == mesh.unacked("doubler") == mesh.unacked("asker") == 0
    event_count = len(mesh.events.all)
    await mesh.idle()
    assert len(mesh.events.all) == event_count
    await mesh.advance(21)
    assert client.replies(waiting) == [Ok({"peer": "timeout"})]
    assert mesh.events.matching(Step.EXPIRE, task_id=waiting)
