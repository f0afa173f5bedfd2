"""The asyncio tasks of one worker. A defect in a task is logged and ends only that task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from meshpoint.engine.containment import from_outside
from meshpoint.engine.retry import Patience
from meshpoint.errors import Unavailable
from meshpoint.model.error_text import described
from meshpoint.model.events import Step
from meshpoint.ports.observer import Steps

log = logging.getLogger("meshpoint.engine")

_QUIET = 60.0
"""Seconds during which a repeated defect is counted instead of logged."""
_MOST_KNOWN = 1_000
_CLEANING_UP = 0.5
"""Seconds of the time limit reserved for cancellation."""


class Defects:
    """Logs unexpected exceptions with their traceback and emits an event.

    Each kind is reported at most once a minute.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._known: dict[tuple[str, str], tuple[float, int]] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Report an unexpected failure in `where`."""
        key, now = (where, type(error).__qualname__), asyncio.get_running_loop().time()
        noted_at, since = self._known.get(key, (now - _QUIET, 0))
        if now - noted_at < _QUIET:
            self._known[key] = noted_at, since + 1
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = now, 0
        what = described(error)
        log.error("%s failed: %s (%d more since it was last logged)", where, what, since, exc_info=error)
        self._steps.note(Step.DEFECT, where=where, error=what, more=since)


class Crew:
    """Starts tasks and ends them within a time limit."""

    def __init__(self, defects: Defects, patience: Patience) -> None:
        self._defects, self._patience = defects, patience
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `step` and report any exception."""
        task = asyncio.create_task(self._guarded(step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task cancelled before its first step never awaits the coroutine.
        task.add_done_callback(lambda _: step.close())
        return task

    async def _guarded(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except asyncio.CancelledError:
            raise
        except Unavailable as error:
            self._patience.note_away(error)
        except BaseException as error:
            if from_outside(error):
                raise
            self._defects.note(getattr(step, "__qualname__", "a step"), error)

    async def done(self) -> None:
        """Wait until all tasks have ended, including those started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def end(self, within: float) -> None:
        """Cancel all tasks. Abandon tasks that do not end within the given seconds."""
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=within)
            for task in left:
                log.warning("drain: %s does not end and is abandoned", task.get_coro())


async def bounded(step: Coroutine[Any, Any, None], within: float, what: str) -> None:
    """Await `step` for the given seconds.

    It is cancelled early enough to clean up, and abandoned if it does not end. A timeout or
    failure is logged as a warning.
    """
    task, cleaning_up = asyncio.ensure_future(step), min(within / 4, _CLEANING_UP)
    try:
        await asyncio.wait({task}, timeout=within - cleaning_up)
    finally:
        if not task.done():
            log.warning("%s did not end within %.3g s and is cancelled", what, within)
            task.cancel()
            await asyncio.wait({task}, timeout=cleaning_up)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s failed: %s", what, described(error))
