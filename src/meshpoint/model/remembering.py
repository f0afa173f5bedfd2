"""`ctx.memory`: the part of a context that provides the working memory in `agent_memory`."""

from __future__ import annotations

from collections.abc import Sequence

from meshpoint.errors import AgentMisbehaved
from meshpoint.model.agent_memory import AgentMemory, MemoryRecovery, MemoryRunner
from meshpoint.model.memory import Answer, Command


class Remembering:
    """The part of a context that has a working memory."""

    _memory: MemoryRunner | None

    def remember_with(self, runner: MemoryRunner | None) -> None:
        """Use `runner` for this context's working memory, or none. Called by the agent runtime."""
        self._memory = runner

    @property
    def memory(self) -> AgentMemory:
        """The agent's working memory for this task, available wherever the task resumes.

        It is restored on first use in a segment, so an agent that does not use it pays nothing.
        """
        return AgentMemory(_OfContext(self))


class _OfContext:
    """Delegates to the context's current runner, which is gone once the segment ends."""

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
                "ctx.memory works only in a running segment: this one has ended, or no replica "
                "created this context; in a test, call the agent through meshpoint.local.local_mesh"
            )
        return self._context._memory
