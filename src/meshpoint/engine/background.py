"""The asyncio tasks of one worker. A defect in a task is logged and ends only that task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec

from meshpoint.engine.containment import is_user_interrupt
from meshpoint.engine.retry import Retry
from meshpoint.errors import Unavailable
from meshpoint.model.error_text import describe_exception
from meshpoint.model.events import Step
from meshpoint.ports.observer import Steps

log = logging.getLogger("meshpoint.engine")

_P = ParamSpec("_P")

_QUIET_SECONDS = 60.0
"""Seconds during which a repeated defect is counted instead of logged."""
_MAX_KNOWN_DEFECTS = 1_000
_CLEANUP_SECONDS = 0.5
"""Seconds of the time limit reserved for cancellation."""


class BackgroundTasks:
    """Starts tasks and ends them within a time limit.

    Unexpected exceptions are logged with their traceback and emitted as an event, each kind at
    most once a minute.
    """

    def __init__(self, retry: Retry, steps: Steps) -> None:
        self._retry, self._steps = retry, steps
        self._tasks: set[asyncio.Task[None]] = set()
        self._reports_by_kind: dict[tuple[str, str], tuple[float, int]] = {}

    def report_defect(self, where: str, error: BaseException) -> None:
        """Report an unexpected failure in `where`."""
        key, now = (where, type(error).__qualname__), asyncio.get_running_loop().time()
        reported_at, suppressed_count = self._reports_by_kind.get(key, (now - _QUIET_SECONDS, 0))
        if now - reported_at < _QUIET_SECONDS:
            self._reports_by_kind[key] = reported_at, suppressed_count + 1
            return
        if len(self._reports_by_kind) >= _MAX_KNOWN_DEFECTS:
            self._reports_by_kind.clear()
        self._reports_by_kind[key] = now, 0
        description = describe_exception(error)
        log.error(
            "%s failed: %s (%d more since it was last logged)",
            where,
            description,
            suppressed_count,
            exc_info=error,
        )
        self._steps.emit(Step.DEFECT, where=where, error=description, more=suppressed_count)

    def spawn(
        self, step: Callable[_P, Awaitable[None]], *args: _P.args, **kwargs: _P.kwargs
    ) -> asyncio.Task[None]:
        """Run `step` with its arguments in an asyncio task, and report any exception."""
        task = asyncio.create_task(self._run_guarded(step, *args, **kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_guarded(
        self, step: Callable[_P, Awaitable[None]], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        try:
            await step(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except Unavailable as error:
            self._retry.record_outage(error)
        except BaseException as error:
            if is_user_interrupt(error):
                raise
            self.report_defect(getattr(step, "__qualname__", "a step"), error)

    async def wait_all(self) -> None:
        """Wait until all tasks have ended, including those started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel_all(self, timeout: float) -> None:
        """Cancel all tasks. Abandon tasks that do not end within the given seconds."""
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=timeout)
            for task in unfinished:
                log.warning("drain: %s does not end and is abandoned", task.get_coro())


async def run_with_timeout(
    step: Coroutine[Any, Any, None], timeout: float, description: str
) -> None:
    """Await `step` for the given seconds.

    It is cancelled early enough to clean up, and abandoned if it does not end. A timeout or
    failure is logged as a warning.
    """
    task, cleanup_seconds = asyncio.ensure_future(step), min(timeout / 4, _CLEANUP_SECONDS)
    try:
        await asyncio.wait({task}, timeout=timeout - cleanup_seconds)
    finally:
        if not task.done():
            log.warning("%s did not end within %.3g s and is cancelled", description, timeout)
            task.cancel()
            await asyncio.wait({task}, timeout=cleanup_seconds)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s failed: %s", description, describe_exception(error))


async def wait_for_first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Wait until any of `coroutines` ends and cancel the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
