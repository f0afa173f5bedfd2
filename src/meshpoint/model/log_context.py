"""The task in whose code a log record was written, and whether that code is being replayed."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.ids import AgentName, TaskId

NO_TASK = "-"
"""The value of a record's attributes outside agent code."""


@dataclass(frozen=True, slots=True)
class LogContext:
    """The segment that code runs for. The code's asyncio tasks and threads inherit it."""

    task_id: TaskId
    agent: AgentName
    generation: int
    runtime: ContextRuntime

    @property
    def is_replaying(self) -> bool:
        """Whether an earlier run has already written what the code logs now."""
        recorder = self.runtime.recorder
        return recorder is not None and recorder.replaying


current_log_context: ContextVar[LogContext | None] = ContextVar(
    "meshpoint_log_context", default=None
)


class LogContextFilter(logging.Filter):
    """Adds `task_id`, `agent` and `generation` to log records, and drops replayed ones.

        handler.addFilter(meshpoint.LogContextFilter())
        handler.setFormatter(logging.Formatter("%(task_id)s %(levelname)s %(message)s"))

    Outside agent code the attributes are "-". Values that `extra=` has set are kept. Asyncio tasks
    that agent code starts, and `asyncio.to_thread`, inherit its task; other threads need
    `contextvars.copy_context().run`.

    A function agent runs again from the top after each pause. Records that its code writes before
    it reaches the last recorded call are dropped. Meshpoint's own records are kept.

    Add the filter to handlers: a logger's filters do not see the records of its child loggers.

    Args:
        drop_replayed: Drop the records of replayed code.
    """

    def __init__(self, *, drop_replayed: bool = True) -> None:
        super().__init__()
        self._drop_replayed = drop_replayed

    def filter(self, record: logging.LogRecord) -> bool:
        """Return `False` for a record of replayed code. Adds the attributes to any other."""
        current = current_log_context.get()
        if current is None:
            values: tuple[object, ...] = (NO_TASK, NO_TASK, NO_TASK)
        else:
            values = (current.task_id, current.agent, current.generation)
        for name, value in zip(("task_id", "agent", "generation"), values, strict=True):
            record.__dict__.setdefault(name, value)
        if current is None or not self._drop_replayed or not current.is_replaying:
            return True
        return record.name.partition(".")[0] == "meshpoint"
