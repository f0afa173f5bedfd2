"""How long memories live in L1."""

from __future__ import annotations

from meshpoint.errors import MemoryFenced, MemoryUnavailable
from meshpoint.model.memory import Owner
from meshpoint.ports.working_memory import Tell, WorkingMemory


class L1TTLManager:
    """Gives the memory of a task that waits more time: by default two weeks, where one at work has a day.

    A memory that runs out of its time is found in its snapshot, so a switch that failed is told and nothing more.
    """

    def __init__(self, l1: WorkingMemory, tell: Tell) -> None:
        self._l1, self._tell = l1, tell

    async def extend_on_pause(self, owner: Owner) -> None:
        """Let a memory live as long as that of a paused task. (It is at work again once a segment adopts it.)"""
        try:
            await self._l1.retain(owner, paused=True)
        except (MemoryUnavailable, MemoryFenced) as error:
            self._tell(owner.agent_id, "not_retained", str(error))
