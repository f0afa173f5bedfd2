"""Watch the process of an isolated segment and turn the way it ends into a value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshpoint.engine.running import ProcessDied, SegmentResult, SettledElsewhere, Stopped
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment, StopReason
from meshpoint.model.error_text import quantity
from meshpoint.model.events import Step
from meshpoint.model.options import Options
from meshpoint.model.tasks import Resumable
from meshpoint.ports.isolation import Exit, ExitKind, IsolatedRun, Isolation, StopSignal

_RESCUES_PER_ATTEMPT = 10
"""Maximum rescues of a task that ends more than its own process."""


class IsolationImpossible(Exception):
    """This segment cannot run in a separate process; no agent code has run yet."""


def find_exhausted_reason(task: Resumable, options: Options) -> str | None:
    """Why a task that lost too many owners is not run again, or `None` if it may run."""
    if task.attempt > options.max_attempts:
        runs = quantity(task.attempt - 1, "time")
        reason = f"its segment ran {runs} and never finished"
        return f"{reason}; its last process {task.crash_reason}" if task.crash_reason else reason
    if task.rescues > _RESCUES_PER_ATTEMPT * options.max_attempts:
        return f"its replica was lost {task.rescues} times and no run of it finished"
    return None


async def run_isolated(
    segment: Segment, task: Resumable, isolation: Isolation, runtime: ReplicaRuntime
) -> SegmentResult:
    """Run a suspect in its own process, which has half of `release_timeout` to release it.

    Raises:
        IsolationImpossible: The process cannot import the agent.
    """
    segment.attempt = task.attempt
    runtime.steps.emit(Step.ISOLATED, task.run.task_id, attempt=task.attempt, rescues=task.rescues)
    if segment.stop_reason is not None:
        return Stopped(segment.stop_reason)
    watcher = _ProcessWatcher(
        segment,
        isolation,
        runtime.options.release_timeout.total_seconds() / 2,
        partial(runtime.stop_renewing, segment.run),
    )
    watch_task = segment.code = asyncio.create_task(
        watcher.run(), name=f"isolated {segment.run.task_id}"
    )
    try:
        await asyncio.wait({watch_task})
    except asyncio.CancelledError:  # the process ends with the replica
        watcher.is_replica_ending = True
        watch_task.cancel()
        raise
    finally:
        segment.code = None
    if watch_task.cancelled():
        return Stopped(segment.stop_reason or StopReason.DRAINING)
    return watch_task.result()


@dataclass
class _ProcessWatcher:
    """One isolated segment. Stopping it cancels this task, which then asks the process to stop."""

    segment: Segment
    isolation: Isolation
    release_timeout: float
    on_started: Callable[[], None]
    is_replica_ending: bool = False
    killed: bool = False
    kill_at: float | None = None  # on the event loop's clock

    async def run(self) -> SegmentResult:
        try:
            process = await self.isolation.start(self.segment.run, self.on_started)
        except OSError as error:
            return ProcessDied(f"could not be started: {error}", counted=False)
        exit_task = asyncio.ensure_future(process.wait())
        try:
            while not exit_task.done():
                await self._watch_once(process, exit_task)
            return self._result_from_exit(exit_task.result())
        finally:
            process.kill()
            exit_task.cancel()

    async def _watch_once(self, process: IsolatedRun, exit_task: asyncio.Future[Exit]) -> None:
        now = asyncio.get_running_loop().time()
        remaining = None if self.kill_at is None else max(self.kill_at - now, 0)
        try:
            done, _ = await asyncio.wait({exit_task}, timeout=remaining)
        except asyncio.CancelledError:
            if self.is_replica_ending or self.segment.stop_reason is None:
                raise  # the process is killed even after an earlier request
            if (this_task := asyncio.current_task()) is not None:
                this_task.uncancel()
            self._stop(process, self.segment.stop_reason)
            return
        if not done:
            self.killed, self.kill_at = True, None
            process.kill()

    def _stop(self, process: IsolatedRun, reason: StopReason) -> None:
        match reason:
            case StopReason.CANCELLED:
                process.signal(StopSignal.CANCEL)
            case StopReason.DRAINING:
                process.signal(StopSignal.DRAIN)
                self.kill_at = asyncio.get_running_loop().time() + self.release_timeout
            case StopReason.OVERDUE:
                pass  # the process ends the task itself; if it does not, it is killed
            case StopReason.LOST:
                self.killed = True
                process.kill()

    def _result_from_exit(self, exit_: Exit) -> SegmentResult:
        stop_reason = self.segment.stop_reason
        match exit_.kind:
            case ExitKind.SETTLED:
                return SettledElsewhere()
            case _ if stop_reason is StopReason.CANCELLED or (
                stop_reason is not None and self.killed
            ):
                return Stopped(stop_reason)
            case ExitKind.DIED:
                return ProcessDied(exit_.reason, counted=True)
            case ExitKind.NOT_STARTED:
                return ProcessDied(exit_.reason, counted=False)
            case ExitKind.IMPOSSIBLE:
                raise IsolationImpossible(exit_.reason)
