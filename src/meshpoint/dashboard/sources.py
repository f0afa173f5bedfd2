"""The databases and brokers that a dashboard shows."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from meshpoint.errors import ConfigurationError, MeshpointError, StoreUnavailable
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import nested_queue, request_shard, response_queue
from meshpoint.operations import Operations
from meshpoint.ports.inspection import QueueFacts
from meshpoint.settings import MeshSettings, Settings, StoreSettings, load
from meshpoint.settings.choosing import stores_of
from meshpoint.wiring import (
    inspect_broker,
    make_broker,
    make_dead_letters,
    make_operator_store,
)

if TYPE_CHECKING:
    from meshpoint.ports.dead_letters import DeadLetters
    from meshpoint.ports.operator_store import OperatorStore

log = logging.getLogger(__name__)

_INSPECTION_TIMEOUT = timedelta(seconds=3)
_NOTICE_TIMEOUT = 5.0
_QUEUE_SECONDS = 2.0
"""How old the lengths of queues on a page may be."""


@dataclass(frozen=True, slots=True)
class AgentQueues:
    """The queues of an agent; `None` if a queue does not exist."""

    requests: QueueFacts | None
    nested: QueueFacts | None
    responses: QueueFacts | None


class Source:
    """One database of a mesh, its broker, and the names in its configuration.

    The database is opened when it is first needed, and again after a failure to open it.

    Attributes:
        key: its name in URLs.
        title: its name on pages.
        siblings: the other databases of the same mesh.
    """

    def __init__(self, key: str, title: str, settings: Settings, store: StoreSettings) -> None:
        self.key, self.title = key, title
        self.mesh: MeshSettings = settings.mesh
        self.agents = [AgentName(agent.name) for agent in settings.agents]
        self._shards = {agent.name: agent.request_shards for agent in settings.agents}
        self.secret_keys = tuple(
            {key: None for agent in settings.agents for key in agent.secret_keys}
        )
        self.siblings: list[Source] = []
        self._settings = store
        self._store: OperatorStore | None = None
        self._lock = asyncio.Lock()
        self._queues: dict[AgentName, AgentQueues] = {}
        self._queues_read_at = float("-inf")
        self._queues_lock = asyncio.Lock()

    async def open(self) -> OperatorStore:
        """The open database.

        Raises:
            ConfigurationError: Its schema is not up to date.
            StoreUnavailable: It does not answer, or no replica has used its file yet.
        """
        async with self._lock:
            if self._store is None:
                self._check_file_exists()
                store = make_operator_store(self._settings, self.mesh.namespace)
                try:
                    await store.open()
                except BaseException:
                    await store.close()
                    raise
                self._store = store
            return self._store

    async def operations(self) -> Operations:
        """The operations in the open database."""
        return Operations._on(await self.open())

    async def close(self) -> None:
        """Close the database, if it is open."""
        async with self._lock:
            if self._store is not None:
                await self._store.close()
                self._store = None

    def _check_file_exists(self) -> None:
        """Opening a store would create the file."""
        scheme, _, file = self._settings.url.partition(":///")
        if scheme.startswith("sqlite") and not Path(file.partition("?")[0]).exists():
            raise StoreUnavailable("no replica has used the database file yet")

    @asynccontextmanager
    async def dead_letters(self, warnings: list[str]) -> AsyncIterator[DeadLetters | None]:
        """Open the access to the dead letters; `None` if they live in another process."""
        letters = make_dead_letters(self.mesh, self.agents, warnings.append)
        if letters is None:
            yield None
            return
        try:
            await letters.open()
            yield letters
        finally:
            await letters.close()

    async def queues(self, agents: Sequence[AgentName]) -> dict[AgentName, AgentQueues]:
        """The lengths of the agents' queues, at most two seconds old. Empty with memory://.

        Raises:
            MeshpointError: The broker does not answer.
        """
        async with self._queues_lock:
            is_old = monotonic() > self._queues_read_at + _QUEUE_SECONDS
            if is_old or not set(agents) <= self._queues.keys():
                self._queues = await self._read_queues(agents)
                self._queues_read_at = monotonic()
            return self._queues

    async def _read_queues(self, agents: Sequence[AgentName]) -> dict[AgentName, AgentQueues]:
        inspection = inspect_broker(self.mesh, _INSPECTION_TIMEOUT)
        if inspection is None:
            return {}
        try:
            await inspection.open()
            return {
                agent: AgentQueues(
                    _total(
                        [
                            await inspection.queue(request_shard(agent, number))
                            for number in range(self._shards.get(agent, 1))
                        ]
                    ),
                    await inspection.queue(nested_queue(agent)),
                    await inspection.queue(response_queue(agent)),
                )
                for agent in agents
            }
        finally:
            await inspection.close()

    async def notify_cancelled(self, tasks: Sequence[tuple[TaskId, AgentName]]) -> str | None:
        """Notify the replicas that run these tasks of their cancellation.

        Without a notice, a segment stops at its next pause. Returns why a notice could not be
        sent, or `None`.
        """
        from meshpoint.client.transport import Transport

        if self.mesh.broker_url.startswith("memory:"):
            return None
        try:
            async with (
                asyncio.timeout(_NOTICE_TIMEOUT),
                Transport(make_broker(self.mesh)) as transport,
            ):
                for task_id, agent in tasks:
                    await transport.cancel(agent, task_id)
        except (MeshpointError, OSError, TimeoutError) as error:
            log.warning("replicas could not be notified of a cancel: %s", error)
            return "the broker does not answer, so running segments stop at their next pause"
        return None


def _total(queues: Sequence[QueueFacts | None]) -> QueueFacts | None:
    existing = [each for each in queues if each is not None]
    if not existing:
        return None
    return QueueFacts(
        sum(each.messages for each in existing), max(each.consumers for each in existing)
    )


def load_sources(configs: Sequence[Path | str]) -> list[Source]:
    """The databases of all configurations, each with the agents of its own file.

    Raises:
        ConfigurationError: A configuration cannot work, or names no database.
    """
    sources: list[Source] = []
    used: Counter[str] = Counter()
    for config in configs:
        settings = load([config])
        found: list[Source] = []
        for store in stores_of(settings):
            name = settings.mesh.namespace
            used[name] += 1
            title = name if used[name] == 1 else f"{name}-{used[name]}"
            while any(each.key == title for each in [*sources, *found]):
                used[name] += 1
                title = f"{name}-{used[name]}"
            found.append(Source(title, title, settings, store))
        if not found:
            fix = "add session_service: sql to an agent"
            raise ConfigurationError(str(config), "no agent in it has a database", fix)
        for each in found:
            each.siblings = [other for other in found if other is not each]
        sources += found
    if not sources:
        raise ConfigurationError("dashboard", "no configuration is named", "name a YAML file")
    return sources
