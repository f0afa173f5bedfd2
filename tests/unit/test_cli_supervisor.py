"""The supervisor replaces replicas that die, with a back-off, and lets stopped ones drain."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.supervisor import MAX_BACKOFF, MIN_BACKOFF, STABLE_UPTIME, Supervisor


class Replica:
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


class World:
    """A supervisor, its clock, and the processes it started."""

    def __init__(self, replicas: int) -> None:
        self.clock = FakeClock()
        self.supervisor = Supervisor(self.spawn, replicas, self.clock)
        self.made: asyncio.Queue[Replica] = asyncio.Queue()
        self.count = 0
        self.run = asyncio.create_task(self.supervisor.run())

    async def spawn(self) -> Replica:
        self.count += 1
        replica = Replica(self.count)
        await self.made.put(replica)
        return replica

    async def start(self, count: int = 1) -> list[Replica]:
        replicas = [await self.made.get() for _ in range(count)]
        await asyncio.sleep(0)  # lets the supervisor reach its wait
        return replicas


async def test_replicas_drain_when_told_to_stop() -> None:
    world = World(3)
    replicas = await world.start(3)
    world.supervisor.stop()
    assert [replica.signals for replica in replicas] == [1, 1, 1]
    for replica in replicas:
        replica.end(0)
    assert await world.run is ExitCode.OK
    assert world.count == 3


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, 0])
async def test_a_replica_that_ends_unasked_is_replaced_after_a_pause(code: int) -> None:
    world = World(2)
    _, second = await world.start(2)
    second.end(code)
    await world.clock.wait_for_sleepers()
    assert world.count == 2
    world.clock.advance(MIN_BACKOFF)
    await world.start()
    assert world.count == 3
    world.run.cancel()


async def test_the_pause_grows_and_is_short_again_after_a_steady_life() -> None:
    world = World(1)
    pauses, expected = [], [MIN_BACKOFF * 2**n for n in range(6)] + [MAX_BACKOFF] * 2
    for _ in expected:
        (replica,) = await world.start()
        replica.end(1)
        pauses.append(await pause_of(world))
    assert pauses == expected
    (replica,) = await world.start()
    world.clock.advance(STABLE_UPTIME)
    replica.end(1)
    assert await pause_of(world) == MIN_BACKOFF
    world.run.cancel()


async def pause_of(world: World) -> timedelta:
    """How long the supervisor waits before it starts the next process."""
    await world.clock.wait_for_sleepers()
    slept, step = timedelta(), timedelta(milliseconds=500)
    while world.made.empty():
        world.clock.advance(step)
        slept += step
        for _ in range(10):
            await asyncio.sleep(0)
    return slept


async def test_a_process_that_cannot_be_made_is_tried_again() -> None:
    clock, made = FakeClock(), asyncio.Event()
    replica = Replica(1)
    failures = [BlockingIOError("no process to spare")]

    async def spawn() -> Replica:
        if failures:
            raise failures.pop()
        made.set()
        return replica

    supervisor = Supervisor(spawn, 1, clock)
    run = asyncio.create_task(supervisor.run())
    await clock.wait_for_sleepers()
    clock.advance(MIN_BACKOFF)
    await made.wait()
    supervisor.stop()
    replica.end(0)
    assert await run is ExitCode.OK


async def test_stopping_ends_a_pause() -> None:
    world = World(1)
    (replica,) = await world.start()
    replica.end(1)
    await world.clock.wait_for_sleepers()
    world.supervisor.stop()
    assert await world.run is ExitCode.OK
    assert world.count == 1


async def test_a_process_that_was_being_made_when_told_to_stop_is_stopped() -> None:
    made, go = asyncio.Event(), asyncio.Event()
    replica = Replica(1)

    async def spawn() -> Replica:
        made.set()
        await go.wait()
        return replica

    supervisor = Supervisor(spawn, 1, FakeClock())
    run = asyncio.create_task(supervisor.run())
    await made.wait()
    supervisor.stop()
    go.set()
    await replica.signalled.wait()
    replica.end(0)
    assert await run is ExitCode.OK


async def test_a_replica_that_refuses_its_configuration_stops_all() -> None:
    world = World(2)
    first, second = await world.start(2)
    first.end(ExitCode.CONFIGURATION)
    await second.signalled.wait()
    second.end(0)
    assert await world.run is ExitCode.CONFIGURATION


async def test_a_later_refusal_of_the_configuration_does_not_stop_the_others() -> None:
    world = World(2)
    first, second = await world.start(2)
    first.end(1)
    await world.clock.wait_for_sleepers()
    world.clock.advance(MIN_BACKOFF)
    (again,) = await world.start()
    again.end(ExitCode.CONFIGURATION)
    await world.clock.wait_for_sleepers()
    assert second.signals == 0
    world.run.cancel()


async def test_a_drain_that_failed_is_told() -> None:
    world = World(2)
    first, second = await world.start(2)
    world.supervisor.stop()
    first.end(0)
    second.end(1)
    assert await world.run is ExitCode.ERROR


async def test_a_replica_stopped_before_it_served_has_drained() -> None:
    world = World(1)
    (replica,) = await world.start()
    world.supervisor.stop()
    replica.end(-signal.SIGTERM)
    assert await world.run is ExitCode.OK


async def test_a_second_stop_ends_the_drain_and_is_told() -> None:
    world = World(1)
    (replica,) = await world.start()
    world.supervisor.stop()
    world.supervisor.stop()
    assert replica.signals == 2
    replica.end(-signal.SIGTERM)
    assert await world.run is ExitCode.ERROR
