"""Decide how long a call waits for its peer's queue.

Agents may be deployed in any order: a call to a peer that never had a replica stays due in the
outbox until `undeliverable_after` has passed since the broker first returned it. The call's row
stores that instant, so it survives this replica. After an outage of the broker the time starts
over, because the peer's replicas could not declare their queue during the outage. An outage that
no replica survived is found by its effect: the next attempt comes too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.errors import Unavailable
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import is_agent_name
from meshpoint.model.tasks import Dispatch
from meshpoint.model.transitions import UnroutableCall

_MIN_RETRY_DELAY, _MAX_RETRY_DELAY = timedelta(seconds=1), timedelta(seconds=10)
"""The first and the longest delay before a returned request is sent again."""
_REPORT_INTERVAL = 60.0
"""Minimum seconds between two `peer_missing` events for one peer."""
_MAX_REPORTED_PEERS = 1_000
"""Maximum peers reported within one interval, since agent code chooses their names."""


class UnroutableCalls:
    """Calls whose peers have no queue yet."""

    def __init__(self, runtime: ReplicaRuntime) -> None:
        self._runtime = runtime
        self._limit = runtime.options.undeliverable_after
        self._reported_at: dict[AgentName, float] = {}  # oldest first

    def is_overdue(self, call: Dispatch) -> bool:
        """Whether the call is undeliverable if the broker returns it now.

        A peer with an invalid name can never start, so a call to it does not wait.
        """
        waited = self._waited(call) or timedelta()
        return waited >= self._limit or not is_agent_name(call.peer)

    async def keep_due(self, backend: Backend, calls: Sequence[Dispatch]) -> None:
        """Keep returned requests due in their backend, which sends them again with a back-off."""
        if not calls:
            return
        try:
            await backend.store.record_unroutable([self._plan_retry(call) for call in calls])
        except Unavailable as error:  # the time then starts when the broker returns it again
            self._runtime.retry.record_outage(error)
        self._report_missing(calls)

    def _plan_retry(self, call: Dispatch) -> UnroutableCall:
        waited = self._waited(call)
        so_far = waited or timedelta()
        delay = min(so_far + _MIN_RETRY_DELAY, _MAX_RETRY_DELAY, self._limit - so_far)
        return UnroutableCall(
            call.task_id, call.generation, call.sub_task_id, waited is None, delay
        )

    def _waited(self, call: Dispatch) -> timedelta | None:
        """Time since the broker first returned it; `None` if never since its last outage."""
        waited = call.unroutable_for
        if waited is None or waited.total_seconds() > self._runtime.retry.broker_uptime:
            return None
        return waited

    def _report_missing(self, calls: Sequence[Dispatch]) -> None:
        task_ids_by_peer: dict[AgentName, list[TaskId]] = {}
        for call in calls:
            if call.unroutable_for is None:
                task_ids_by_peer.setdefault(call.peer, []).append(call.task_id)
        for peer, task_ids in task_ids_by_peer.items():
            if self._may_report(peer):
                self._runtime.steps.emit(
                    Step.PEER_MISSING, *task_ids, peer=peer, seconds=self._limit.total_seconds()
                )

    def _may_report(self, peer: AgentName) -> bool:
        """Whether this replica has not reported `peer` within the last interval. Records it."""
        now, reported_at = self._runtime.clock.monotonic(), self._reported_at
        while reported_at and now - next(iter(reported_at.values())) >= _REPORT_INTERVAL:
            del reported_at[next(iter(reported_at))]
        if peer in reported_at or len(reported_at) >= _MAX_REPORTED_PEERS:
            return False
        reported_at[peer] = now
        return True
