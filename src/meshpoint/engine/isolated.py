"""Watch the process of an isolated segment and turn the way it ends into a value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from meshpoint.engine.running import Died, SegmentResult, Settled, Stopped
from meshpoint.engine.segment import Segment, Stop
from meshpoint.ports.isolation import Ending, Exit, IsolatedRun, Isolation, Word


class Impossible(Exception):
    """This segment cannot run in a separate process; no agent code has run yet."""


async def run_apart(
    segment: Segment, isolation: Isolation, release_within: float, on_started: Callable[[], None]
) -> SegmentResult:
    """Run `segment` in its own process.

    The process has `release_within` seconds to release the task when asked to.

    Raises:
        Impossible: the process cannot import the agent.
    """
    if segment.stopped is not None:
        return Stopped(segment.stopped)
    watch = _Watch(segment, isolation, release_within, on_started)
    watching = segment.code = asyncio.create_task(watch.run(), name=f"isolated {segment.run.task_id}")
    try:
        await asyncio.wait({watching})
    except asyncio.CancelledError:  # the process ends with the replica
        watch.replica_ends = True
        watching.cancel()
        raise
    finally:
        segment.code = None
    if watching.cancelled():
        return Stopped(segment.stopped or Stop.DRAINING)
    return watching.result()


@dataclass
class _Watch:
    """One isolated segment. Stopping it cancels this task, which then asks the process to stop."""

    segment: Segment
    isolation: Isolation
    release_within: float
    on_started: Callable[[], None]
    replica_ends: bool = False
    killed: bool = False
    kill_at: float | None = None  # on the event loop's clock

    async def run(self) -> SegmentResult:
        try:
            process = await self.isolation.start(self.segment.run, self.on_started)
        except OSError as error:
            return Died(f"could not be started: {error}", counted=False)
        ending = asyncio.ensure_future(process.exit())
        try:
            while not ending.done():
                await self._look(process, ending)
            return self._result(ending.result())
        finally:
            process.kill()
            ending.cancel()

    async def _look(self, process: IsolatedRun, ending: asyncio.Future[Exit]) -> None:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        left = None if self.kill_at is None else max(self.kill_at - loop.time(), 0)
        try:
            done, _ = await asyncio.wait({ending}, timeout=left)
        except asyncio.CancelledError:
            if self.replica_ends or self.segment.stopped is None:
                raise  # the process is killed even after an earlier request
            assert me is not None
            me.uncancel()
            self._stop(process, self.segment.stopped)
            return
        if not done:
            self.killed, self.kill_at = True, None
            process.kill()

    def _stop(self, process: IsolatedRun, why: Stop) -> None:
        match why:
            case Stop.CANCELLED:
                process.tell(Word.CANCEL)
            case Stop.DRAINING:
                process.tell(Word.DRAIN)
                self.kill_at = asyncio.get_running_loop().time() + self.release_within
            case Stop.LOST:
                self.killed = True
                process.kill()

    def _result(self, exit_: Exit) -> SegmentResult:
        stopped = self.segment.stopped
        match exit_.ending:
            case Ending.SETTLED:
                return Settled()
            case _ if stopped is Stop.CANCELLED or (stopped is not None and self.killed):
                return Stopped(stopped)
            case Ending.DIED:
                return Died(exit_.reason, counted=True)
            case Ending.UNSTARTED:
                return Died(exit_.reason, counted=False)
            case Ending.IMPOSSIBLE:
                raise Impossible(exit_.reason)
