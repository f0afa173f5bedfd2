"""Serve one agent in one process: requests, responses, cancels and due work.

One rule orders everything: commit, publish, ack.

- `requests.Requests.handle_requests` begins the first segment of each new task;
- `segment_runner.SegmentRunner` runs a segment in a slot;
- `settlement.Settlement.settle` commits its result, publishes and acks;
- `responses.PeerMessages.handle_messages` records outcomes and begins the next segment once a
  join is complete;
- `sweeper.Sweeper.sweep` finds work that is due by the clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any

from meshpoint.engine.backend import Backend
from meshpoint.engine.background import run_with_timeout, wait_for_first
from meshpoint.engine.containment import contain_exits
from meshpoint.engine.database_marker import DatabaseMarker
from meshpoint.engine.dispatch import Dispatcher
from meshpoint.engine.hand_over import find_hand_over
from meshpoint.engine.inbox import Inbox
from meshpoint.engine.lifespan import Lifespan
from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.own_card import OwnCard
from meshpoint.engine.peer_directory import Directory
from meshpoint.engine.refusals import Refusals
from meshpoint.engine.request_consumer import RequestConsumer
from meshpoint.engine.requests import Requests
from meshpoint.engine.responses import PeerMessages
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Agent
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.engine.sweeper import Sweeper
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.cards import check_patterns
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import response_queue
from meshpoint.model.tasks import Resumable, Run
from meshpoint.ports.agent import DiscoversPeers, list_versions
from meshpoint.ports.broker import Subscription

log = logging.getLogger("meshpoint.engine")

_PRIVATE_RETRY_INTERVAL = timedelta(seconds=5)
_MAX_BATCH_SIZE = 1024
"""Maximum responses claimed in one batch. Ideally it holds every response of one pause."""
_DEFECT_RETRY_DELAY = timedelta(seconds=1)
_MAX_CLOSE_SECONDS = 1.5
_MIN_CLOSE_SECONDS = 0.1
"""Minimum seconds for closing a connection, even if `release_timeout` is zero."""


class Worker:
    """One agent in one process. `run` serves it until `stop` is set."""

    def __init__(self, agent: Agent, runtime: ReplicaRuntime) -> None:
        self.runtime = runtime
        self._background, self._spawn = runtime.background, runtime.background.spawn
        self._leases = runtime.database.leases if runtime.database is not None else None
        dispatcher = Dispatcher(runtime)
        self.tasks = LiveTasks(runtime, dispatcher.replies.unacked)
        self._refusals = Refusals(runtime, dispatcher.replies)
        self._request_consumer = RequestConsumer(runtime, self.tasks, self._acquire_ready)
        self.runner = SegmentRunner(
            runtime, agent, self.tasks, dispatcher, self._request_consumer.adjust_prefetch
        )
        self._requests = Requests(
            runtime, self.runner, dispatcher, self._refusals, self._request_consumer
        )
        self._own_card = OwnCard(runtime, agent, dispatcher.publisher)
        self._directory = runtime.directory = Directory(runtime)
        for version in list_versions(agent):
            declared = version.peer_patterns if isinstance(version, DiscoversPeers) else ()
            self._directory.follow(check_patterns(declared, "peers"))
        self._peer_messages = PeerMessages(
            runtime,
            self.runner,
            dispatcher.publisher,
            self.runner.settlement.attaches,
            self._refusals,
            self._adjust_response_prefetch,
            self._own_card,
            self._directory,
        )
        self._sweeper = Sweeper(runtime, self.runner, dispatcher.publisher)
        self._marker = DatabaseMarker(runtime, self.tasks)
        self._stop = asyncio.Event()
        self._lifespan = Lifespan(agent, self._stop_early)
        runtime.resources = self._lifespan.resources
        self._shared_inbox, self._private_inbox = Inbox(runtime.clock), Inbox(runtime.clock)
        self._subscriptions: dict[str, Subscription] = self._request_consumer.subscriptions
        self._response_capacity = 0
        self._is_private_queue_missing = False
        self._ends_at = inf  # deadline of the drain, on the event loop's clock

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain, always within `drain_timeout + release_timeout`.

        Code still running at that point is abandoned with a warning: see `abandoned`.

        Raises:
            Unavailable: the broker or the database did not answer within `startup_timeout`.
            ConfigurationError: the database is not migrated, the login may not declare a queue,
                this replica has no database and others have one, or the agent's lifespan failed.
        """
        self._stop = stop
        with contain_exits() as contain_permanently:
            try:
                if not await _run_unless_stopped(stop, self._start(), self._close_reserve):
                    return
                serve_shared = partial(
                    self._serve_messages,
                    self._shared_inbox,
                    self.runtime.backends[0],
                    shared=True,
                )
                serve_private = partial(
                    self._serve_messages,
                    self._private_inbox,
                    self.runtime.in_process,
                    shared=False,
                )
                consumers = [
                    self._serve("requests", self._serve_requests),
                    self._serve("ready tasks", self._serve_ready),
                    self._serve("peer messages", serve_shared),
                    self._serve("due work", self._serve_due_work),
                ]
                governors = [
                    self._serve("request limits", self._request_consumer.shed_load),
                    self._serve("request queues", self._request_consumer.watch_shards),
                ]
                if self.runtime.database is None:
                    governors.append(self._serve("the database marker", self._watch_marker))
                self._serve("private peer messages", serve_private)
                self._serve("the cards of peers", self._directory.serve)
                if self._is_private_queue_missing:
                    self._spawn(self._retry_attaching_private_queue)
                await stop.wait()
                for governor in governors:
                    governor.cancel()
                await self._drain(consumers, stop)
            finally:
                await self._close()
                if self.abandoned:
                    contain_permanently()
        for refusal in (self._marker.refusal, self._lifespan.failure):
            if refusal is not None:
                raise refusal
        self.runtime.steps.emit(Step.DRAINED)

    @property
    def abandoned(self) -> Sequence[TaskId]:
        """Tasks whose code still runs after the drain. Their leases are renewed until it stops."""
        return [run.task_id for run in self.runner.unfinished_code.values()]

    @property
    def seconds_left(self) -> float:
        """Time left in the drain for closing the resources that the agents of a process share."""
        return min(self._time_left(), self.runtime.options.release_timeout.total_seconds())

    async def sweep_once(self) -> None:
        """Sweep until nothing is due, and return once everything found has been handled."""
        try:
            for backend in self.runtime.backends:
                await backend.store.open()
            self._sweeper.is_standalone = True
            while await self._sweeper.sweep(self.runtime.backends):
                pass
            await self._sweeper.purge(self.runtime.backends[0])
            await self._background.wait_all()
        finally:
            await self._background.cancel_all(self._close_reserve)
            for backend in self.runtime.backends:
                await backend.store.close()

    async def run_one(
        self,
        run: Run,
        *,
        on_started: Callable[[], None],
        stop: asyncio.Event,
        cancel: asyncio.Event,
    ) -> bool:
        """Run only the segment that `run` owns, on behalf of the replica that owns it.

        `on_started` is called once this process renews the lease. `stop` releases the task,
        `cancel` ends it. Returns `True` if the run no longer owns the task: it paused, ended, was
        released or was lost.

        Raises:
            Unavailable: the database did not answer within `startup_timeout`, or the agent's
                lifespan failed. No segment ran.
        """
        backend, retry = self.runtime.database, self.runtime.retry
        startup = self.runtime.options.startup_timeout
        if backend is None:
            raise ValueError("only a task in a database can run on behalf of another replica")
        with contain_exits():
            try:
                await retry.for_at_most(backend.store.open, startup)
                lost = await retry.for_at_most(
                    lambda: backend.store.renew([run], self.runtime.replica), startup
                )
                task = (
                    None
                    if lost
                    else await retry.for_at_most(lambda: backend.store.find_owned(run), startup)
                )
                if task is not None:
                    await self._enter_for_one()
                    await self._run_only(backend, task, on_started, stop, cancel)
                return await retry.until_available(lambda: backend.store.find_owned(run)) is None
            finally:
                await self._close()

    async def _enter_for_one(self) -> None:
        try:
            await self._lifespan.enter(self.runtime.options.startup_timeout)
        except ConfigurationError as error:  # the owner entered it, so it may work later
            raise Unavailable(str(error)) from error

    async def _run_only(
        self,
        backend: Backend,
        task: Resumable,
        on_started: Callable[[], None],
        stop: asyncio.Event,
        cancel: asyncio.Event,
    ) -> None:
        if self._leases is not None:
            self._leases.start(self.tasks.stop_lost)
        discovery = self._serve("the cards of peers", self._directory.serve_alone)
        on_started()
        self.runtime.slots.release(-1)  # for this segment only
        self.runner.resume(backend, task)
        watchers = [
            self._spawn(_run_after, stop, self.runner.release_all),
            self._spawn(_run_after, cancel, partial(self._cancel, task.run.task_id)),
        ]
        await self.tasks.wait_until_idle()
        for watcher in (discovery, *watchers):
            watcher.cancel()
        await _finish_within(
            self.runtime.options.startup_timeout.total_seconds(), self._background.wait_all()
        )

    async def _cancel(self, task_id: TaskId) -> None:
        self.tasks.cancel(task_id)

    async def _start(self) -> None:
        await self._lifespan.enter(self.runtime.options.startup_timeout)

        async def open_all() -> None:
            for backend in self.runtime.backends:
                await backend.store.open()
            if self.runtime.l1 is not None:  # tasks cannot run without working memory
                await self.runtime.l1.open()
            await self.runtime.broker.declare(
                self.runtime.agent, shards=self.runtime.options.request_shards
            )
            await self._marker.check_in()
            if (database := self.runtime.database) is not None:
                self.runtime.hand_over_broker = await find_hand_over(
                    self.runtime.broker, database.store
                )

        await self.runtime.retry.for_at_most(open_all, self.runtime.options.startup_timeout)
        self._sweeper.begin_grace_periods()
        agent, options = self.runtime.agent, self.runtime.options
        if self.runtime.new_task_backend.is_shared:
            await self._try_attach_private_queue()
        else:
            await self.runtime.retry.for_at_most(
                self._attach_private_queue, options.startup_timeout
            )
        self._subscriptions["shared"] = await self.runtime.broker.consume(
            response_queue(agent), options.response_prefetch, self._shared_inbox.put
        )
        await self._request_consumer.start()
        if self._leases is not None:
            self._leases.start(self.tasks.stop_lost, self.runtime.make_presence())
        if self.runtime.database is None:  # another replica may have started at the same time
            await self.runtime.retry.for_at_most(self._marker.check_in, options.startup_timeout)
        self.runtime.steps.emit(
            Step.STARTED,
            slots=options.max_concurrency,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        if not self.runtime.new_task_backend.is_shared:
            log.info(
                "agent %s: stateless_checkpointing is off: new tasks live in this process's "
                "memory, and start again if it ends",
                agent,
            )

    def _serve(self, name: str, serve: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return self._spawn(self._keep_serving, name, serve)

    async def _keep_serving(self, name: str, serve: Callable[[], Awaitable[None]]) -> None:
        """Run `serve` until it returns. Report any exception and restart it after a delay."""
        while True:
            try:
                await serve()
            except Unavailable as error:
                self.runtime.retry.record_outage(error)
            except Exception as error:
                self._background.report_defect(f"serving {name}", error)
            else:
                return
            await self.runtime.clock.sleep(_DEFECT_RETRY_DELAY)

    async def _attach_private_queue(self) -> None:
        """Declare and consume this replica's private queue.

        It carries broadcasts and replies to in-process tasks.
        """
        broker, address = self.runtime.broker, self.runtime.in_process.reply_to
        await broker.declare(self.runtime.agent, self.runtime.replica.id)
        prefetch = self.runtime.options.response_prefetch
        self._subscriptions["private"] = await broker.consume(
            address, prefetch, self._private_inbox.put
        )
        self._spawn(self._own_card.introduce)

    async def _try_attach_private_queue(self) -> None:
        """Try once to attach the private queue. Tasks in the database do not need it."""
        try:
            await self._attach_private_queue()
        except Unavailable as error:
            log.warning(
                "agent %s: serves without its private queue for now: %s", self.runtime.agent, error
            )
            self._is_private_queue_missing = True

    async def _retry_attaching_private_queue(self) -> None:
        while not self.tasks.is_draining:
            try:
                await self.runtime.clock.sleep(_PRIVATE_RETRY_INTERVAL)
                await self._attach_private_queue()
            except (Unavailable, ConfigurationError) as error:
                log.debug(
                    "agent %s: its private queue cannot be attached yet: %s",
                    self.runtime.agent,
                    error,
                )
            else:
                log.warning("agent %s: its private queue is attached", self.runtime.agent)
                return

    async def _serve_requests(self) -> None:
        inbox, slots = self._request_consumer.inbox, self.runtime.slots
        while await inbox.wait_for_batch(target_count=slots.free):
            await slots.available.wait()
            if self.tasks.is_draining:
                return
            await self._requests.handle_requests(inbox.take_batch(max(slots.free, 1)))

    async def _acquire_ready(self) -> None:
        try:
            await self._sweeper.acquire_ready()
        except Exception as error:  # must not fail the request that waits for the slot
            self._background.report_defect("taking ready tasks", error)

    async def _serve_ready(self) -> None:
        while True:
            await self.tasks.tasks_ready.wait()
            await self.runtime.slots.available.wait()
            if self.tasks.is_draining:
                return
            await self._sweeper.acquire_ready()

    async def _serve_messages(self, inbox: Inbox, backend: Backend, *, shared: bool) -> None:
        target_count = self.runtime.options.response_prefetch // 2
        while await inbox.wait_for_batch(target_count):
            limit = _MAX_BATCH_SIZE
            if self.runtime.database is None:
                waiting = inbox.waiting
                if await self._marker.is_found_after(waiting, shared=shared):
                    self._stop.set()
                    if shared:
                        await self._unsubscribe(["shared"], inbox)
                        return
                limit = min(len(waiting), limit)  # only what arrived before the check
            await self._peer_messages.handle_messages(
                inbox.take_batch(limit), backend, shared=shared
            )

    async def _serve_due_work(self) -> None:
        while not self.tasks.is_draining:
            self.runtime.sweep_wakeup.clear()
            if await self._sweeper.sweep(self.runtime.backends):
                await asyncio.sleep(0)
            else:
                await wait_for_first(
                    self.runtime.sweep_wakeup.wait(),
                    self.runtime.clock.sleep(self.runtime.options.sweep_interval),
                )

    def _stop_early(self) -> None:
        self._stop.set()

    async def _watch_marker(self) -> None:
        await self._marker.watch()
        self._stop.set()

    async def _serve_in_process_due_work(self) -> None:
        while True:
            if not await self._sweeper.sweep([self.runtime.in_process]):
                await self.runtime.clock.sleep(self.runtime.options.sweep_interval)
            await asyncio.sleep(0)

    def _adjust_response_prefetch(self, capacity: int) -> None:
        if capacity != self._response_capacity:
            self._response_capacity = capacity
            self._spawn(self._resize_response_prefetch)

    async def _resize_response_prefetch(self) -> None:
        try:
            await self._subscriptions["shared"].resize(
                self.runtime.options.response_prefetch + self._response_capacity
            )
        except Unavailable as error:
            self.runtime.retry.record_outage(error)

    async def _drain(self, consumers: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
        """Stop consuming, let segments pause or end, and release the rest."""
        options = self.runtime.options
        self.tasks.is_draining = True
        self._ends_at = _now() + (options.drain_timeout + options.release_timeout).total_seconds()
        reason = getattr(stop, "reason", None)  # such as the name of a signal
        self.runtime.steps.emit(
            Step.DRAINING,
            *self.tasks.segments,
            unacked=len(self.tasks.unacked.by_task),
            **({"reason": reason} if isinstance(reason, str) else {}),
        )
        if self._leases is not None:
            self._leases.drain()
        closing = self._spawn(self._stop_consuming)
        if not await _finish_within(
            options.drain_timeout.total_seconds(), self._finish_tasks(closing, consumers)
        ):
            for consumer in consumers:
                consumer.cancel()
            await _finish_within(self._time_left() - self._close_reserve, self._release_tasks())
        await _finish_within(
            self._time_left() - self._close_reserve,
            self._unsubscribe(["private"], self._private_inbox),
        )

    async def _stop_consuming(self) -> None:
        await self._unsubscribe(
            self._request_consumer.subscription_names, self._request_consumer.inbox
        )
        await self._unsubscribe(["shared"], self._shared_inbox)
        self.runtime.sweep_wakeup.set()
        self.tasks.tasks_ready.set()

    async def _finish_tasks(
        self, closing: asyncio.Task[None], consumers: Sequence[asyncio.Task[None]]
    ) -> None:
        # Let consumers finish their batch: an interrupted claim could own a task that never runs.
        await asyncio.wait([closing, *consumers])
        await self._requeue_postponed()
        self._serve("due work in memory", self._serve_in_process_due_work)
        await self.tasks.wait_until_idle()
        await self._refusals.wait_until_done()

    async def _release_tasks(self) -> None:
        await self.runner.release_all()
        await self._requeue_postponed()
        await self.tasks.wait_until_idle()

    async def _requeue_postponed(self) -> None:
        with suppress(Unavailable):  # the broker redelivers unacked messages
            await self._peer_messages.requeue_postponed()
            await self._requests.postponed.requeue_all()

    @property
    def _close_reserve(self) -> float:
        """Seconds at the end of `release_timeout` reserved for closing connections."""
        return min(self.runtime.options.release_timeout.total_seconds() / 4, _MAX_CLOSE_SECONDS)

    def _time_left(self) -> float:
        return self._ends_at - _now()

    async def _close(self) -> None:
        """Close everything in the time left.

        Tasks that do not end in time are recovered through their leases or unacked requests.
        """
        self._ends_at = min(
            self._ends_at, _now() + self.runtime.options.release_timeout.total_seconds()
        )
        third = max(self._time_left() / 3, _MIN_CLOSE_SECONDS)
        await self._background.cancel_all(third)
        if self.runner.unfinished_code:  # `cancel_all` has just cancelled them again
            await asyncio.wait(self.runner.unfinished_code, timeout=third)
        if abandoned := self.abandoned:
            self.runtime.steps.emit(Step.ABANDONED, *abandoned)
        timeout = max(self._time_left() - third / 3, _MIN_CLOSE_SECONDS)
        closing = [
            run_with_timeout(backend.store.close(), timeout, "closing a store")
            for backend in self.runtime.backends
        ]
        closing += [
            run_with_timeout(connection.close(), timeout, "closing a connection")
            for connection in (self.runtime.l1, *self.runtime.connections)
            if connection is not None
        ]
        closing.append(run_with_timeout(self._lifespan.leave(), timeout, "leaving the lifespan"))
        if (isolation := self.runtime.isolation) is not None:
            closing.append(run_with_timeout(isolation.close(), timeout, "ending processes"))
        if self._leases is not None:
            closing.append(self._leases.close(timeout, list(self.runner.unfinished_code.values())))
        await asyncio.gather(*closing)

    async def _unsubscribe(self, names: Sequence[str], inbox: Inbox) -> None:
        """Cancel the named subscriptions, then requeue the deliveries left in `inbox`.

        In the other order, the broker would redeliver the requeued messages here and count another
        delivery.
        """
        try:
            for subscription in [
                self._subscriptions[name] for name in names if name in self._subscriptions
            ]:
                try:
                    await subscription.cancel()
                except Unavailable as error:  # closing the connection requeues unacked messages
                    self.runtime.retry.record_outage(error)
            for delivery in inbox.close():
                await delivery.requeue()
        except Unavailable as error:
            self.runtime.retry.record_outage(error)
        finally:
            inbox.close()


async def _run_unless_stopped(
    stop: asyncio.Event, step: Coroutine[Any, Any, None], cancel_timeout: float
) -> bool:
    """Run `step` until it finishes or `stop` is set. Returns `True` if it finished.

    Otherwise it is cancelled, and abandoned if it does not end within `cancel_timeout` seconds.
    """
    task, stop_waiter = asyncio.ensure_future(step), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stop_waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        stop_waiter.cancel()
        task.cancel()
        await asyncio.wait({task, stop_waiter}, timeout=max(cancel_timeout, _MIN_CLOSE_SECONDS))


async def _run_after(event: asyncio.Event, action: Callable[[], Awaitable[None]]) -> None:
    await event.wait()
    await action()


async def _finish_within(seconds: float, step: Coroutine[Any, Any, None]) -> bool:
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await step
    except TimeoutError:
        return False
    return True


def _now() -> float:
    return asyncio.get_running_loop().time()
