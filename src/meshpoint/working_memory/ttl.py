"""Expiry of memories in L1."""

from __future__ import annotations

from meshpoint.errors import MemoryFenced, MemoryUnavailable
from meshpoint.model.memory import Owner
from meshpoint.ports.working_memory import ReportProblem, WorkingMemory


class L1TTLManager:
    """Extends the TTL of a paused task's memory: two weeks by default, instead of one day.

    An expired memory is restored from its snapshot, so a failure is only reported.
    """

    def __init__(self, l1: WorkingMemory, report_problem: ReportProblem) -> None:
        self._l1, self._report_problem = l1, report_problem

    async def extend_ttl_on_pause(self, owner: Owner) -> None:
        """Extend the TTL of a paused task's memory.

        The next segment sets the normal TTL again when it adopts the memory.
        """
        try:
            await self._l1.retain(owner, paused=True)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._report_problem(owner.agent_id, "not_retained", str(error))
