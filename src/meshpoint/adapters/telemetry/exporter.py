"""Reads the servers of a mesh from time to time, and shows the last values to Prometheus.

A scrape reads no server, so it costs nothing and works while a server is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from meshpoint.adapters.telemetry.mesh_metrics import (
    MESH_METRICS,
    QUEUE_MESSAGES,
    READ_AT,
    READ_DURATION,
    SERVER_UP,
    Sample,
    describe_database,
    merge,
)
from meshpoint.adapters.telemetry.metrics import Metric
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import (
    Address,
    dead_letter_queue,
    nested_queue,
    request_shard,
    response_queue,
)
from meshpoint.ports.clock import Clock, OutageTracker
from meshpoint.ports.gauges import DatabaseGaugeReader
from meshpoint.ports.inspection import BrokerInspection

log = logging.getLogger("meshpoint.telemetry")

_REST_FACTOR = 20
"""After a reading that took a second, the server rests for at least this many seconds."""
_CLOSE_TIMEOUT = 5.0


class Source(Protocol):
    """A server to read. `role` and `server` are the labels of its own state."""

    role: str
    server: str

    async def read(self) -> list[Sample]:
        """Read it.

        Raises:
            Unavailable: It does not answer.
            ConfigurationError: It refuses the login or the URL.
        """

    async def close(self) -> None:
        """Disconnect."""


class DatabaseSource:
    """The tasks in a database."""

    role = "database"

    def __init__(self, server: str, reader: DatabaseGaugeReader, clock: Clock) -> None:
        self.server, self._reader, self._clock = server, reader, clock

    async def read(self) -> list[Sample]:
        """Read everything in one transaction."""
        return describe_database(self.server, await self._reader.read(), self._clock.now())

    async def close(self) -> None:
        """Disconnect."""
        await self._reader.close()


class QueueSource:
    """The queues of agents at the broker.

    Args:
        server: The label of the broker.
        inspect: Creates an inspection, not yet open.
        shards: The number of request queues of each agent.
    """

    role = "broker"

    def __init__(
        self, server: str, inspect: Callable[[], BrokerInspection], shards: Mapping[AgentName, int]
    ) -> None:
        self.server, self._inspect, self._shards = server, inspect, shards
        self._inspection: BrokerInspection | None = None

    async def read(self) -> list[Sample]:
        """Read the depth of each queue that exists."""
        try:
            if self._inspection is None:
                self._inspection = self._inspect()
                await self._inspection.open()
            return [each async for each in self._read(self._inspection)]
        except BaseException:  # also a cancellation: the connection may be in any state
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect."""
        inspection, self._inspection = self._inspection, None
        if inspection is not None:
            await inspection.close()

    async def _read(self, inspection: BrokerInspection) -> AsyncIterator[Sample]:
        for agent, shards in self._shards.items():
            for queue, address in _list_queues(agent, shards):
                found = await inspection.queue(address)
                if found is not None:
                    yield QUEUE_MESSAGES, (agent, queue), float(found.messages)


def _list_queues(agent: AgentName, shards: int) -> Iterator[tuple[str, Address]]:
    """The queues of an agent, with the label of each. All request queues have the same."""
    for number in range(shards):
        yield "requests", request_shard(agent, number)
    yield "nested", nested_queue(agent)
    yield "responses", response_queue(agent)
    yield "dead_letters", dead_letter_queue(agent)


class Exporter:
    """Follows `sources`, and renders their last values.

    Args:
        sources: The servers.
        interval: Time from the end of a reading to the next one. It is longer for a server that
            answers slowly, so that reading it never takes more than a twentieth of the time.
        timeout: Limit for one reading.
        clock: This host's clock.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        interval: timedelta,
        timeout: timedelta,
        clock: Clock,
    ) -> None:
        self._interval, self._timeout, self._clock = interval, timeout, clock
        self._values: dict[Source, list[Sample]] = {}
        self._states: dict[Source, dict[Metric, float]] = {}
        self._outages = {source: OutageTracker(clock.monotonic) for source in sources}
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(self._collect))

    async def run(self) -> None:
        """Read every source until cancelled, then disconnect."""
        try:
            async with asyncio.TaskGroup() as following:
                for source in self._outages:
                    following.create_task(self._follow(source))
        finally:
            closing = asyncio.gather(
                *(source.close() for source in self._outages), return_exceptions=True
            )
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT)

    def render(self) -> bytes:
        """All last values, in Prometheus's text format."""
        return generate_latest(self._registry)

    def find_problem(self) -> str | None:
        """Which server has not been asked yet; `None` once there are values or outages to show."""
        unread = [each.server for each in self._outages if each not in self._states]
        return f"reading {', '.join(unread)}" if unread else None

    async def _follow(self, source: Source) -> None:
        while True:
            duration = await self.read(source)
            await self._clock.sleep(max(self._interval, _REST_FACTOR * duration))

    async def read(self, source: Source) -> timedelta:
        """Read one source, and return the time taken. An outage keeps its last values."""
        started_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                values = await source.read()
        except (Unavailable, ConfigurationError, TimeoutError) as error:
            is_up = False
            self._report_outage(source, error)
        else:
            is_up, self._values[source] = True, values
            self._report_recovery(source)
        seconds = self._clock.monotonic() - started_at
        state = self._states.setdefault(source, {})
        state |= {SERVER_UP: float(is_up), READ_DURATION: seconds}
        if is_up:
            state[READ_AT] = self._clock.now().timestamp()
        return timedelta(seconds=seconds)

    def _report_outage(self, source: Source, error: Exception) -> None:
        if (seconds := self._outages[source].record_failure()) is not None:
            reason = str(error) or "no answer in time"
            log.warning(
                "%s %s: not read for %.0f s: %s", source.role, source.server, seconds, reason
            )

    def _report_recovery(self, source: Source) -> None:
        seconds, was_reported = self._outages[source].record_success()
        if was_reported:
            log.warning("%s %s: read again after %.0f s", source.role, source.server, seconds)

    def _collect(self) -> Iterable[Sample]:
        for samples in self._values.values():
            yield from samples
        for source, state in self._states.items():
            for metric, value in state.items():
                yield metric, (source.role, source.server), value


class _Gauges(Collector):
    """The families of `MESH_METRICS`."""

    def __init__(self, collect: Callable[[], Iterable[Sample]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Family]:
        values: Mapping[Metric, Mapping[tuple[str, ...], float]] = merge(self._collect())
        for metric in MESH_METRICS:
            family = GaugeMetricFamily(metric.name, metric.description, labels=metric.labels)
            for labels, value in values.get(metric, {}).items():
                family.add_metric(labels, value)
            yield family
