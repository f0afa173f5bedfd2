"""A mesh in memory and virtual time, for tests of agents."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, overload

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.adapters.logging_observer import LoggingObserver
from meshpoint.agents.peer import Addressable, Peer, untyped_peer
from meshpoint.client.mesh import Mesh
from meshpoint.client.open_task import OpenTask
from meshpoint.client.transport import Transport
from meshpoint.errors import ConfigurationError, InvalidOption
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Address, Message, request_queue
from meshpoint.model.options import StoreTimings
from meshpoint.model.retry_policy import Duration, duration_problem
from meshpoint.model.tasks import CallState, TaskState
from meshpoint.model.waits import SLEEP_PEER, display_name, is_signal, is_wait
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.broker import PublishResult
from meshpoint.testing.activity import Activity
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.crash_points import CrashPoint, PlannedCrash
from meshpoint.testing.errors import CrashMissed, MeshIdle, ReplayDiffers
from meshpoint.testing.replay_check import checked
from meshpoint.testing.replica import (
    OPTIONS,
    TESTER,
    Replica,
    SharedStore,
    World,
    start_replicas,
)
from meshpoint.testing.stub import Stub
from meshpoint.testing.virtual_time import VirtualTime

In = TypeVar("In")
Out = TypeVar("Out")

_PROGRESS = frozenset(
    {Step.SEGMENT, Step.CHECKPOINT, Step.CLAIM, Step.EXPIRE, Step.RESCUE, Step.END, Step.RELEASE}
)


class _TestersBroker(InProcessBroker):
    """The test's connection, under a login of its own."""

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Publish `messages` under the login of the test."""
        return await super().publish(
            [(address, replace(message, user_id=TESTER)) for address, message in messages]
        )


class TestMesh(Mesh):
    """A mesh in memory and virtual time, which serves `agents` while its block runs.

        async with TestMesh(travel) as mesh:
            mesh.stub(flights).returns(Quote(price=120))
            assert await mesh.call(travel, Trip(city="Rome")) == Plan(price=120)

    Everything but the servers is real: requests pass a broker, each pause is a checkpoint, and a
    replica restores the task for its next segment. Time stands still while code runs. It moves
    with `advance`, and by itself when the test waits for a result and nothing runs: it then jumps
    to what is due next. If nothing is due within three years, the wait raises `MeshIdle`, so that
    a test never hangs while it waits for the mesh.

    Events are logged as in production, so that pytest shows the traceback of an agent that failed.

    Code of agents and async functions of stubs may wait for real I/O, timers and threads; the mesh
    waits for them in real time. Other asyncio tasks of the test do not count: a result that only
    such a task can cause must not be awaited before it.

    Args:
        agents: The agents to serve. Play all others with `stub`.
        auto_advance: Whether waiting moves the clock. Otherwise such a wait raises
            `MeshIdle`.
        always_replay: Run each segment twice, the second time with the recorded results of its
            steps, and raise `ReplayDiffers` if the two runs differ in their calls, steps or
            results. This finds clocks, random numbers and new ids outside steps. The order of a
            set of strings differs only between processes, so it is not found. Code outside steps
            has its effects twice, as after a crash.

    Raises:
        ConfigurationError: There are no agents, two have the same name, or one is only a `Peer`.
    """

    __test__ = False  # pytest must not collect it

    def __init__(
        self,
        *agents: Addressable[Any, Any],
        auto_advance: bool = True,
        always_replay: bool = False,
    ) -> None:
        self._agents = _check_agents(agents)
        if always_replay:
            self._agents = [checked(agent, self._report_difference) for agent in self._agents]
        self._replicas: dict[str, Replica] = {}
        self._clock = FakeClock(datetime.now(UTC))
        self._exchange = InProcessExchange()
        self._store = SharedStore(
            self._clock, timings=StoreTimings(parked_limit=OPTIONS.parked_limit)
        )
        self._activity = Activity(self._is_busy)
        self._time = VirtualTime(
            self._clock,
            self._store,
            self._activity,
            replicas=self._replicas.values,
            raise_failure=self._raise_failure,
            check=self._check,
            describe=self._describe_waits,
            auto_advance=auto_advance,
        )
        self._world = World(
            self._exchange,
            self._store,
            self._clock,
            self._activity,
            LoggingObserver(),
            self._handle_event,
        )
        self._stubs: dict[str, Stub[Any, Any]] = {}
        self._crashes: list[PlannedCrash] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._context = contextvars.copy_context()
        super().__init__(
            Transport(
                _TestersBroker(self._exchange),
                name="test",
                now=self._clock.now,
                open_task=self._open_task,
            )
        )

    async def __aenter__(self) -> Self:
        self._context = contextvars.copy_context()
        await self._transport.open()
        try:
            for agent in self._agents:
                self._launch(agent)
            await start_replicas(list(self._replicas.values()))
            await self._activity.wait_until_idle()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:  # a result may arrive before its message is acked
            await self._activity.wait_until_quiet()
        await self.aclose()
        if error is None:
            self._raise_failure()
            if missed := [each for each in self._crashes if each.times > 0]:
                points = ", ".join(f"crash({each})" for each in missed)
                raise CrashMissed(f"no replica reached {points}")

    async def aclose(self) -> None:
        """End all replicas, without draining them, and the connection."""
        for restart in list(self._restarts):
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*[replica.close() for replica in self._replicas.values()])
        for stub in self._stubs.values():
            await stub.close()
        await super().aclose()

    def now(self) -> datetime:
        """The mesh's time, in UTC. It starts at the real time."""
        return self._clock.now()

    async def advance(self, by: Duration, /) -> None:
        """Move time by `by`; a number is seconds.

        Everything that becomes due meanwhile happens at its own instant. Returns when it has
        settled.

        Raises:
            InvalidOption: The duration is negative or not a duration.
        """
        if (problem := duration_problem(by, "advance")) is not None:
            raise InvalidOption("; ".join(problem))
        await self._time.advance(by if isinstance(by, timedelta) else timedelta(seconds=by))

    @overload
    def stub(self, peer: str, /) -> Stub[Any, Any]: ...

    @overload
    def stub(self, peer: Addressable[In, Out], /) -> Stub[In, Out]: ...

    def stub(self, peer: Addressable[Any, Any] | str, /) -> Stub[Any, Any]:
        """Play a peer that the mesh does not serve. Returns the same stub for the same name.

        Raises:
            ConfigurationError: The mesh serves an agent of this name.
        """
        resolved: Peer[Any, Any] = untyped_peer(peer) if isinstance(peer, str) else peer.peer
        if any(agent.name == resolved.name for agent in self._agents):
            raise ConfigurationError(
                "TestMesh.stub", f"{resolved.name!r} is served", "stub only peers that are not"
            )
        if resolved.name not in self._stubs:
            self._stubs[resolved.name] = Stub(
                resolved, self._exchange, self._time.wait, self._activity.record, self._context
            )
        return self._stubs[resolved.name]

    def crash(
        self, *, before: CrashPoint | None = None, after: CrashPoint | None = None, times: int = 1
    ) -> None:
        """Kill the next replica that reaches this point, and let another replica rescue its task.

            mesh.crash(after="checkpoint")  # the pause is written, and its calls are not sent

        It dies as a process would: it writes and sends nothing more, its unacked messages return
        to the broker, and the lease on a task that it ran expires later. Only `finally` blocks of
        agent code still run, because the code cannot be frozen. If no replica reaches the point,
        the end of the block raises `CrashMissed`.

        Args:
            before: The point; see `CrashPoint`.
            after: The point, once its effect is there. Give either this or `before`.
            times: At how many passes of the point a replica dies.

        Raises:
            ValueError: There is no such point, or not exactly one is given.
        """
        self._crashes.append(_plan_crash(before, after, times))

    def _launch(self, agent: DurableAgent[Any, Any]) -> Replica:
        replica = self._replicas[agent.name] = self._context.run(Replica, agent, self._world)
        replica.task.add_done_callback(self._keep_failure)
        return replica

    def _keep_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._activity.record()

    def _open_task(self, agent: str, task_id: TaskId, awaited: set[object]) -> OpenTask:
        return _WatchedTask(agent, task_id, awaited, self._time)

    def _is_busy(self) -> bool:
        return (
            bool(self._restarts)
            or any(replica.is_running_code for replica in self._replicas.values())
            or any(stub.is_running_code for stub in self._stubs.values())
        )

    def _handle_event(self, replica: Replica, event: Event) -> None:
        if event.step in _PROGRESS and event.phase is Phase.AFTER:
            self._time.record_progress()
        dying = [crash for crash in self._crashes if crash.times > 0 and crash.is_at(event)]
        if dying:
            self._kill(replica)

    def _kill(self, replica: Replica) -> NoReturn:
        replica.kill()
        restart = asyncio.get_running_loop().create_task(
            self._replace(replica), context=self._context.copy()
        )
        self._restarts.add(restart)
        restart.add_done_callback(self._end_restart)
        # The step that died runs no further line. Its asyncio task ends as if it were cancelled.
        raise asyncio.CancelledError("the replica died")

    async def _replace(self, replica: Replica) -> None:
        await replica.close()
        await start_replicas([self._launch(replica.agent)])

    def _end_restart(self, restart: asyncio.Task[None]) -> None:
        self._restarts.discard(restart)
        self._keep_failure(restart)

    async def _check(self) -> None:
        peers = [peer for _, peer in await self._find_waits()]
        if not all(map(self._serves, peers)):
            raise MeshIdle(f"idle: {await self._describe_waits()}")

    def _report_difference(self, difference: ReplayDiffers) -> None:
        self._failure = self._failure or difference

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _serves(self, peer: str) -> bool:
        return is_wait(peer) or request_queue(AgentName(peer)) in self._exchange.queues

    async def _find_waits(self) -> list[tuple[str, str]]:
        """Pairs of a waiting task's agent and what the test must provide, such as an answer."""
        pairs = set[tuple[str, str]]()
        for task in await self._store.tasks(states=(TaskState.WAITING,), limit=1000):
            _, calls = await self._store.task(task.task_id) or (task, [])
            pairs |= {
                (str(task.agent), str(call.peer))
                for call in calls
                if call.state is CallState.PENDING
                and call.generation == task.generation
                and call.peer != SLEEP_PEER
            }
        return sorted(pairs)

    async def _describe_waits(self) -> str:
        """Describe what the tasks wait for, other than each other."""
        problems = []
        for agent, peer in await self._find_waits():
            if not self._serves(peer):
                name = peer if peer.isidentifier() else repr(peer)
                problems.append(f"{peer!r} is not served: mesh.stub({name}).returns(…)")
            elif is_signal(peer):
                name = display_name(peer)
                problems.append(f"{agent!r} waits for signal {name!r}: signal it")
            elif is_wait(peer):
                problems.append(f"{agent!r} waits for {display_name(peer)!r}: complete it")
            elif (stub := self._stubs.get(peer)) is not None and stub.has_open_requests:
                problems.append(f"{agent!r} waits for {peer!r}: answer its stub")
        if not problems:
            states = Counter(
                f"{task.agent!r} is {task.state.value}"
                for task in await self._store.tasks(limit=1000)
                if not task.state.is_final
            )
            problems = [*states] or ["no task is left"]
        return "; ".join(problems)


class _WatchedTask(OpenTask):
    """A task for which a test may wait. Waiting moves the clock."""

    def __init__(
        self, agent: str, task_id: TaskId, awaited: set[object], time: VirtualTime
    ) -> None:
        super().__init__(agent, task_id, awaited)
        self._time = time

    async def wait_news(self, *, with_updates: bool = True) -> None:
        """Wait until the task has ended or, `with_updates`, another update has arrived.

        Raises:
            MeshIdle: Neither will happen.
            MeshClosed: The mesh was closed before.
        """
        await self._time.wait(super().wait_news(with_updates=with_updates))


def _check_agents(agents: Sequence[Addressable[Any, Any]]) -> list[DurableAgent[Any, Any]]:
    checked = list[DurableAgent[Any, Any]]()
    for agent in agents:
        if not isinstance(agent, DurableAgent):
            name = getattr(agent, "name", "peer")
            raise ConfigurationError(
                "TestMesh", f"{agent!r} is not an agent", f"write mesh.stub({name}) to play a peer"
            )
        if any(agent.name == other.name for other in checked):
            raise ConfigurationError(
                "TestMesh", f"two agents are called {agent.name!r}", "use unique names"
            )
        checked.append(agent)
    if not checked:
        raise ConfigurationError("TestMesh", "there are no agents to serve", "pass at least one")
    return checked


def _plan_crash(before: CrashPoint | None, after: CrashPoint | None, times: int) -> PlannedCrash:
    if before is not None and after is None:
        return PlannedCrash("before", before, times)
    if after is not None and before is None:
        return PlannedCrash("after", after, times)
    raise ValueError("crash() takes either before= or after=")
