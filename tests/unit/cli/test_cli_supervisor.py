"""The supervisor replaces replicas that die, with a back-off, and lets stopped ones drain."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

import pytest

from idle_loop import idle
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.supervisor import MAX_BACKOFF, MIN_BACKOFF, STABLE_UPTIME, Supervisor
from meshpoint.testing.clock import FakeClock


class FakeProcess:
    """A process that ends when the test says so."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.signals = 0
        self.signalled = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self._ended

    def terminate(self) -> None:
        if self._ended.done():
            raise ProcessLookupError
        self.signals += 1
        self.signalled.set()

    def end(self, code: int) -> None:
        self._ended.set_result(code)


class SupervisorHarness:
    """A supervisor, its clock, and the processes it started."""

    def __init__(self, replicas: int) -> None:
        self.clock = FakeClock()
        self.supervisor = Supervisor(self.spawn, replicas, self.clock)
        self.spawned: asyncio.Queue[FakeProcess] = asyncio.Queue()
        self.spawn_count, self.numbers = 0, list[int]()
        self.run = asyncio.create_task(self.supervisor.run())

    async def spawn(self, number: int) -> FakeProcess:
        self.spawn_count += 1
        self.numbers.append(number)
        replica = FakeProcess(self.spawn_count)
        await self.spawned.put(replica)
        return replica

    async def start(self, count: int = 1) -> list[FakeProcess]:
        replicas = [await self.spawned.get() for _ in range(count)]
        await idle()  # the supervisor waits for them
        return replicas


async def test_replicas_drain_when_told_to_stop() -> None:
    harness = SupervisorHarness(3)
    replicas = await harness.start(3)
    harness.supervisor.stop()
    assert [replica.signals for replica in replicas] == [1, 1, 1]
    for replica in replicas:
        replica.end(0)
    assert await harness.run is ExitCode.OK
    assert harness.spawn_count == 3


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, 0])
async def test_a_replica_that_exits_unexpectedly_is_replaced_after_a_pause(code: int) -> None:
    harness = SupervisorHarness(2)
    _, second = await harness.start(2)
    second.end(code)
    await harness.clock.wait_for_sleepers()
    assert harness.spawn_count == 2
    harness.clock.advance(MIN_BACKOFF)
    await harness.start()
    assert harness.numbers == [1, 2, 2]
    harness.run.cancel()


async def test_the_pause_grows_and_resets_after_a_stable_run() -> None:
    harness = SupervisorHarness(1)
    pauses, expected = [], [MIN_BACKOFF * 2**n for n in range(6)] + [MAX_BACKOFF] * 2
    for _ in expected:
        (replica,) = await harness.start()
        replica.end(1)
        pauses.append(await wait_for_pause(harness))
    assert pauses == expected
    (replica,) = await harness.start()
    harness.clock.advance(STABLE_UPTIME)
    replica.end(1)
    assert await wait_for_pause(harness) == MIN_BACKOFF
    harness.run.cancel()


async def wait_for_pause(harness: SupervisorHarness) -> timedelta:
    """How long the supervisor waits before it starts the next process."""
    await harness.clock.wait_for_sleepers()
    slept_seconds, step = timedelta(), timedelta(milliseconds=500)
    while harness.spawned.empty():
        harness.clock.advance(step)
        slept_seconds += step
        await idle()
    return slept_seconds


async def test_a_failed_spawn_is_retried() -> None:
    clock, spawning = FakeClock(), asyncio.Event()
    replica = FakeProcess(1)
    failures = [BlockingIOError("no process to spare")]

    async def spawn(number: int) -> FakeProcess:
        if failures:
            raise failures.pop()
        spawning.set()
        return replica

    supervisor = Supervisor(spawn, 1, clock)
    run = asyncio.create_task(supervisor.run())
    await clock.wait_for_sleepers()
    clock.advance(MIN_BACKOFF)
    await spawning.wait()
    supervisor.stop()
    replica.end(0)
    assert await run is ExitCode.OK


async def test_stopping_ends_a_pause() -> None:
    harness = SupervisorHarness(1)
    (replica,) = await harness.start()
    replica.end(1)
    await harness.clock.wait_for_sleepers()
    harness.supervisor.stop()
    assert await harness.run is ExitCode.OK
    assert harness.spawn_count == 1


async def test_a_process_spawned_during_a_stop_is_stopped() -> None:
    spawning, may_finish = asyncio.Event(), asyncio.Event()
    replica = FakeProcess(1)

    async def spawn(number: int) -> FakeProcess:
        spawning.set()
        await may_finish.wait()
        return replica

    supervisor = Supervisor(spawn, 1, FakeClock())
    run = asyncio.create_task(supervisor.run())
    await spawning.wait()
    supervisor.stop()
    may_finish.set()
    await replica.signalled.wait()
    replica.end(0)
    assert await run is ExitCode.OK


async def test_a_replica_that_rejects_its_configuration_stops_all() -> None:
    harness = SupervisorHarness(2)
    first, second = await harness.start(2)
    first.end(ExitCode.CONFIGURATION)
    await second.signalled.wait()
    second.end(0)
    assert await harness.run is ExitCode.CONFIGURATION


async def test_a_later_configuration_error_does_not_stop_the_others() -> None:
    harness = SupervisorHarness(2)
    first, second = await harness.start(2)
    first.end(1)
    await harness.clock.wait_for_sleepers()
    harness.clock.advance(MIN_BACKOFF)
    (replacement,) = await harness.start()
    replacement.end(ExitCode.CONFIGURATION)
    await harness.clock.wait_for_sleepers()
    assert second.signals == 0
    harness.run.cancel()


async def test_a_failed_drain_is_reported() -> None:
    harness = SupervisorHarness(2)
    first, second = await harness.start(2)
    harness.supervisor.stop()
    first.end(0)
    second.end(1)
    assert await harness.run is ExitCode.ERROR


async def test_a_replica_stopped_before_it_served_has_drained() -> None:
    harness = SupervisorHarness(1)
    (replica,) = await harness.start()
    harness.supervisor.stop()
    replica.end(-signal.SIGTERM)
    assert await harness.run is ExitCode.OK


async def test_a_second_stop_ends_the_drain_and_is_reported() -> None:
    harness = SupervisorHarness(1)
    (replica,) = await harness.start()
    harness.supervisor.stop()
    harness.supervisor.stop()
    assert replica.signals == 2
    replica.end(-signal.SIGTERM)
    assert await harness.run is ExitCode.ERROR
