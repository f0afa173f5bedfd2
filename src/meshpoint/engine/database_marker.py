"""Keep replicas with and without a database apart.

A replica without one cannot see the tasks in the database: it would drop their responses and run
their requests again. So replicas with a database set a marker at the broker, and a replica without
one refuses to start while the marker is set.

If both start at once, the replica without a database finds the marker later, and stops before it
handles a message for a task in the database. Its peers reply to its private queue, so its own
tasks receive only cancels on the shared queue. Therefore it checks the marker before each batch
from the shared queue with any other message, and whenever another replica wakes it, which only
replicas with a database do. A check that finds no marker says nothing about the next message, so
it is not remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

from meshpoint.engine.live_tasks import LiveTasks
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.envelopes import wake_message
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import MessageType
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.database_marker")

_CHECK_INTERVAL = timedelta(minutes=5)
"""RabbitMQ logs an error for each check that finds no marker."""


class DatabaseMarker:
    """Sets the marker, or checks that it is not set.

    Attributes:
        refusal: Why this replica may not serve, once it has found the marker.
    """

    def __init__(self, runtime: ReplicaRuntime, tasks: LiveTasks) -> None:
        self._runtime, self._tasks = runtime, tasks
        self.refusal: ConfigurationError | None = None

    async def check_in(self) -> None:
        """Set the marker, or check that it is not set.

        Raises:
            ConfigurationError: Other replicas have a database, and this one does not.
        """
        runtime = self._runtime
        if runtime.database is None:
            if await runtime.broker.has_database_marker(runtime.agent):
                raise self._build_refusal()
        elif await runtime.broker.mark_database(runtime.agent):
            await self._wake_others()

    async def is_found(self) -> bool:
        """Whether other replicas have a database, which this one lacks."""
        return await self._runtime.retry.until_available(self._find)

    async def is_found_after(self, deliveries: Sequence[Delivery], *, shared: bool) -> bool:
        """Like `is_found`, but checks only if `deliveries` may come from such a replica."""
        for each in deliveries:
            is_own = each.message.type is MessageType.CANCEL and self._tasks.is_here(
                TaskId(each.message.correlation_id)
            )
            if each.message.type is MessageType.WAKE or (shared and not is_own):
                return await self.is_found()
        return False

    async def watch(self) -> None:
        """Check periodically, until the marker is found."""
        while not await self.is_found():
            await self._runtime.clock.sleep(_CHECK_INTERVAL)

    async def _find(self) -> bool:
        if self.refusal is None and await self._runtime.broker.has_database_marker(
            self._runtime.agent
        ):
            self.refusal = self._build_refusal()
            log.error("agent %s: stops serving: %s", self._runtime.agent, self.refusal)
        return self.refusal is not None

    async def _wake_others(self) -> None:
        """Let replicas that have just started without a database notice the marker now."""
        agent = self._runtime.agent
        try:
            await self._runtime.broker.broadcast(agent, wake_message(agent))
        except Unavailable as error:
            self._runtime.retry.record_outage(error)

    def _build_refusal(self) -> ConfigurationError:
        agent = self._runtime.agent
        return ConfigurationError(
            "agent.session_service",
            f"other replicas of {agent!r} store their tasks in a database, "
            "which this replica would not see",
            "use session_service: sql with their session_db_url; if no task is left there, stop "
            f"those replicas and run: meshpoint doctor CONFIG --db URL --remove-marker {agent}",
        )
