"""Read the servers of a configuration, each request within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from meshpoint import wiring
from meshpoint.agents.versions import code_version, source_version
from meshpoint.doctor.findings import Finding, refused, unavailable
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address, dead_letter_queue, request_queue
from meshpoint.model.replicas import RegisteredReplica
from meshpoint.ports.agent import list_versions, readable_formats
from meshpoint.ports.clock import Clock
from meshpoint.ports.inspection import (
    AgentTasks,
    BrokerInspection,
    CacheFacts,
    DatabaseInspection,
    MissingRight,
    OtherArguments,
    QueueFacts,
    SchemaFacts,
)
from meshpoint.settings import AgentSettings, Settings, StoreSettings
from meshpoint.settings.agent import stores_of_agents
from meshpoint.settings.urls import redact_url

_T = TypeVar("_T")
_NAMES = {"database": "the database", "broker": "the broker", "redis": "Redis"}
OnStep = Callable[[str], None]
"""Called with a description of what is read next."""


@dataclass(frozen=True, slots=True)
class Release:
    """What a configuration would deploy of one agent.

    Attributes:
        formats: the state formats that its code reads.
        newest: the format of new tasks.
        version: `app_version`, or the digest of its source.
        code_version: identifies the code when it tries a parked task.
    """

    settings: AgentSettings
    formats: frozenset[str]
    newest: str
    version: str
    code_version: str

    @property
    def name(self) -> AgentName:
        """The name of the agent."""
        return AgentName(self.settings.name)


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a server's clock is ahead of this host's. `error`: half of the round trip."""

    offset: timedelta
    error: timedelta


@dataclass(slots=True)
class DatabaseFacts:
    """What is known of one database. `None` means that it could not be read.

    Attributes:
        problem: why its login could not serve tasks.
        is_full: whether it cannot write to its disk.
        tasks: of each agent with tasks in this namespace.
        replicas: that have registered.
    """

    url: str
    schema: SchemaFacts | None = None
    problem: str | None = None
    is_full: bool = False
    clock: ClockOffset | None = None
    tasks: dict[AgentName, AgentTasks] = field(default_factory=dict)
    replicas: list[RegisteredReplica] = field(default_factory=list)


@dataclass(slots=True)
class BrokerAgentFacts:
    """What is known at the broker of one agent.

    Attributes:
        is_declared: whether its request queue exists.
        replicas: that serve it now.
    """

    is_declared: bool
    replicas: int
    dead_letters: int = 0
    has_marker: bool = False
    missing_rights: Sequence[MissingRight] = ()
    other_arguments: Sequence[OtherArguments] = ()


@dataclass(slots=True)
class RedisFacts:
    """What is known of one Redis, and which settings name it."""

    url: str
    settings: tuple[str, ...]
    facts: CacheFacts
    clock: ClockOffset


@dataclass(slots=True)
class Facts:
    """All facts, and a finding for each server that did not answer.

    Attributes:
        broker: by agent: configured agents, agents with tasks, and peers that tasks wait for.
            `None` if the broker could not be read, or lives in the process.
    """

    settings: Settings
    releases: Sequence[Release]
    databases: dict[str, DatabaseFacts] = field(default_factory=dict)
    broker: dict[AgentName, BrokerAgentFacts] | None = None
    redis: list[RedisFacts] = field(default_factory=list)
    failures: list[Finding] = field(default_factory=list)

    def tasks(self, release: Release) -> AgentTasks:
        """The tasks of an agent, as far as its database could be read."""
        urls = [release.settings.session_db_url] if release.settings.has_database else []
        for url in urls or self.databases:
            if url in self.databases and release.name in self.databases[url].tasks:
                return self.databases[url].tasks[release.name]
        return AgentTasks()

    def knows_tasks(self, release: Release) -> bool:
        """Whether an agent's tasks could be read, in its database or in any database of `--db`."""
        urls = [release.settings.session_db_url] if release.settings.has_database else []
        found = [self.databases[url] for url in urls or self.databases if url in self.databases]
        return any(database.schema is not None for database in found)

    def registered(self, agent: AgentName) -> list[RegisteredReplica]:
        """The replicas of `agent` that have registered in a database."""
        return [
            each
            for database in self.databases.values()
            for each in database.replicas
            if each.agent == agent
        ]

    def replicas(self, agent: AgentName) -> int | None:
        """Number of replicas that serve `agent` now, or `None` if unknown."""
        found = None if self.broker is None else self.broker.get(agent)
        return None if found is None else found.replicas


def load_release(settings: AgentSettings) -> Release:
    """Import the code of an agent.

    Raises:
        ConfigurationError: as for `meshpoint run`.
    """
    agent = wiring.load_configured(settings)
    return Release(
        settings,
        readable_formats(agent),
        agent.state_format,
        settings.app_version or source_version(list_versions(agent)),
        code_version(list_versions(agent), settings.app_version),
    )


class FactReader:
    """Reads the facts of a configuration. A server that fails hides no other.

    Args:
        settings: The configuration.
        releases: The code of its agents.
        timeout: Limit for each request.
        others: Further databases whose tasks to count.
        clock: The host's clock.
        on_step: See `OnStep`.
    """

    def __init__(
        self,
        settings: Settings,
        releases: Sequence[Release],
        *,
        timeout: timedelta,
        others: Sequence[StoreSettings],
        clock: Clock,
        on_step: OnStep,
    ) -> None:
        self._facts = Facts(settings, releases)
        self._timeout, self._others, self._clock = timeout, others, clock
        self._on_step = on_step

    async def read(self) -> Facts:
        """Read all servers at the same time, so that dead ones share one time limit.

        Only the queues wait for the databases, whose tasks name agents to look for at the broker.
        """
        configured = stores_of_agents(each.settings for each in self._facts.releases)
        stores = {each.url: each for each in configured}
        stores |= {each.url: each for each in self._others}
        self._facts.databases = {url: DatabaseFacts(redact_url(url)) for url in stores}
        async with asyncio.TaskGroup() as servers:
            databases = [
                servers.create_task(self._read_database(store)) for store in stores.values()
            ]
            broker = servers.create_task(self._read_broker(databases))
            caches = [
                servers.create_task(self._read_redis(url, names))
                for url, names in self._redis_urls().items()
            ]
        for read in (*databases, broker, *caches):
            match read.result():
                case Finding() as failure:
                    self._facts.failures.append(failure)
                case RedisFacts() as facts:
                    self._facts.redis.append(facts)
        return self._facts

    async def _read_database(self, store: StoreSettings) -> Finding | None:
        facts = self._facts.databases[store.url]

        async def read() -> None:
            inspection = wiring.inspect_database(
                store, self._facts.settings.mesh.namespace, self._timeout
            )
            async with self._opened(inspection, f"the database {facts.url}"):
                facts.schema = await self._limit(inspection.schema())
                facts.clock = await self._measure(inspection.now)
                facts.problem = await self._limit(inspection.problem())
                facts.is_full = await self._limit(inspection.is_disk_full())
                facts.replicas = await self._limit(inspection.replicas())
                for agent in await self._limit(inspection.agents()):
                    self._on_step(f"the tasks of {agent}")
                    facts.tasks[agent] = await self._limit(inspection.tasks(agent))

        return await self._attempt(read(), "database", facts.url, "session_db_url")

    async def _read_broker(self, databases: Sequence[Awaitable[object]]) -> Finding | None:
        """Connect, and look for agents once `databases` have been read."""
        mesh = self._facts.settings.mesh
        shown = redact_url(mesh.broker_url)

        async def read() -> None:
            inspection = wiring.inspect_broker(mesh, self._timeout)
            if inspection is None:
                return
            async with self._opened(inspection, f"the broker {shown}"):
                await asyncio.gather(*databases)
                shards = {each.name: each.settings.request_shards for each in self._facts.releases}
                self._facts.broker = {
                    agent: await self._read_queues(inspection, agent, shards.get(agent))
                    for agent in self._all_agents()
                }

        return await self._attempt(read(), "broker", shown, "mesh.broker_url")

    async def _read_queues(
        self, inspection: BrokerInspection, agent: AgentName, shards: int | None
    ) -> BrokerAgentFacts:
        """Read what is known of an agent. `shards` is `None` if it is not configured here."""
        self._on_step(f"the queues of {agent}")

        async def look(address: Address) -> QueueFacts | None:
            return await self._limit(inspection.queue(address))

        dead_letters = await look(dead_letter_queue(agent))
        facts = BrokerAgentFacts(
            is_declared=await look(request_queue(agent)) is not None,
            replicas=await self._limit(inspection.replicas(agent)),
            dead_letters=0 if dead_letters is None else dead_letters.messages,
            has_marker=await self._limit(inspection.has_database_marker(agent)),
        )
        if shards is not None:
            facts.missing_rights = await self._limit(inspection.missing_rights(agent, shards))
            facts.other_arguments = await self._limit(inspection.other_arguments(agent, shards))
        return facts

    async def _read_redis(self, url: str, names: Sequence[str]) -> RedisFacts | Finding:
        shown, key = redact_url(url), f"agent.{names[0]}"

        async def read() -> RedisFacts:
            self._on_step(f"Redis {shown}")
            inspection = wiring.inspect_redis(
                url, key, self._facts.settings.mesh.namespace, self._timeout
            )
            try:
                sent = self._clock.now()
                facts = await self._limit(inspection.read())
                offset = _offset(facts.now, sent, self._clock.now())
                return RedisFacts(shown, tuple(names), facts, offset)
            finally:
                await self._limit(inspection.close())

        return await self._attempt(read(), "redis", shown, key)

    def _redis_urls(self) -> Mapping[str, list[str]]:
        """The keys of the configuration that name each Redis."""
        found: dict[str, list[str]] = {}
        for release in self._facts.releases:
            for key in ("memory_url", "memory_snapshot_url", "checkpoint_cache_url"):
                url = getattr(release.settings, key)
                if url is not None and key not in found.setdefault(url, []):
                    found[url].append(key)
        return found

    def _all_agents(self) -> list[AgentName]:
        """Configured agents, agents with tasks, and the peers that tasks wait for."""
        names = [release.name for release in self._facts.releases]
        for database in self._facts.databases.values():
            for agent, tasks in database.tasks.items():
                if tasks.count:
                    names += [agent, *(peer for peer, _ in tasks.waits)]
        return list(dict.fromkeys(names))

    @asynccontextmanager
    async def _opened(
        self, inspection: DatabaseInspection | BrokerInspection, what: str
    ) -> AsyncIterator[None]:
        self._on_step(what)
        try:
            await self._limit(inspection.open())
            yield
        finally:
            await self._limit(inspection.close())

    async def _attempt(
        self, read: Awaitable[_T], server: str, shown: str, key: str
    ) -> _T | Finding:
        """Return the failure of a server as a finding."""
        try:
            return await read
        except ConfigurationError as refusal:
            return refused(f"{server}.refused", shown, refusal)
        except (Unavailable, TimeoutError) as failure:
            reason = str(failure).removeprefix(f"Redis, {key}: ").rstrip(".")
            reason = reason or f"no answer within {self._timeout.total_seconds():g} s"
            problem = f"{_NAMES[server]} does not answer: {reason}"
            fix = f"check that it is running and that {key} is correct"
            return unavailable(f"{server}.unavailable", shown, problem, fix)

    async def _limit(self, step: Awaitable[_T]) -> _T:
        async with asyncio.timeout(self._timeout.total_seconds()):
            return await step

    async def _measure(self, read: Callable[[], Awaitable[datetime | None]]) -> ClockOffset | None:
        sent = self._clock.now()
        now = await self._limit(read())
        return None if now is None else _offset(now, sent, self._clock.now())


def _offset(now: datetime, sent: datetime, received: datetime) -> ClockOffset:
    error = (received - sent) / 2
    return ClockOffset(now.astimezone(UTC) - (sent + error), error)
