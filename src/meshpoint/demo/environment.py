"""The environment of the demo: temporary files, or servers that it leaves clean."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshpoint import wiring
from meshpoint.demo.tracker import PEERS, ROOT
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, new_id
from meshpoint.settings import AgentSettings, MeshSettings, Settings, StoreSettings

CLIENT = "client"
_log = logging.getLogger(__name__)
_CLEANUP_TIMEOUT = 10.0
_PRIVATE_QUEUE_TTL = 15
"""Seconds after which RabbitMQ deletes unused private queues of the run."""


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """The settings of the replicas and of their peers, and a description of the servers."""

    replicas: Settings
    peers: Settings
    location: str


@contextmanager
def demo_environment(broker_url: str | None, db_url: str | None) -> Iterator[DemoEnvironment]:
    """Prepare the mesh and the database schema for one run, and clean up afterwards.

    Without `broker_url`, a PostgreSQL database carries the messages too.

    Must not be called from a running event loop.

    Raises:
        ConfigurationError: A URL cannot be used, or the tables are of another release.
        Unavailable: The database does not answer.
    """
    if broker_url is None and db_url is not None and db_url.startswith("postgres"):
        broker_url = db_url
    with tempfile.TemporaryDirectory(prefix="meshpoint-demo-") as folder:
        mesh = _mesh_settings(broker_url or f"sqlite:///{folder}/broker.db")
        root = _root_settings(db_url or f"sqlite:///{folder}/tasks.db")
        peers = [_agent_settings(name) for name in PEERS]  # they never pause and need no database
        location = " and ".join(
            dict.fromkeys((_describe_location(broker_url), _describe_location(db_url)))
        )
        _ensure_schema(root.store_settings())
        try:
            yield DemoEnvironment(
                Settings(mesh=mesh, agents=(root,)),
                Settings(mesh=mesh, agents=tuple(peers)),
                location,
            )
        finally:
            if db_url:
                asyncio.run(_clean_up(_delete_tasks(mesh, root), mesh.namespace))
            if broker_url:
                asyncio.run(_clean_up(delete_queues(mesh), mesh.namespace))


def _mesh_settings(broker_url: str) -> MeshSettings:
    if broker_url.startswith("memory"):
        raise ConfigurationError(
            "--broker", "processes cannot share memory://", "remove it, or use amqp://"
        )
    try:
        return MeshSettings(
            namespace=f"demo-{new_id()}",
            broker_url=broker_url,
            private_queue_ttl_seconds=_PRIVATE_QUEUE_TTL,
        )
    except ConfigurationError as error:
        raise ConfigurationError("--broker", error.problem, error.fix) from error


def _root_settings(db_url: str) -> AgentSettings:
    try:
        return _agent_settings(
            ROOT, stateless_checkpointing=True, session_service="sql", session_db_url=db_url
        )
    except ConfigurationError as error:
        raise ConfigurationError("--db", error.problem, error.fix) from error


def _agent_settings(name: str, **overrides: Any) -> AgentSettings:
    """Return settings with which a lost replica is detected quickly."""
    return AgentSettings(
        name=name,
        entrypoint=f"meshpoint.demo.agents:{name}",
        lease_seconds=3,
        renew_interval_seconds=1,
        sweep_interval_seconds=0.5,
        settle_time_seconds=0.5,
        dispatch_lease_seconds=1,
        drain_timeout_seconds=3,
        startup_timeout_seconds=10,
        **overrides,
    )


def _describe_location(url: str | None) -> str:
    if url is None:
        return "SQLite files"
    parts = urlsplit(url)
    kind = {"amqp": "RabbitMQ", "amqps": "RabbitMQ", "postgresql": "PostgreSQL"}.get(
        parts.scheme.partition("+")[0]
    )
    return f"{kind} at {parts.hostname}" if kind else f"SQLite in {Path(parts.path).name}"


def _ensure_schema(store: StoreSettings) -> None:
    if store.url.startswith("sqlite"):
        return  # a replica creates the schema
    status = wiring.check_schema(store)
    if status.revision is None:
        wiring.upgrade_schema(store)
        notice = "the database had no Meshpoint tables: created them (meshpoint db upgrade)"
        print(notice, file=sys.stderr, flush=True)
    elif status.is_outdated:
        raise ConfigurationError(
            "--db",
            f"its tables are at revision {status.revision}",
            "run: meshpoint db upgrade --db URL",
        )


async def _clean_up(deletion: Awaitable[None], namespace: str) -> None:
    """Await the deletion. A failure is only logged: nothing else uses what is left."""
    try:
        async with asyncio.timeout(_CLEANUP_TIMEOUT):
            await deletion
    except Exception as error:  # the run is over, and its ledger remains valid
        _log.warning("the demo could not clean up namespace %s: %s", namespace, error)


def _delete_tasks(mesh: MeshSettings, root: AgentSettings) -> Awaitable[None]:
    timeout = timedelta(seconds=_CLEANUP_TIMEOUT)
    return wiring.delete_tasks(
        root.store_settings(), mesh.namespace, AgentName(root.name), timeout
    )


async def delete_queues(mesh: MeshSettings) -> None:
    """Delete the queues of the run. RabbitMQ deletes its private queues soon after."""
    await wiring.delete_queues(mesh, [AgentName(name) for name in (ROOT, *PEERS, CLIENT)])
