"""A mesh inside one process: for scripts, notebooks and tests of agents."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from meshpoint.adapters.logging_observer import LoggingObserver
from meshpoint.client import Client
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import AgentName, new_id
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.observer import Observer
from meshpoint.settings import AgentSettings, MeshSettings, Settings
from meshpoint.wiring import build_worker, close_broker, first_error, make_broker


@asynccontextmanager
async def local_mesh(
    *agents: DurableAgent[Any, Any],
    broker_url: str = "memory://",
    db_url: str | None = None,
    namespace: str | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """Serve `agents` while the block runs, and yield a client. Code still running at the end gets one more second.

        async with local_mesh(travel, flights) as mesh:
            outcome = await mesh.ask("travel", {"city": "Rome"})

    Pausing works as in production: a paused task is a row, not an object. Code that swallows its cancellation at the
    end is abandoned after `release_timeout_seconds`, with a warning.

    Args:
        agents: what to serve: functions under `@agent`, instances of `StatefulAgent`.
        broker_url: where messages go; by default they stay in this process.
        db_url: where paused tasks rest; by default a SQLite file that is gone afterwards.
        namespace: the mesh to join on that broker and database; by default one of its own.
        observer: hears what happens; by default it is logged.
        options: any key of the section `agent`, for all of them, such as `peer_timeout_seconds=5`.

    Raises:
        ConfigurationError: no agents, two of one name, or something that cannot work.
        Unavailable: the broker or the database does not answer.
    """
    _check_names(agents)
    mesh = MeshSettings(namespace=namespace or f"local-{new_id()}", broker_url=broker_url)
    with tempfile.TemporaryDirectory(prefix="meshpoint-", ignore_cleanup_errors=True) as folder:
        overrides = {"session_db_url": db_url or f"sqlite:///{folder}/tasks.db", **options}
        settings = Settings(mesh=mesh, agents=tuple(_agent_settings(agent, overrides) for agent in agents))
        broker, sink, stop = make_broker(mesh), observer or LoggingObserver(), asyncio.Event()
        workers = [
            build_worker(agent, agent_settings, mesh.namespace, broker, sink, agent_settings.options())
            for agent, agent_settings in zip(agents, settings.agents, strict=True)
        ]
        block_error: Exception | None = None
        try:
            await broker.open()
            for agent in agents:  # now, so that the first request finds its queue
                await broker.declare(AgentName(agent.name))
            async with asyncio.TaskGroup() as serving, Client(make_broker(mesh)) as client:
                for each in workers:
                    serving.create_task(each.run(stop))
                try:
                    yield client
                except Exception as error:  # kept until the agents have drained
                    block_error = error
                stop.set()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            await close_broker(broker, workers)
        if block_error is not None:
            raise block_error


def _check_names(agents: tuple[DurableAgent[Any, Any], ...]) -> None:
    names = [agent.name for agent in agents]
    if not names:
        raise ConfigurationError("local_mesh", "there is no agent to serve", "name at least one")
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError("local_mesh", f"two agents are called {duplicate!r}", "give each a name of its own")


def _agent_settings(agent: DurableAgent[Any, Any], overrides: dict[str, Any]) -> AgentSettings:
    defaults = {"stateless_checkpointing": True, "session_service": "sql", "drain_timeout_seconds": 1}
    # The agent is here already, and is not looked for.
    return AgentSettings(name=agent.name, entrypoint="meshpoint.local:local_mesh", **{**defaults, **overrides})
