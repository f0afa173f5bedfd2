"""The composition root: connects the engine to the adapters that the settings select.

Drivers are imported only when they are needed. `serve` runs all agents of a configuration in this
process, on one broker connection.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeVar
from urllib.parse import urlsplit

from meshpoint.adapters import logging_observer
from meshpoint.adapters.clocks import DatabaseClock, SystemClock
from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.sealed_broker import SealedBroker, SealedDeadLetters
from meshpoint.adapters.sqlite_queue import SqliteBroker, queues
from meshpoint.adapters.sqlite_queue.dead_letters import SqliteDeadLetters
from meshpoint.adapters.sqlite_queue.inspection import SqliteInspection
from meshpoint.agents.entrypoint import load_versions
from meshpoint.engine.background import run_with_timeout
from meshpoint.engine.runtime import build_runtime
from meshpoint.engine.worker import Worker
from meshpoint.errors import ConfigurationError
from meshpoint.extras import TELEMETRY
from meshpoint.model.encryption_keys import EncryptionKey, environment_keys, to_ring
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, new_id
from meshpoint.model.options import Options, StoreTimings
from meshpoint.model.timeline import TimelineEntry, TimelineOptions
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.broker import Broker
from meshpoint.ports.clock import Clock
from meshpoint.ports.dead_letters import DeadLetters
from meshpoint.ports.inspection import BrokerInspection, CacheInspection, DatabaseInspection
from meshpoint.ports.isolation import Isolation
from meshpoint.ports.observer import Observer, Observers
from meshpoint.ports.operator_store import OperatorStore
from meshpoint.ports.sealer import Place, Sealer
from meshpoint.ports.task_store import CheckpointCache, CheckpointStore
from meshpoint.ports.working_memory import SnapshotStore, WorkingMemory
from meshpoint.settings import AgentOptions, AgentSettings, MeshSettings, Settings, StoreSettings
from meshpoint.settings.loading import read_overrides
from meshpoint.settings.urls import redact_url

if TYPE_CHECKING:
    from meshpoint.adapters.rabbitmq.topology import Topology
    from meshpoint.adapters.sql import SqlStore
    from meshpoint.adapters.sql.database import Database
    from meshpoint.adapters.sql.migrations import DowngradePlan
    from meshpoint.adapters.telemetry.exporter import Source
    from meshpoint.adapters.telemetry.metrics import Meter
    from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter
    from meshpoint.ports.inspection import AgentKeys

_SqlStore = TypeVar("_SqlStore", bound="SqlStore")
_CLOCK = SystemClock()
_MESSAGING_SYSTEMS = {"amqp": "rabbitmq", "amqps": "rabbitmq"}
"""Names of brokers in the attributes of spans, by the scheme of their URLs, where they differ."""
_EXCHANGES: dict[str, InProcessExchange] = {}
_MAX_ENDED_TASKS = 10_000
"""Number of ended task ids that a process remembers, so that it ignores duplicate requests."""
_READ_TIMEOUT = timedelta(seconds=20)
"""Limit for one reading of a server's metrics."""
_CLOSE_TIMEOUT, _MIN_CLOSE_TIMEOUT = 10.0, 0.25
"""Seconds for closing the broker's connection: at most, and at least (after a long drain)."""


def make_broker(mesh: MeshSettings, purpose: str = "") -> Broker:
    """Create the broker of a mesh, not yet open. With keys, it seals the bodies of messages.

    Without keys, it keeps sealed messages from being refused as unreadable.

    `purpose` appears in the names of connections to RabbitMQ.
    """
    broker = _make_clear_broker(mesh, purpose)
    if isinstance(broker, InProcessBroker):
        return broker
    return SealedBroker(broker, make_mesh_sealer(mesh), mesh.namespace, mesh.max_message_bytes)


def _make_clear_broker(mesh: MeshSettings, purpose: str) -> Broker:
    scheme = urlsplit(mesh.broker_url).scheme
    if scheme == "memory":
        return InProcessBroker(
            _EXCHANGES.setdefault(
                mesh.namespace, InProcessExchange(max_length=mesh.max_queue_length)
            )
        )
    if scheme == "sqlite":
        return SqliteBroker(
            mesh.broker_url.removeprefix("sqlite:///"),
            namespace=mesh.namespace,
            delivery_limit=mesh.delivery_limit,
            max_length=mesh.max_queue_length,
            private_ttl=mesh.private_queue_ttl,
            lease=mesh.queue_lease,
        )
    if scheme.startswith("postgresql"):
        from meshpoint.adapters.postgres_queue import PostgresBroker

        return PostgresBroker(
            mesh.broker_url,
            namespace=mesh.namespace,
            delivery_limit=mesh.delivery_limit,
            max_length=mesh.max_queue_length,
            private_ttl=mesh.private_queue_ttl,
            lease=mesh.queue_lease,
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


def make_store(
    store: StoreSettings,
    namespace: str,
    timeline: TimelineOptions | None = None,
    agent: AgentName | None = None,
    sealer: Sealer | None = None,
) -> CheckpointStore:
    """Create the store in a database; `await store.open()` connects.

    `timeline` says which changes of tasks it records; by default none. With `agent`, it is the
    store of a replica of that agent. `sealer` has the keys in `store`; by default it is created.
    """
    from meshpoint.adapters.sql import SqlStore

    return _make_sql_store(SqlStore, store, namespace, timeline, agent, sealer)


def make_operator_store(store: StoreSettings, namespace: str) -> OperatorStore:
    """Create the store in a database for operators; `await store.open()` connects."""
    from meshpoint.adapters.sql.operator_store import SqlOperatorStore

    return _make_sql_store(SqlOperatorStore, store, namespace, TimelineOptions(known_only=True))


def _make_sql_store(
    kind: type[_SqlStore],
    store: StoreSettings,
    namespace: str,
    timeline: TimelineOptions | None,
    agent: AgentName | None = None,
    sealer: Sealer | None = None,
) -> _SqlStore:
    timings = store.timings
    return kind(
        store.url,
        namespace=namespace,
        dispatch_lease=timings.dispatch_lease,
        tombstone_ttl=timings.tombstone_ttl,
        parked_limit=timings.parked_limit,
        checkpoint_ttl=timings.checkpoint_ttl,
        checkpoint_history=timings.checkpoint_history,
        checkpoint_archive=timings.checkpoint_archive,
        keep_security_context=timings.keep_security_context,
        pool_size=store.pool_size,
        max_join_bytes=store.max_join_bytes,
        confirm_linger=timings.dispatch_lease / 25,
        timeline=timeline,
        sealer=sealer or make_sealer(store.keys, "encryption_keys"),
        agent=agent,
    )


def _make_timeline(timings: StoreTimings, replica: ReplicaId) -> TimelineOptions | None:
    """What a replica records, if the settings say so."""
    return TimelineOptions(replica, timings.timeline_retention) if timings.timeline else None


def make_sealer(keys: Sequence[EncryptionKey], setting: str) -> Sealer | None:
    """Create the sealer with these keys; `None` without any. Keys of `mesh` open nothing else."""
    if not keys:
        return None
    from meshpoint.adapters.encryption import KeyRing, RingKey

    scope = "mesh" if setting.startswith("mesh.") else "store"
    given = [RingKey(key.secret, key.tenant, key.agent) for key in keys]
    return KeyRing(given, setting=setting, scope=scope)


def make_mesh_sealer(mesh: MeshSettings) -> Sealer | None:
    """Create the sealer of the bodies of messages, if there are keys."""
    return make_sealer(mesh.key_ring, "mesh.encryption_keys")


def environment_sealer() -> Sealer | None:
    """The sealer with the keys in the environment, for commands and tests that read no file.

    Raises:
        ConfigurationError: A key cannot be used.
    """
    variables = read_overrides(os.environ)
    tenant = variables.get("agent", {}).get("encryption_tenant")
    ring = to_ring(environment_keys(variables), tenant)
    return make_sealer(ring, "encryption_keys")


def seal_file(sealer: Sealer | None, content: bytes, place: Place) -> bytes:
    """Encrypt the content of a file as one line of text, if there is a sealer."""
    if sealer is None or sealer.key_id(place[1]) is None:
        return content
    from meshpoint.adapters import encryption

    sealed = encryption.to_text(sealer.seal(encryption.compress(content), place))
    return f"{sealed}\n".encode()


def open_file(sealer: Sealer | None, stored: bytes, place: Place) -> bytes:
    """Undo `seal_file`. Content in the clear is returned as it is.

    Raises:
        KeyMissing: The key that encrypted it is missing.
        ValueError: It was changed, or belongs elsewhere.
    """
    from meshpoint.adapters import encryption

    if not stored.startswith(encryption.TEXT_PREFIX.encode()):
        return stored
    envelope = encryption.from_text(stored.decode().strip())
    if sealer is None:
        raise encryption.missing_key(envelope)
    return encryption.expand(sealer.open(envelope, place))


@asynccontextmanager
async def open_store(
    store: StoreSettings, namespace: str, timeline: TimelineOptions | None = None
) -> AsyncIterator[CheckpointStore]:
    """Open the store in a database while the block runs; the arguments are as for `make_store`.

    Raises:
        ConfigurationError: The database schema is not up to date.
        StoreUnavailable: The database does not answer.
    """
    opened = make_store(store, namespace, timeline)
    try:
        await opened.open()
        yield opened
    finally:
        await opened.close()


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
    durable_agent = load_configured(agent)
    return build_worker(durable_agent, agent, namespace, broker, observer, options, isolation)


def load_configured(agent: AgentSettings) -> DurableAgent[Any, Any]:
    """Import the code of an agent.

    Raises:
        ConfigurationError: The entrypoint is not an agent, or is an agent with another name.
    """
    durable_agent = load_versions(agent.entrypoints, agent.name)
    if durable_agent.name != agent.name:
        problem = (
            f"{agent.name!r} is configured, "
            f"but the agent at {agent.entrypoints[0]!r} is {durable_agent.name!r}"
        )
        raise ConfigurationError("agent.name", problem, f"write name: {durable_agent.name}")
    return durable_agent


def build_worker(
    durable_agent: DurableAgent[Any, Any],
    agent: AgentOptions,
    namespace: str,
    broker: Broker,
    observer: Observer,
    options: Options,
    isolation: Isolation | None = None,
) -> Worker:
    """Create the worker of `durable_agent` with the options `agent`, ready to `run`."""
    settings, replica_id = agent.store_settings(), ReplicaId(new_id())
    timeline = _make_timeline(settings.timings, replica_id)
    name = AgentName(durable_agent.name)
    sealer = make_sealer(settings.keys, "encryption_keys")
    store = None
    if agent.has_database:
        store = make_store(settings, namespace, timeline, name, sealer)
    clock = DatabaseClock(_CLOCK, store) if store else _CLOCK
    inprocess_store = InProcessStore(clock, timings=settings.timings, max_ended=_MAX_ENDED_TASKS)
    runtime = build_runtime(
        durable_agent,
        broker=broker,
        memory=inprocess_store,
        durable=store,
        lease_store=(lambda: make_store(settings, namespace, sealer=sealer)) if store else None,
        clock=clock,
        observer=observer,
        options=options,
        cache=_make_cache(agent, namespace, store.copy_key, sealer) if store else None,
        local=InProcessWorkingMemory(_CLOCK),
        l1=make_working_memory(agent, namespace),
        snapshots=_make_snapshots(agent, namespace, (store or inprocess_store).copy_key, sealer),
        isolation=isolation,
        replica_id=replica_id,
    )
    return Worker(durable_agent, runtime)


def _make_cache(
    agent: AgentOptions,
    namespace: str,
    secret: Callable[[], Awaitable[bytes]],
    sealer: Sealer | None,
) -> CheckpointCache | None:
    """Create the cache of an agent's checkpoints, if configured.

    `secret` returns the key that authenticates its entries.
    """
    if agent.checkpoint_cache_url is None:
        return None
    from meshpoint.adapters.redis import RedisCheckpointCache

    ttl = timedelta(seconds=agent.checkpoint_cache_ttl_seconds)
    return RedisCheckpointCache(
        agent.checkpoint_cache_url,
        namespace=namespace,
        secret=secret,
        ttl=ttl,
        sealer=sealer,
    )


def make_working_memory(agent: AgentOptions, namespace: str) -> WorkingMemory | None:
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


def _make_snapshots(
    agent: AgentOptions,
    namespace: str,
    secret: Callable[[], Awaitable[bytes]],
    sealer: Sealer | None,
) -> SnapshotStore | None:
    """Create the store for snapshots of working memories in Redis.

    `secret` returns the key that authenticates the snapshots.
    """
    url = agent.memory_snapshot_url or agent.memory_url
    if url is None:
        return None
    from meshpoint.adapters.redis import RedisSnapshotStore

    ttl = timedelta(seconds=agent.memory_paused_ttl_seconds)
    return RedisSnapshotStore(
        url,
        namespace=namespace,
        secret=secret,
        max_bytes=_read_limit(agent),
        ttl=ttl,
        sealer=sealer,
    )


def _read_limit(agent: AgentOptions) -> int:
    """Read limit in bytes for a working memory or its snapshot, above the largest written."""
    return 2 * agent.memory_max_bytes + 2**20


def make_isolation(
    agent: AgentSettings, mesh: MeshSettings, observer: Observer
) -> Isolation | None:
    """Create the runner for tasks in processes of their own.

    Returns `None` without a database or with a `memory://` broker: other processes cannot run such
    tasks.
    """
    if not agent.has_database or urlsplit(mesh.broker_url).scheme == "memory":
        return None
    from meshpoint.adapters.child_process import ChildProcesses

    settings = Settings(mesh=mesh, agents=(agent,)).model_dump(mode="json")
    return ChildProcesses(settings, observer, agent.options().isolated_stall)


def delete_embedded_namespace(file: Path, namespace: str) -> None:
    """Delete every task, checkpoint and queue of `namespace` from the SQLite file of both.

    No process may use the namespace meanwhile. A failure leaves part of it: repeat the call.

    Raises:
        Unavailable: Others kept the file locked for 10 seconds, or it is unreadable.
    """
    from meshpoint.adapters.sql.cleanup import delete_namespace

    delete_namespace(file, namespace)
    queues.delete_queues(file, namespace)


def delete_unserved_queues(file: Path, namespace: str, served: Collection[str]) -> None:
    """Delete the queues of agents not in `served`, and the private queues of all processes.

    A request for an agent that is no longer served then fails at once instead of waiting for a
    replica that never starts.

    Raises:
        BrokerUnavailable: Others kept the file locked for 10 seconds, or it is unreadable.
    """
    queues.delete_queues(file, namespace, keep=served)


async def reseal(
    agent: AgentSettings,
    namespace: str,
    *,
    clear: bool = False,
    changes: bool = True,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> AgentKeys:
    """Seal what an agent has stored with its newest key, or with `clear` store it in the clear.

    Without `changes`, only counts what is sealed with which key. `on_rows` gets the number of rows
    read so far, and of all rows.

    Raises:
        ConfigurationError: The schema is not up to date.
        StoreUnavailable: The database does not answer.
    """
    from meshpoint.adapters.sql import resealing

    settings = agent.store_settings()
    if clear:
        settings = replace(settings, keys=(EncryptionKey(b""), *settings.keys))
    async with _open_rows(settings, namespace, agent) as (database, name):
        total, done = await resealing.count_rows(database, name), 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            on_rows(done, max(total, done))

        return await resealing.reseal(database, name, changes=changes, on_rows=count)


async def forget_key(agent: AgentSettings, namespace: str, key_id: str) -> None:
    """Let replicas of `agent` start without a lost key. Its values stay unreadable."""
    from meshpoint.adapters.sql import resealing

    async with _open_rows(agent.store_settings(), namespace, agent) as (database, name):
        await resealing.forget(database, name, key_id)


@asynccontextmanager
async def _open_rows(
    settings: StoreSettings, namespace: str, agent: AgentSettings
) -> AsyncIterator[tuple[Database, str]]:
    """Open the database of an agent, and yield it with the agent's name in its rows."""
    from meshpoint.adapters.sql import SqlStore
    from meshpoint.adapters.sql.rows import AgentNames

    async with open_store(settings, namespace) as store:
        assert isinstance(store, SqlStore)
        yield store.database, AgentNames(namespace).qualified(AgentName(agent.name))


async def delete_tasks(
    store: StoreSettings, namespace: str, agent: AgentName, timeout: timedelta
) -> None:
    """Delete the tasks of an agent that no replica serves any more, with their calls."""
    from meshpoint.adapters.sql import cleanup

    await cleanup.delete_tasks(store.url, namespace, agent, timeout)


async def delete_queues(mesh: MeshSettings, agents: Sequence[AgentName]) -> None:
    """Delete the queues of agents that no replica serves any more; on RabbitMQ, the shared ones.

    Does nothing for queues in a file or in the process.
    """
    scheme = urlsplit(mesh.broker_url).scheme
    if scheme.startswith("postgresql"):
        from meshpoint.adapters.postgres_queue import inspection

        await inspection.delete_queues(
            mesh.broker_url, mesh.namespace, agents, mesh.publish_timeout
        )
        return
    if scheme not in {"amqp", "amqps"}:
        return
    from meshpoint.adapters.rabbitmq import topology

    names = topology.Topology(mesh.namespace, mesh.private_queue_ttl, mesh.delivery_limit, None)
    await topology.delete_queues(mesh.broker_url, names, agents)


class Tables(StrEnum):
    """Tables of a database with migrations of their own."""

    TASKS = "tasks"
    QUEUES = "queues"
    """Of a broker on PostgreSQL."""


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """The schema of a database: its `revision`, `None` if it has no tables, and the newest one."""

    revision: str | None
    newest: str
    is_outdated: bool


def check_schema(store: StoreSettings, tables: Tables = Tables.TASKS) -> SchemaStatus:
    """Compare the schema of a database with this release. Must not be called from an event loop.

    Raises:
        ConfigurationError: The database rejects the URL's user, does not exist, or has an invalid
            version table.
        StoreUnavailable: The database does not respond.
    """
    from meshpoint.adapters.sql import migrations
    from meshpoint.adapters.sql.tables import is_outdated

    revision, newest = migrations.check(store.url, migrations.SCHEMAS[tables])
    outdated = is_outdated(revision) if tables is Tables.TASKS else (revision or "") < newest
    return SchemaStatus(revision, newest, outdated)


def upgrade_schema(store: StoreSettings, tables: Tables = Tables.TASKS) -> None:
    """Upgrade the schema of a database to this release, in one transaction.

    Must not be called from an event loop.

    Raises:
        ConfigurationError: As for `check_schema`, or the database has conflicting tables or a
            revision that this release does not know.
        StoreUnavailable: The database does not respond.
    """
    from meshpoint.adapters.sql import migrations

    migrations.upgrade(store.url, migrations.SCHEMAS[tables])


def plan_downgrade(store: StoreSettings, target: str | None) -> DowngradePlan:
    """Describe what `downgrade_schema` would do. Must not be called from an event loop.

    Raises:
        ConfigurationError: As for `downgrade_schema`.
        StoreUnavailable: The database does not respond.
    """
    from meshpoint.adapters.sql import migrations

    return migrations.plan_downgrade(store.url, target)


def downgrade_schema(store: StoreSettings, target: str | None, *, lose_data: bool = False) -> None:
    """Return the schema of a database to an earlier revision, by default the previous one.

    Must not be called from an event loop.

    Raises:
        ConfigurationError: As for `check_schema`; or the revision is unknown or not an earlier
            one; or tasks need data that would be deleted, and `lose_data` is not set.
        StoreUnavailable: The database does not respond.
    """
    from meshpoint.adapters.sql import migrations

    migrations.downgrade(store.url, target, lose_data=lose_data)


def downgrade_sql(store: StoreSettings, target: str | None) -> str:
    """Return the SQL that `downgrade_schema` runs, without its checks."""
    from meshpoint.adapters.sql import migrations

    return migrations.downgrade_sql(store.url, target)


def schema_sql(store: StoreSettings, tables: Tables = Tables.TASKS) -> str:
    """Return the SQL that creates the schema in an empty database."""
    from meshpoint.adapters.sql import migrations

    return migrations.upgrade_sql(store.url, migrations.SCHEMAS[tables])


def inspect_database(
    store: StoreSettings, namespace: str, timeout: timedelta
) -> DatabaseInspection:
    """Create the inspection of a database, not yet open."""
    from meshpoint.adapters.sql.inspection import SqlInspection

    sealer = make_sealer(store.keys, "encryption_keys")
    return SqlInspection(store.url, namespace=namespace, timeout=timeout, sealer=sealer)


def inspect_broker(mesh: MeshSettings, timeout: timedelta) -> BrokerInspection | None:
    """Create the inspection of the broker of a mesh, not yet open.

    Returns `None` with a `memory://` broker, which lives in each process.
    """
    scheme = urlsplit(mesh.broker_url).scheme
    if scheme == "memory":
        return None
    if scheme == "sqlite":
        file = mesh.broker_url.removeprefix("sqlite:///")
        return SqliteInspection(file, namespace=mesh.namespace, timeout=timeout)
    if scheme.startswith("postgresql"):
        from meshpoint.adapters.postgres_queue.inspection import PostgresQueueInspection

        return PostgresQueueInspection(mesh.broker_url, namespace=mesh.namespace, timeout=timeout)
    from meshpoint.adapters.rabbitmq.inspection import RabbitInspection

    return RabbitInspection(mesh.broker_url, _topology(mesh), timeout)


def make_dead_letters(
    mesh: MeshSettings, agents: Collection[AgentName], warn: Callable[[str], None]
) -> DeadLetters | None:
    """Create the access to the dead letters of a mesh, not yet open.

    Returns `None` with a `memory://` broker, which keeps them in each process. `agents` are those
    whose letters are read on RabbitMQ, unless others are named. `warn` gets one line about letters
    that cannot be read or kept.
    """
    letters = _make_clear_dead_letters(mesh, agents, warn)
    if letters is None:
        return None
    sealer = make_mesh_sealer(mesh)
    return SealedDeadLetters(letters, sealer, mesh.namespace, mesh.max_message_bytes)


def _make_clear_dead_letters(
    mesh: MeshSettings, agents: Collection[AgentName], warn: Callable[[str], None]
) -> DeadLetters | None:
    scheme = urlsplit(mesh.broker_url).scheme
    if scheme == "memory":
        return None
    if scheme == "sqlite":
        return SqliteDeadLetters(
            mesh.broker_url.removeprefix("sqlite:///"),
            namespace=mesh.namespace,
            timeout=mesh.publish_timeout,
        )
    if scheme.startswith("postgresql"):
        from meshpoint.adapters.postgres_queue.dead_letters import PostgresDeadLetters

        return PostgresDeadLetters(
            mesh.broker_url, namespace=mesh.namespace, timeout=mesh.publish_timeout
        )
    from meshpoint.adapters.rabbitmq.dead_letters import RabbitDeadLetters

    return RabbitDeadLetters(mesh.broker_url, _topology(mesh), agents, mesh.publish_timeout, warn)


def _topology(mesh: MeshSettings) -> Topology:
    from meshpoint.adapters.rabbitmq.topology import Topology

    return Topology(
        mesh.namespace, mesh.private_queue_ttl, mesh.delivery_limit, mesh.max_queue_length
    )


def inspect_redis(url: str, setting: str, namespace: str, timeout: timedelta) -> CacheInspection:
    """Create the inspection of the Redis that `setting` names.

    Raises:
        ConfigurationError: `url` is not a Redis URL.
    """
    from meshpoint.adapters.redis.inspection import RedisInspection

    return RedisInspection(url, setting=setting, namespace=namespace, timeout=timeout)


def make_observer() -> Observer:
    """Create the observer that logs all events."""
    return logging_observer.LoggingObserver()


def with_telemetry(
    observer: Observer, mesh: MeshSettings, prometheus: PrometheusMeter | None = None
) -> Observer:
    """Add spans and metrics to `observer`, if the process has set up an OpenTelemetry SDK.

    Also records metrics in `prometheus`. Without either, this imports nothing and returns
    `observer` itself. Call it after the agents' modules are imported, which may set up the SDK.
    """
    from meshpoint.adapters.telemetry import providers

    observers: list[Observer] = []
    meters: list[Meter] = [] if prometheus is None else [prometheus]
    if providers.has_metrics():
        from meshpoint.adapters.telemetry.otel_meter import OpenTelemetryMeter

        meters.append(OpenTelemetryMeter())
    if meters:
        from meshpoint.adapters.telemetry.metrics import MetricsObserver

        observers.append(MetricsObserver(meters))
    if providers.has_tracing():
        from meshpoint.adapters.telemetry.tracing import TracingObserver

        scheme = urlsplit(mesh.broker_url).scheme
        observers.append(TracingObserver(_MESSAGING_SYSTEMS.get(scheme, scheme)))
    return Observers((*observers, observer)) if observers else observer


def export_timeline(entries: Sequence[TimelineEntry]) -> str:
    """Export a task's timeline as spans of a new trace, and return the trace's id.

    Raises:
        ConfigurationError: The process has no OpenTelemetry SDK, or `entries` make no span.
    """
    check_tracing()
    from meshpoint.adapters.telemetry import timeline_spans

    return timeline_spans.export(entries)


def check_tracing() -> None:
    """Check that spans are recorded.

    Raises:
        ConfigurationError: The process has no OpenTelemetry SDK.
    """
    from meshpoint.adapters.telemetry import providers

    if not providers.has_tracing():
        raise ConfigurationError(
            "spans",
            "nothing records them: this process has no OpenTelemetry SDK",
            "run: opentelemetry-instrument meshpoint tasks export-spans TASK_ID",
        )


def current_traceparent() -> str | None:
    """The caller's current span as W3C's `traceparent`; `None` without an OpenTelemetry SDK."""
    from meshpoint.adapters.telemetry import providers

    if not providers.has_tracing():
        return None
    from meshpoint.adapters.telemetry import tracing

    return tracing.current_traceparent()


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where a replica serves its metrics and its health."""

    host: str
    port: int


@asynccontextmanager
async def _observed(
    observer: Observer, settings: Settings, broker: Broker, address: MetricsAddress | None
) -> AsyncIterator[Observer]:
    """Add telemetry to `observer` and, with an `address`, serve it while the block runs.

    Raises:
        ConfigurationError: A library is missing, or the address cannot be used.
    """
    if address is None:
        yield with_telemetry(observer, settings.mesh)
        return
    TELEMETRY.require("--metrics-port")
    from meshpoint.adapters.telemetry.endpoint import Endpoint
    from meshpoint.adapters.telemetry.health import Health
    from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter

    meter = PrometheusMeter()
    health = Health([AgentName(each.name) for each in settings.agents], lambda: broker.connected)
    endpoint = Endpoint(meter, health)
    await endpoint.open(address.host, address.port)
    try:
        yield Observers((health, with_telemetry(observer, settings.mesh, meter)))
    finally:
        await endpoint.close()


async def export_metrics(
    settings: Settings, address: MetricsAddress, *, interval: timedelta, stop: asyncio.Event
) -> None:
    """Serve the metrics of the whole mesh until `stop` is set.

    Reads the databases and the queues of the agents in `settings` from time to time.

    Raises:
        ConfigurationError: A library is missing, or the address cannot be used.
    """
    TELEMETRY.require("meshpoint metrics")
    from meshpoint.adapters.telemetry.endpoint import Endpoint
    from meshpoint.adapters.telemetry.exporter import Exporter

    exporter = Exporter(
        _metric_sources(settings), interval=interval, timeout=_READ_TIMEOUT, clock=_CLOCK
    )
    endpoint = Endpoint(exporter, exporter)
    await endpoint.open(address.host, address.port, "--")
    reading = asyncio.create_task(exporter.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
    finally:
        for task in (stopping, reading):
            task.cancel()
        await asyncio.gather(stopping, reading, return_exceptions=True)
        await endpoint.close()


def _metric_sources(settings: Settings) -> list[Source]:
    """The databases of the mesh, with the agents in each, and its broker."""
    from meshpoint.adapters.sql.gauges import SqlGauges
    from meshpoint.adapters.telemetry.exporter import DatabaseSource, QueueSource

    mesh = settings.mesh
    agents: dict[str, list[AgentName]] = {}
    for each in settings.agents:
        if each.has_database:
            agents.setdefault(each.session_db_url, []).append(AgentName(each.name))
    if not settings.agents and mesh.database_url is not None:
        agents[mesh.database_url] = []
    if mesh.broker_url.startswith("postgresql"):  # its sessions and its size count too
        agents.setdefault(mesh.broker_url, [])
    sources: list[Source] = [
        DatabaseSource(
            redact_url(url),
            SqlGauges(url, namespace=mesh.namespace, timeout=_READ_TIMEOUT, agents=names),
            _CLOCK,
        )
        for url, names in agents.items()
    ]
    if inspect_broker(mesh, _READ_TIMEOUT) is not None:
        shards = {AgentName(each.name): each.request_shards for each in settings.agents}
        sources.append(QueueSource(redact_url(mesh.broker_url), partial(_inspect, mesh), shards))
    return sources


def _inspect(mesh: MeshSettings) -> BrokerInspection:
    inspection = inspect_broker(mesh, _READ_TIMEOUT)
    assert inspection is not None  # its URL does not change
    return inspection


def logging_to(
    stream: TextIO, level: str, *, as_json: bool = False
) -> AbstractContextManager[None]:
    """Send this process's logs to `stream` while the block runs.

    A terminal gets readable lines if rich is installed; otherwise, or with `as_json`, each record
    is a JSON line.
    """
    return logging_observer.logging_to(stream, level, as_json=as_json)


def make_clock() -> Clock:
    """Create the clock of this machine."""
    return SystemClock()


def isolated_options(options: Options) -> Options:
    """Return `options` for a process that runs a single segment."""
    return replace(options, max_concurrency=0)


async def serve(
    settings: Settings,
    *,
    observer: Observer | None = None,
    stop: asyncio.Event | None = None,
    metrics: MetricsAddress | None = None,
) -> None:
    """Run all agents of `settings` until `stop` is set, then drain.

    With `metrics`, it serves the metrics and the health of this process at this address.

    Returns within the longest `drain_timeout + release_timeout` after `stop`. Agent code that does
    not stop by then is abandoned on the event loop, with a warning that names its tasks. Their
    leases are renewed until it ends.

    Raises:
        ConfigurationError: The settings cannot work. The message names the key and the fix.
        Unavailable: The broker or a database did not answer within `startup_timeout`.
    """
    agents = [load_configured(each) for each in settings.agents]
    broker = make_broker(settings.mesh)
    async with _observed(observer or make_observer(), settings, broker, metrics) as observed:
        workers = [
            build_worker(
                agent,
                each,
                settings.mesh.namespace,
                broker,
                observed,
                each.options(),
                make_isolation(each, settings.mesh, observed),
            )
            for agent, each in zip(agents, settings.agents, strict=True)
        ]
        await _run(workers, broker, stop or asyncio.Event())


async def _run(workers: Sequence[Worker], broker: Broker, stop: asyncio.Event) -> None:
    try:
        await broker.open()
        async with asyncio.TaskGroup() as serving:
            for worker in workers:
                serving.create_task(worker.run(stop))
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await close_broker(broker, workers)


async def close_broker(broker: Broker, workers: Sequence[Worker]) -> None:
    """Close the broker connection of ended `workers`, in the time that their drains have left."""
    timeout = max((worker.seconds_left for worker in workers), default=_CLOSE_TIMEOUT)
    await run_with_timeout(
        broker.close(),
        min(max(timeout, _MIN_CLOSE_TIMEOUT), _CLOSE_TIMEOUT),
        "closing the broker's connection",
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
            await make_worker(agent, settings.mesh.namespace, broker, counts, options).sweep_once()
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
