"""The context of the running agent code, for functions that do not receive it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from meshpoint.errors import AgentMisbehaved

if TYPE_CHECKING:
    from meshpoint.model.context import TaskExecutionContext

running_context: ContextVar[TaskExecutionContext | None] = ContextVar(
    "meshpoint_context", default=None
)
"""Set by the replica around agent code, and by function agents. Asyncio tasks inherit it."""


def current_context() -> TaskExecutionContext:
    """The context of the task whose agent code calls this, for example in a framework's tool.

    Asyncio tasks that agent code starts, and `asyncio.to_thread`, inherit it.

    Raises:
        AgentMisbehaved: No agent code is running here.
    """
    context = running_context.get()
    if context is None:
        raise AgentMisbehaved("current_context() works only in code that an agent runs")
    return context
