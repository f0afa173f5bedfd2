"""The composition root: connects the engine to the adapters that the settings select.

Drivers are imported only when they are needed. `serve` runs all agents of a configuration in this
process, on one broker connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from meshpoint.adapters.database_clock import DatabaseClock
from meshpoint.adapters.inprocess.broker import InProcessBroker
from meshpoint.adapters.inprocess.exchange import InProcessExchange
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.logging_observer import LoggingObserver
from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.adapters.system_clock import SystemClock
from meshpoint.agents.entrypoint import load_agent
from meshpoint.engine.background import bounded
from meshpoint.engine.worker import Worker
from meshpoint.errors import ConfigurationError
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.options import Options
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.broker import Broker
from meshpoint.ports.checkpoint_cache import CheckpointCache
from meshpoint.ports.isolation import Isolation
from meshpoint.ports.observer import Observer
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.ports.working_memory import SnapshotStore, WorkingMemory
from meshpoint.settings import AgentSettings, MeshSettings, Settings

_CLOCK = SystemClock()
_EXCHANGES: dict[str, InProcessExchange] = {}
_MAX_ENDED_TASKS = 10_000
"""Number of ended task ids that a process remembers, so that it ignores duplicate requests."""
_CLOSE_TIMEOUT, _MIN_CLOSE_TIMEOUT = 10.0, 0.25
"""Seconds for closing the broker's connection: at most, and at least (after a long drain)."""


def make_broker(mesh: MeshSettings, purpose: str = "") -> Broker:
    """Create the broker of a mesh, not yet open.

    `purpose` appears in the names of connections to RabbitMQ.
    """
    scheme = urlsplit(mesh.broker_url).scheme
    if scheme == "memory":
        return InProcessBroker(
            _EXCHANGES.setdefault(mesh.namespace, InProcessExchange(max_length=mesh.max_queue_length))
        )
    if scheme == "sqlite":
        return SqliteBroker(
            mesh.broker_url.removeprefix("sqlite:///"),
            namespace=mesh.namespace,
            delivery_limit=mesh.delivery_limit,
            max_length=mesh.max_queue_length,
            private_ttl=mesh.private_queue_ttl,
        )
    from meshpoint.adapters.rabbitmq import RabbitMqBroker

    return RabbitMqBroker(
        mesh.broker_url,
        namespace=mesh.namespace,
        publish_timeout=mesh.publish_timeout,
        private_ttl=mesh.private_queue_ttl,
        delivery_limit=mesh.delivery_limit,
        max_length=mesh.max_queue_length,
        purpose=purpose,
    )


def make_store(agent: AgentSettings, namespace: str) -> CheckpointStore:
    """Create the store of an agent's database; `await store.open()` connects."""
    from meshpoint.adapters.sql import SqlStore

    timings = agent.timings()
    return SqlStore(
        agent.session_db_url,
        namespace=namespace,
        dispatch_lease=timings.dispatch_lease,
        tombstone_ttl=timings.tombstone_ttl,
        incompatible_limit=timings.incompatible_limit,
        checkpoint_ttl=timings.checkpoint_ttl,
        checkpoint_history=timings.checkpoint_history,
        checkpoint_archive=timings.checkpoint_archive,
        pool_size=agent.db_pool_size,
        max_join_bytes=agent.max_join_bytes,
        confirm_linger=timings.dispatch_lease / 25,
    )


def make_worker(
    agent: AgentSettings,
    namespace: str,
    broker: Broker,
    observer: Observer,
    options: Options,
    isolation: Isolation | None = None,
) -> Worker:
    """Create the worker of one agent, ready to `run` on `broker`.

    Raises:
        ConfigurationError: The entrypoint is not an agent, or is an agent with another name.
    """
    durable_agent = load_agent(agent.entrypoint)
    if durable_agent.name != agent.name:
        problem = f"{agent.name!r} is configured, but the agent at {agent.entrypoint!r} is {durable_agent.name!r}"
        raise ConfigurationError("agent.name", problem, f"write name: {durable_agent.name}")
    return build_worker(durable_agent, agent, namespace, broker, observer, options, isolation)


def build_worker(
    durable_agent: DurableAgent[Any, Any],
    agent: AgentSettings,
    namespace: str,
    broker: Broker,
    observer: Observer,
    options: Options,
    isolation: Isolation | None = None,
) -> Worker:
    """Create the worker of `durable_agent` with the settings of `agent`, ready to `run`."""
    store = make_store(agent, namespace) if agent.stateless_checkpointing else None
    clock = DatabaseClock(_CLOCK, store) if store else _CLOCK
    inprocess_store = InProcessStore(clock, timings=agent.timings(), max_ended=_MAX_ENDED_TASKS)
    return Worker(
        durable_agent,
        broker=broker,
        memory=inprocess_store,
        durable=store,
        lease_store=(lambda: make_store(agent, namespace)) if store else None,
        clock=clock,
        observer=observer,
        options=options,
        cache=make_cache(agent, namespace, store.copy_key) if store else None,
        local=InProcessWorkingMemory(_CLOCK),
        l1=make_working_memory(agent, namespace),
        snapshots=make_snapshots(agent, namespace, (store or inprocess_store).copy_key),
        isolation=isolation,
    )


def make_cache(
    agent: AgentSettings, namespace: str, secret: Callable[[], Awaitable[bytes]]
) -> CheckpointCache | None:
    """Create the cache of an agent's checkpoints, if configured.

    `secret` returns the key that authenticates its entries.
    """
    if agent.checkpoint_cache_url is None:
        return None
    from meshpoint.adapters.redis import RedisCheckpointCache

    ttl = timedelta(seconds=agent.checkpoint_cache_ttl_seconds)
    return RedisCheckpointCache(agent.checkpoint_cache_url, namespace=namespace, secret=secret, ttl=ttl)


def make_working_memory(agent: AgentSettings, namespace: str) -> WorkingMemory | None:
    """Create the Redis working memory of an agent's tasks.

    Returns `None` if not configured: memories then stay in the process and in each checkpoint.
    """
    if agent.memory_url is None:
        return None
    from meshpoint.adapters.redis import RedisWorkingMemory

    return RedisWorkingMemory(
        agent.memory_url,
        namespace=namespace,
        max_bytes=_read_limit(agent),
        active_ttl=timedelta(seconds=agent.memory_ttl_seconds),
        paused_ttl=timedelta(seconds=agent.memory_paused_ttl_seconds),
    )


def make_snapshots(
    agent: AgentSettings, namespace: str, secret: Callable[[], Awaitable[bytes]]
) -> SnapshotStore | None:
    """Create the store for snapshots of working memories in Redis.

    `secret` returns the key that authenticates the snapshots.
    """
    url = agent.memory_snapshot_url or agent.memory_url
    if url is None:
        return None
    from meshpoint.adapters.redis import RedisSnapshotStore

    ttl = timedelta(seconds=agent.memory_paused_ttl_seconds)
    return RedisSnapshotStore(url, namespace=namespace, secret=secret, max_bytes=_read_limit(agent), ttl=ttl)


def _read_limit(agent: AgentSettings) -> int:
    """Read limit in bytes for a working memory or its snapshot, above the largest written."""
    return 2 * agent.memory_max_bytes + 2**20


def make_isolation(agent: AgentSettings, mesh: MeshSettings, observer: Observer) -> Isolation | None:
    """Create the runner for tasks in processes of their own.

    Returns `None` without checkpointing or with a `memory://` broker: other processes cannot run
    such tasks.
    """
    if not agent.stateless_checkpointing or urlsplit(mesh.broker_url).scheme == "memory":
        return None
    from meshpoint.adapters.child_process import ChildProcesses

    settings = Settings(mesh=mesh, agents=(agent,)).model_dump(mode="json")
    return ChildProcesses(settings, observer, agent.options().isolated_stall)


def isolated_options(options: Options) -> Options:
    """Return `options` for a process that runs a single segment."""
    return replace(options, max_concurrency=0)


async def serve(settings: Settings, *, observer: Observer | None = None, stop: asyncio.Event | None = None) -> None:
    """Run all agents of `settings` until `stop` is set, then drain.

    Returns within the longest `drain_timeout + release_timeout` after `stop`. Agent code that does
    not stop by then is abandoned on the event loop, with a warning that names its tasks. Their
    leases are renewed until it ends.

    Raises:
        ConfigurationError: The settings cannot work. The message names the key and the fix.
        Unavailable: The broker or a database did not answer within `startup_timeout`.
    """
    stop, observer = stop or asyncio.Event(), observer or LoggingObserver()
    broker, mesh = make_broker(settings.mesh), settings.mesh
    workers = [
        make_worker(each, mesh.namespace, broker, observer, each.options(), make_isolation(each, mesh, observer))
        for each in settings.agents
    ]
    try:
        await broker.open()
        async with asyncio.TaskGroup() as agents:
            for worker in workers:
                agents.create_task(worker.run(stop))
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await close_broker(broker, workers)


async def close_broker(broker: Broker, workers: Sequence[Worker]) -> None:
    """Close the broker connection of ended `workers`, in the time that their drains have left."""
    timeout = max((worker.seconds_left for worker in workers), default=_CLOSE_TIMEOUT)
    await bounded(
        broker.close(), min(max(timeout, _MIN_CLOSE_TIMEOUT), _CLOSE_TIMEOUT), "closing the broker's connection"
    )


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first plain error in a group: the cause, of which the others are consequences."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


async def sweep_once(settings: Settings) -> dict[str, int]:
    """Sweep once, without running agent code, and return the number of each kind of change."""
    counts = _SweepCounter()
    broker = make_broker(settings.mesh)
    await broker.open()
    try:
        for agent in settings.agents:
            options = replace(agent.options(), max_concurrency=0, settle_time=timedelta())
            await make_worker(agent, settings.mesh.namespace, broker, counts, options).look_once()
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await broker.close()
    return counts.counts


class _SweepCounter:
    """Observer that counts what a sweep does."""

    _LABELS: ClassVar = {
        Step.EXPIRE: "tasks past a deadline",
        Step.DISPATCH: "requests sent",
        Step.CANCEL_NOTICE: "cancels sent",
        Step.REPLY: "replies sent",
        Step.PURGE: "tombstones purged",
    }

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(self._LABELS.values(), 0)

    def emit(self, event: Event) -> None:
        if event.phase is Phase.AFTER and (name := self._LABELS.get(event.step)):
            purged = event.detail.get("purged")
            self.counts[name] += purged if isinstance(purged, int) else len(event.task_ids)
