"""How long memories live in L1."""

from __future__ import annotations

from meshpoint.errors import MemoryFenced, MemoryUnavailable
from meshpoint.model.memory import Owner
from meshpoint.ports.working_memory import ReportProblem, WorkingMemory


class L1TTLManager:
    """Gives the memory of a task that waits more time: by default two weeks, where one at work has a day.

    A memory that runs out of its time is found in its snapshot, so a switch that failed is told and nothing more.
    """

    def __init__(self, l1: WorkingMemory, report_problem: ReportProblem) -> None:
        self._l1, self._report_problem = l1, report_problem

    async def extend_ttl_on_pause(self, owner: Owner) -> None:
        """Let a memory live as long as that of a paused task. (It is at work again once a segment adopts it.)"""
        try:
            await self._l1.retain(owner, paused=True)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._report_problem(owner.agent_id, "not_retained", str(error))
