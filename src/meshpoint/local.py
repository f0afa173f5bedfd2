"""A mesh inside one process, for scripts, notebooks and tests."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from meshpoint.client.mesh import Mesh
from meshpoint.client.transport import Transport
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import validate_agent_name
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.observer import Observer
from meshpoint.settings import AgentOptions, MeshSettings
from meshpoint.wiring import (
    build_worker,
    close_broker,
    current_traceparent,
    first_error,
    make_broker,
    make_observer,
    with_telemetry,
)


@asynccontextmanager
async def local_mesh(
    *agents: DurableAgent[Any, Any],
    broker_url: str = "memory://",
    db_url: str | None = None,
    namespace: str | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> AsyncIterator[Mesh]:
    """Serve `agents` while the block runs, and yield a connection to them.

        async with local_mesh(travel, flights) as mesh:
            plan = await mesh.call(travel, Trip(city="Rome"))

    Pausing works as in production: a paused task is a row in a database, not an object. At the end
    of the block, running code has one more second to finish. Code that ignores its cancellation is
    abandoned after `release_timeout_seconds`, with a warning.

    Args:
        agents: The agents to serve: functions decorated with `@agent`, instances of
            `StatefulAgent`.
        broker_url: Where messages are sent. By default they stay in this process.
        db_url: Where paused tasks are stored. By default a temporary SQLite file.
        namespace: The mesh to join on that broker and database. By default a new one.
        observer: Receives all events. By default they are logged.
        options: Any keys of the section `agent`, such as `peer_timeout_seconds=5`. They apply to
            all agents.

    Raises:
        ConfigurationError: There are no agents, two have the same name, or an option cannot work.
        Unavailable: The broker or the database does not answer.
    """
    _check_names(agents)
    mesh = MeshSettings(
        namespace=namespace or f"local-{new_id()}",
        broker_url=broker_url,
        encryption_keys=options.get("encryption_keys", ()),
    )
    with tempfile.TemporaryDirectory(prefix="meshpoint-", ignore_cleanup_errors=True) as folder:
        defaults: dict[str, Any] = {
            "stateless_checkpointing": True,
            "session_service": "sql",
            "session_db_url": db_url or f"sqlite:///{folder}/tasks.db",
            "drain_timeout_seconds": 1,
        }
        if db_url is None:  # no other release will ever have these tasks
            defaults["parked_limit_seconds"] = 0
        agent_options = AgentOptions(**{**defaults, **options})
        agent_options.check_mesh(mesh, "agents[0]")
        sink = with_telemetry(observer or make_observer(), mesh)
        broker, stop = make_broker(mesh), asyncio.Event()
        workers = [
            build_worker(
                agent, agent_options, mesh.namespace, broker, sink, agent_options.options()
            )
            for agent in agents
        ]
        block_error: Exception | None = None
        try:
            await broker.open()
            for agent in agents:  # the first request must find its queue
                await broker.declare(AgentName(agent.name))
            transport = Transport(make_broker(mesh), current_traceparent=current_traceparent)
            async with asyncio.TaskGroup() as serving, transport as caller:
                for each in workers:
                    serving.create_task(each.run(stop))
                try:
                    yield Mesh(caller)
                except Exception as error:  # raised after the agents have drained
                    block_error = error
                stop.set()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            await close_broker(broker, workers)
        if block_error is not None:
            raise block_error


def _check_names(agents: tuple[DurableAgent[Any, Any], ...]) -> None:
    names = [validate_agent_name(agent.name) for agent in agents]
    if not names:
        raise ConfigurationError("local_mesh", "there are no agents to serve", "pass at least one")
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(
            "local_mesh", f"two agents are called {duplicate!r}", "use unique names"
        )
