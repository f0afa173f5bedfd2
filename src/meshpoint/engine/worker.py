"""Serve one agent in one process: requests, responses, cancels and due work.

One rule orders everything: commit, publish, ack.

- `requests.Requests.on_requests` begins the first segment of each new task;
- `segments.Segments` runs a segment to its checkpoint or its end;
- `responses.Letters.on_letters` records outcomes and begins the next segment once a join is met;
- `sweeper.Sweeper.look` finds work that is due by the clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any

from pydantic import JsonValue

from meshpoint.engine.background import Crew, Defects, bounded
from meshpoint.engine.containment import contained
from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.inbox import Inbox
from meshpoint.engine.leases import LeaseKeeper
from meshpoint.engine.prefetch import Intake
from meshpoint.engine.refusals import Refusals
from meshpoint.engine.requests import Requests
from meshpoint.engine.responses import Letters
from meshpoint.engine.retry import Patience
from meshpoint.engine.runtime import Site
from meshpoint.engine.segments import Agent, Segments
from meshpoint.engine.slots import Slots
from meshpoint.engine.stopping import reason_of
from meshpoint.engine.sweeper import Sweeper
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.agent_memory import MemoryRecovery
from meshpoint.model.checkpoint import Replica, Resumable, Run
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.memory import task_of
from meshpoint.model.messages import private_of, responses_of
from meshpoint.model.options import Options
from meshpoint.ports.agent import plan_of, readable_formats
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Broker, Subscription
from meshpoint.ports.checkpoint_cache import CheckpointCache
from meshpoint.ports.clock import Clock
from meshpoint.ports.isolation import Isolation
from meshpoint.ports.observer import Observer, Steps
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.ports.working_memory import SnapshotStore, WorkingMemory
from meshpoint.subtasks.checkpointer import AgentCheckpointer
from meshpoint.working_memory.task_memory import MemoryServices

log = logging.getLogger("meshpoint.engine")

_PRIVATE_RETRY = timedelta(seconds=5)
_BATCH = 1024
"""Maximum responses claimed in one batch. Ideally it holds every response of one pause."""
_AFTER_DEFECT = timedelta(seconds=1)
_CLOSING = 1.5
_LEAST = 0.1
"""Minimum seconds for closing a connection, even if `release_timeout` is zero."""


class Worker:
    """One agent in one process. `run` serves it until `stop` is set.

    `durable` is the database, or `None` with `stateless_checkpointing: false`. `memory` is the
    in-process backend. `lease_store` opens a second connection, for the thread that renews leases.
    `cache` keeps a fast copy of each operation's last checkpoint. `isolation` runs suspect tasks
    in their own processes.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        broker: Broker,
        memory: CheckpointStore,
        durable: CheckpointStore | None,
        lease_store: Callable[[], CheckpointStore] | None,
        clock: Clock,
        observer: Observer,
        options: Options,
        local: WorkingMemory,
        l1: WorkingMemory | None = None,
        snapshots: SnapshotStore | None = None,
        cache: CheckpointCache | None = None,
        replica_id: ReplicaId | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        name, id_ = AgentName(agent.name), replica_id or ReplicaId(new_id())
        replica = Replica(id_, name, readable_formats(agent), options.lease, isolates=isolation is not None)
        steps = Steps(observer, name, replica.id)
        patience = Patience(clock, steps)
        self.site = site = Site(
            replica=replica,
            broker=broker,
            durable=Home(durable, responses_of(name)) if durable is not None else None,
            memory=Home(memory, private_of(name, replica.id)),
            options=options,
            clock=clock,
            slots=Slots(options.max_concurrency),
            apart=Slots(1),
            patience=patience,
            steps=steps,
            plan=plan_of(agent),
            checkpointers=_checkpointers(durable, memory, cache, steps),
            memories={
                # An in-process task would restart from scratch on another replica, where a
                # snapshot of its old memory would get in the way. So it gets no snapshots.
                False: _memories(local, None, options, steps),
                True: _memories(l1 or local, snapshots, options, steps),
            },
        )
        self._l1, self._isolation = l1, isolation
        self._beside = [each for each in (cache, l1, snapshots) if each is not None]
        self._leases = (
            LeaseKeeper(lease_store, replica, options.renew_interval, steps, self._lease_lost)
            if lease_store
            else None
        )
        outgoing = Outgoing(site)
        self._refusals = refusals = Refusals(site, outgoing, self._spawn)
        self.segments = Segments(site, agent, outgoing, self._leases, self._spawn, self._make_room, isolation)
        self._intake = Intake(site, self.segments, self._spawn, self._before_requests)
        self._requests = Requests(site, self.segments, outgoing, refusals, self._spawn, self._poke, self._intake)
        self._letters = Letters(
            site, self.segments, outgoing, refusals, self._poke, self._spawn, self._make_letter_room
        )
        self._sweeper = Sweeper(site, self.segments, outgoing, self._spawn)
        self._shared_inbox, self._private_inbox = Inbox(clock), Inbox(clock)
        self._subscriptions: dict[str, Subscription] = self._intake.subscriptions
        self._poked = asyncio.Event()
        self._letter_room = 0
        self._private_later = False
        self._defects = Defects(steps)
        self._crew = Crew(self._defects, patience)
        self._ends_at = inf  # deadline of the drain, on the event loop's clock

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain, always within `drain_timeout + release_timeout`.

        Code still running at that point is abandoned with a warning: see `abandoned`.

        Raises:
            Unavailable: the broker or the database did not answer within `startup_timeout`.
            ConfigurationError: the database is not migrated, or the login may not declare a queue.
        """
        with contained() as containing:
            try:
                if not await _unless(stop, self._start(), self._closing_time):
                    return
                shared_home = self.site.durable or self.site.memory
                entrances = [
                    self._serve("requests", self._serve_requests),
                    self._serve("ready tasks", self._serve_ready),
                    self._serve(
                        "letters", partial(self._serve_letters, self._shared_inbox, shared_home, shared=True)
                    ),
                    self._serve("due work", self._serve_due),
                ]
                governors = [
                    self._serve("intake of requests", self._intake.govern),
                    self._serve("queues of requests", self._intake.watch_shards),
                ]
                private = partial(self._serve_letters, self._private_inbox, self.site.memory, shared=False)
                self._serve("private letters", private)
                if self._private_later:
                    self._spawn(self._keep_attaching_private())
                await stop.wait()
                for governor in governors:
                    governor.cancel()
                await self._drain(entrances, stop)
            finally:
                await self._close()
                if self.abandoned:
                    containing.keep()
        self.site.steps.note(Step.DRAINED)

    @property
    def abandoned(self) -> Sequence[TaskId]:
        """Tasks whose code still runs after the drain. Their leases are renewed until it stops."""
        return [run.task_id for run in self.segments.unfinished.values()]

    @property
    def seconds_left(self) -> float:
        """Time left in the drain for closing the resources that the agents of a process share."""
        return min(self._left(), self.site.options.release_timeout.total_seconds())

    async def look_once(self) -> None:
        """Sweep until nothing is due, and return once everything found has been handled."""
        try:
            for home in self.site.homes:
                await home.store.open()
            self._sweeper.by_hand = True
            while await self._sweeper.look(self.site.homes):
                pass
            await self._sweeper.purge(self.site.homes[0])
            await self._crew.done()
        finally:
            await self._crew.end(self._closing_time)
            for home in self.site.homes:
                await home.store.close()

    async def run_one(
        self, run: Run, *, started: Callable[[], None], stop: asyncio.Event, cancel: asyncio.Event
    ) -> bool:
        """Run only the segment that `run` owns, on behalf of the replica that owns it.

        `started` is called once this process renews the lease. `stop` releases the task, `cancel`
        ends it. Returns `True` if the run no longer owns the task: it paused, ended, was released
        or was lost.

        Raises:
            Unavailable: the database did not answer within `startup_timeout`. No agent code ran.
        """
        home, startup, patience = self.site.durable, self.site.options.startup_timeout, self.site.patience
        assert home is not None
        with contained():
            try:
                await patience.for_a_while(home.store.open, startup)
                lost = await patience.for_a_while(lambda: home.store.renew([run], self.site.replica), startup)
                task = None if lost else await patience.for_a_while(lambda: home.store.owned(run), startup)
                if task is not None:
                    await self._run_only(home, task, started, stop, cancel)
                return await patience.until_answered(lambda: home.store.owned(run)) is None
            finally:
                await self._close()

    async def _run_only(
        self, home: Home, task: Resumable, started: Callable[[], None], stop: asyncio.Event, cancel: asyncio.Event
    ) -> None:
        if self._leases is not None:
            self._leases.start()
        started()
        self.site.slots.give_back(-1)  # for this segment only
        self.segments.resume(home, task)
        watching = [
            self._spawn(_on(stop, self.segments.give_all_back)),
            self._spawn(_on(cancel, partial(self._cancel, task.run.task_id))),
        ]
        await self.segments.none_left()
        for each in watching:
            each.cancel()
        await _within(self.site.options.startup_timeout.total_seconds(), self._crew.done())

    async def _cancel(self, task_id: TaskId) -> None:
        self.segments.cancel(task_id)

    async def _start(self) -> None:
        async def open_all() -> None:
            for home in self.site.homes:
                await home.store.open()
            if self._l1 is not None:  # tasks cannot run without working memory
                await self._l1.open()
            await self.site.broker.declare(self.site.agent, shards=self.site.options.request_shards)

        await self.site.patience.for_a_while(open_all, self.site.options.startup_timeout)
        self._sweeper.begin_grace()
        agent, options = self.site.agent, self.site.options
        if self.site.durable is None:
            await self.site.patience.for_a_while(self._attach_private, options.startup_timeout)
        else:
            await self._attach_private_soon()
        for name, address, inbox, prefetch in (
            ("shared", responses_of(agent), self._shared_inbox, options.response_prefetch),
        ):
            self._subscriptions[name] = await self.site.broker.consume(address, prefetch, inbox.put)
        await self._intake.start()
        if self._leases is not None:
            self._leases.start()
        self.site.steps.note(Step.STARTED)

    def _serve(self, what: str, serve: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return self._spawn(self._lasting(what, serve))

    async def _lasting(self, what: str, serve: Callable[[], Awaitable[None]]) -> None:
        """Run `serve` until it returns. Report any exception and restart it after a delay."""
        while True:
            try:
                await serve()
            except Unavailable as error:
                self.site.patience.note_away(error)
            except Exception as error:
                self._defects.note(f"serving {what}", error)
            else:
                return
            await self.site.clock.sleep(_AFTER_DEFECT)

    async def _attach_private(self) -> None:
        """Declare and consume this replica's private queue.

        It carries broadcasts and replies to in-process tasks.
        """
        broker, address = self.site.broker, self.site.memory.reply_to
        await broker.declare(self.site.agent, self.site.replica.id)
        prefetch = self.site.options.response_prefetch
        self._subscriptions["private"] = await broker.consume(address, prefetch, self._private_inbox.put)

    async def _attach_private_soon(self) -> None:
        """Try once to attach the private queue. Durable tasks can be served without it."""
        try:
            await self._attach_private()
        except Unavailable as error:
            log.warning("agent %s: serves without its private queue for now: %s", self.site.agent, error)
            self._private_later = True

    async def _keep_attaching_private(self) -> None:
        while not self.segments.draining:
            try:
                await self.site.clock.sleep(_PRIVATE_RETRY)
                await self._attach_private()
            except (Unavailable, ConfigurationError) as error:
                log.debug("agent %s: its private queue cannot be attached yet: %s", self.site.agent, error)
            else:
                log.warning("agent %s: its private queue is attached", self.site.agent)
                return

    async def _serve_requests(self) -> None:
        inbox = self._intake.inbox
        while await inbox.some():
            await self.site.slots.some_free()
            if self.segments.draining:
                return
            await self._requests.on_requests(inbox.take(max(self.site.slots.free, 1)))
            await inbox.let_more_come(enough=self.site.slots.free)

    async def _before_requests(self) -> None:
        if self.site.slots.free > 0 and not self.segments.draining:
            await self._take_ready()  # ready tasks get free slots before new requests

    async def _take_ready(self) -> None:
        try:
            await self._sweeper.take_ready()
        except Exception as error:  # must not fail the request that waits for the slot
            self._defects.note("taking ready tasks", error)

    async def _serve_ready(self) -> None:
        while True:
            await self.segments.ready_somewhere.wait()
            await self.site.slots.some_free()
            if self.segments.draining:
                return
            await self._sweeper.take_ready()

    async def _serve_letters(self, inbox: Inbox, home: Home, *, shared: bool) -> None:
        while await inbox.some():
            await self._letters.on_letters(inbox.take(_BATCH), home, shared=shared)
            await inbox.let_more_come(enough=self.site.options.response_prefetch // 2)

    async def _serve_due(self) -> None:
        while not self.segments.draining:
            self._poked.clear()
            if await self._sweeper.look(self.site.homes):
                await asyncio.sleep(0)
            else:
                await self._poked_or_interval()

    async def _serve_due_in_memory(self) -> None:
        while True:
            if not await self._sweeper.look([self.site.memory]):
                await self.site.clock.sleep(self.site.options.sweep_interval)
            await asyncio.sleep(0)

    async def _poked_or_interval(self) -> None:
        poked = asyncio.ensure_future(self._poked.wait())
        interval = asyncio.ensure_future(self.site.clock.sleep(self.site.options.sweep_interval))
        try:
            await asyncio.wait({poked, interval}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poked.cancel()
            interval.cancel()

    def _poke(self) -> None:
        self._poked.set()

    def _spawn(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._crew.spawn(step)

    def _lease_lost(self, run: Run) -> None:
        self.segments.lose(run)

    def _make_room(self) -> None:
        self._intake.make_room()

    def _make_letter_room(self, room: int) -> None:
        if room != self._letter_room:
            self._letter_room = room
            self._spawn(self._resize_letters())

    async def _resize_letters(self) -> None:
        try:
            await self._subscriptions["shared"].resize(self.site.options.response_prefetch + self._letter_room)
        except Unavailable as error:
            self.site.patience.note_away(error)

    async def _drain(self, entrances: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
        """Stop consuming, let segments pause or end, and release the rest."""
        options = self.site.options
        self.segments.draining = True
        self._ends_at = _now() + (options.drain_timeout + options.release_timeout).total_seconds()
        held = len(self.segments.held)
        self.site.steps.note(Step.DRAINING, *self.segments.live, held=held, **reason_of(stop))
        closed = self._spawn(self._stop_consuming())
        if not await _within(options.drain_timeout.total_seconds(), self._rest(closed, entrances)):
            for entrance in entrances:
                entrance.cancel()
            await _within(self._left() - self._closing_time, self._give_back())
        await _within(self._left() - self._closing_time, self._unsubscribe(["private"], self._private_inbox))

    async def _stop_consuming(self) -> None:
        await self._unsubscribe(self._intake.names, self._intake.inbox)
        await self._unsubscribe(["shared"], self._shared_inbox)
        self._poke()
        self.segments.ready_somewhere.set()

    async def _rest(self, closed: asyncio.Task[None], entrances: Sequence[asyncio.Task[None]]) -> None:
        # Let consumers finish their batch: an interrupted claim could own a task that never runs.
        await asyncio.wait([closed, *entrances])
        await self._requeue_postponed()
        self._serve("due work in memory", self._serve_due_in_memory)
        await self.segments.none_left()
        await self._refusals.done()

    async def _give_back(self) -> None:
        await self.segments.give_all_back()
        await self._requeue_postponed()
        await self.segments.none_left()

    async def _requeue_postponed(self) -> None:
        with suppress(Unavailable):  # the broker redelivers unacked messages
            await self._letters.requeue_postponed()

    @property
    def _closing_time(self) -> float:
        """Seconds at the end of `release_timeout` reserved for closing connections."""
        return min(self.site.options.release_timeout.total_seconds() / 4, _CLOSING)

    def _left(self) -> float:
        return self._ends_at - _now()

    async def _close(self) -> None:
        """Close everything in the time left.

        Tasks that do not end in time are recovered through their leases or unacked requests.
        """
        self._ends_at = min(self._ends_at, _now() + self.site.options.release_timeout.total_seconds())
        third = max(self._left() / 3, _LEAST)
        await self._crew.end(third)
        if self.segments.unfinished:  # `crew.end` has just cancelled them again
            await asyncio.wait(self.segments.unfinished, timeout=third)
        if abandoned := self.abandoned:
            self.site.steps.note(Step.ABANDONED, *abandoned)
        within = max(self._left() - third / 3, _LEAST)
        closing = [bounded(home.store.close(), within, "closing a store") for home in self.site.homes]
        closing += [bounded(each.close(), within, "closing a connection") for each in self._beside]
        if self._isolation is not None:
            closing.append(bounded(self._isolation.close(), within, "ending processes"))
        if self._leases is not None:
            closing.append(self._leases.close(within, list(self.segments.unfinished.values())))
        await asyncio.gather(*closing)

    async def _unsubscribe(self, names: Sequence[str], inbox: Inbox) -> None:
        """Cancel the named subscriptions, then requeue the deliveries left in `inbox`.

        In the other order, the broker would redeliver the requeued messages here and count another
        delivery.
        """
        try:
            for subscription in [self._subscriptions[name] for name in names if name in self._subscriptions]:
                try:
                    await subscription.cancel()
                except Unavailable as error:  # closing the connection requeues unacked messages
                    self.site.patience.note_away(error)
            for delivery in inbox.close():
                await delivery.requeue()
        except Unavailable as error:
            self.site.patience.note_away(error)
        finally:
            inbox.close()


def _checkpointers(
    durable: CheckpointStore | None, memory: CheckpointStore, cache: CheckpointCache | None, steps: Steps
) -> dict[bool, AgentCheckpointer]:
    def tell(task_id: TaskId, what: str, why: str) -> None:
        steps.note(Step.CHECKPOINT_COPY, task_id, what=what, why=why)

    kept = {False: AgentCheckpointer(memory)}
    return kept if durable is None else {**kept, True: AgentCheckpointer(durable, cache, report_problem=tell)}


def _memories(l1: WorkingMemory, snapshots: SnapshotStore | None, options: Options, steps: Steps) -> MemoryServices:
    def tell(memory: str, what: str, why: str) -> None:
        steps.note(Step.MEMORY_TROUBLE, task_of(memory), what=what, why=why)

    def found(memory: str, how: MemoryRecovery) -> None:
        behind: dict[str, JsonValue] = {"behind": True, "why": "; ".join(how.problems)} if how.behind else {}
        steps.note(Step.MEMORY_RECOVERED, task_of(memory), source=how.source.value, keys=how.keys, **behind)

    return MemoryServices(
        l1,
        snapshots,
        max_bytes=options.memory_max_bytes,
        keep_completed=options.memory_keep,
        report_problem=tell,
        on_recovered=found,
    )


async def _unless(stop: asyncio.Event, come: Coroutine[Any, Any, None], cancelling: float) -> bool:
    """Run `come` until it finishes or `stop` is set. Returns `True` if it finished.

    Otherwise it is cancelled, and abandoned if it does not end within `cancelling` seconds.
    """
    coming, stopped = asyncio.ensure_future(come), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            coming.result()
        return coming.done()
    finally:
        stopped.cancel()
        coming.cancel()
        await asyncio.wait({coming, stopped}, timeout=max(cancelling, _LEAST))


async def _on(event: asyncio.Event, act: Callable[[], Awaitable[None]]) -> None:
    await event.wait()
    await act()


async def _within(seconds: float, come: Coroutine[Any, Any, None]) -> bool:
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await come
    except TimeoutError:
        return False
    return True


def _now() -> float:
    return asyncio.get_running_loop().time()
