"""`ctx.memory`: the part of a context that remembers. `agent_memory` has what it can do."""

from __future__ import annotations

from collections.abc import Sequence

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.agent_memory import AgentMemory, MemoryRecovery, MemoryRunner
from meshpoint.model.memory import Answer, Command


class Remembering:
    """The part of a context that has a working memory."""

    _memory: MemoryRunner | None

    def remember_with(self, runner: MemoryRunner | None) -> None:
        """Keep this context's working memory with `runner`, or stop that. For the code that runs agents."""
        self._memory = runner

    @property
    def memory(self) -> AgentMemory:
        """The agent's working memory for this task, found again wherever the task goes on.

        It is restored when it is first used in a segment; an agent that does not use it pays nothing.
        """
        return AgentMemory(_OfContext(self))


class _OfContext:
    """The runner that the context has at the moment: when its segment is over, none."""

    def __init__(self, context: Remembering) -> None:
        self._context = context

    @property
    def recovery(self) -> MemoryRecovery | None:
        return None if self._context._memory is None else self._context._memory.recovery

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        return await self._runner.execute(commands)

    async def keys(self) -> list[str]:
        return await self._runner.keys()

    async def clear(self) -> None:
        await self._runner.clear()

    @property
    def _runner(self) -> MemoryRunner:
        if self._context._memory is None:
            raise AgentMisbehaved(
                "ctx.memory belongs to a running segment: this one is over, or no replica runs this context; "
                "in a test, ask the agent by meshpoint.local.local_mesh"
            )
        return self._context._memory
