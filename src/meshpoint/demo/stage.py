"""Where the demonstration takes place: in files that are gone afterwards, or on servers that it leaves clean."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshpoint.demo.story import PEERS, ROOT
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, new_id
from meshpoint.settings import AgentSettings, MeshSettings, Settings

CLIENT = "client"
_log = logging.getLogger(__name__)
_CLEANING_TIME = 10.0
_PRIVATE_TTL = 15
"""Seconds after which RabbitMQ forgets the private queues of the run by itself."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A mesh for one run: the settings of its replicas and of their peers, and its place in words."""

    replicas: Settings
    peers: Settings
    place: str


@contextmanager
def stage(broker_url: str | None, db_url: str | None, note: Callable[[str], None]) -> Iterator[Stage]:
    """A place for one run, with tables. Not from within a running event loop.

    Raises:
        ConfigurationError: a URL cannot be used, or the tables are of another release.
        Unavailable: the database does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="meshpoint-demo-") as folder:
        mesh = _mesh(broker_url or f"sqlite:///{folder}/broker.db")
        root = _root(db_url or f"sqlite:///{folder}/tasks.db")
        peers = [_agent(name) for name in PEERS]  # they never pause, so they need no database
        place = " and ".join(dict.fromkeys((_where(broker_url), _where(db_url))))
        _make_tables(root.session_db_url, note)
        try:
            yield Stage(Settings(mesh=mesh, agents=(root,)), Settings(mesh=mesh, agents=tuple(peers)), place)
        finally:
            if broker_url or db_url:
                asyncio.run(_clean(mesh, root))


def _mesh(broker_url: str) -> MeshSettings:
    if broker_url.startswith("memory"):
        raise ConfigurationError("--broker", "processes cannot share memory://", "leave it out, or give amqp://")
    try:
        return MeshSettings(
            namespace=f"demo-{new_id()}", broker_url=broker_url, private_queue_ttl_seconds=_PRIVATE_TTL
        )
    except ConfigurationError as error:
        raise ConfigurationError("--broker", error.problem, error.fix) from error


def _root(db_url: str) -> AgentSettings:
    try:
        return _agent(ROOT, stateless_checkpointing=True, session_service="sql", session_db_url=db_url)
    except ConfigurationError as error:
        raise ConfigurationError("--db", error.problem, error.fix) from error


def _agent(name: str, **more: Any) -> AgentSettings:
    """An agent that notices soon when another replica is gone."""
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
        **more,
    )


def _where(url: str | None) -> str:
    if url is None:
        return "SQLite files"
    parts = urlsplit(url)
    kind = {"amqp": "RabbitMQ", "amqps": "RabbitMQ", "postgresql": "PostgreSQL"}.get(parts.scheme.partition("+")[0])
    return f"{kind} at {parts.hostname}" if kind else f"SQLite in {Path(parts.path).name}"


def _make_tables(db_url: str, note: Callable[[str], None]) -> None:
    from meshpoint.adapters.sql import migrations

    if db_url.startswith("sqlite"):
        return  # a replica makes them
    revision, newest = migrations.check(db_url)
    if revision is None:
        migrations.upgrade(db_url)
        note("the database had no tables of Meshpoint: made them (meshpoint db upgrade)")
    elif revision < newest:
        raise ConfigurationError(
            "--db", f"its tables are at revision {revision}", "run: meshpoint db upgrade --db URL"
        )


async def _clean(mesh: MeshSettings, root: AgentSettings) -> None:
    """Take away what the run left on servers. What cannot be done now is told and left: nothing else needs it."""
    for clean in (delete_rows(mesh, root), delete_queues(mesh)):
        try:
            async with asyncio.timeout(_CLEANING_TIME):
                await clean
        except Exception as error:  # whatever it is, the run itself is over and its ledger stands
            _log.warning("the demonstration left something of %s: %s", mesh.namespace, error)


async def delete_rows(mesh: MeshSettings, root: AgentSettings) -> None:
    """Delete the tasks of the run, and with them their calls."""
    from sqlalchemy import delete

    from meshpoint.adapters.sql.engine import engine_for
    from meshpoint.adapters.sql.rows import Names
    from meshpoint.adapters.sql.tables import tasks

    ours = Names(mesh.namespace).qualified(AgentName(root.name))
    engine = engine_for(root.session_db_url, command_timeout=timedelta(seconds=_CLEANING_TIME), pool_size=1)
    try:
        async with engine.connect() as connection:
            await connection.execute(delete(tasks).where(tasks.c.agent_name == ours))
    finally:
        await engine.dispose()


async def delete_queues(mesh: MeshSettings) -> None:
    """Delete the queues of the run; the private ones are gone by themselves soon after."""
    if not mesh.broker_url.startswith("amqp"):
        return
    import aiormq

    from meshpoint.adapters.rabbitmq.topology import Topology

    topology = Topology(mesh.namespace, mesh.private_queue_ttl, mesh.delivery_limit, None)
    connection = await aiormq.connect(mesh.broker_url)
    try:
        channel = await connection.channel()
        for name in (ROOT, *PEERS, CLIENT):
            for address in topology.queues(AgentName(name)):
                await channel.queue_delete(topology.queue(address))
        await channel.exchange_delete(topology.exchange)
    finally:
        await connection.close()
