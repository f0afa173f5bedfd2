"""Append the records of a segment's steps to its task's log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.task_log import StepEntry, TaskLog
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.events import Step
from meshpoint.model.tasks import MAX_ROW_BYTES, Run
from meshpoint.model.transitions import Append, Fenced, LogChange, SaveResult
from meshpoint.subtasks.runner import AWAIT_HINT

_RESERVED_BYTES = 1024 * 1024
"""Bytes of a log that only records of failed steps may use."""


class _LoggedSegment(Protocol):
    log: TaskLog

    @property
    def run(self) -> Run: ...
    @property
    def backend(self) -> Backend | None: ...
    @property
    def stop_reason(self) -> object: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A record to write. `written` gets the result."""

    step: str
    entry: StepEntry
    written: asyncio.Future[SaveResult]


class SegmentStepLog:
    """The `StepLog` of one segment.

    Steps that end while an append is being written share the next one. An append continues if the
    waiting code is stopped, because the next pause must know what the log contains.

    Args:
        segment: The segment. Its `log` follows each append.
        runtime: The replica.
        attempt: The operation's `retry_count`.
        ensure_row: Writes the task's row, or stops the code.
        stop_unless_owned: Stops the code if a write was refused.

    Attributes:
        has_ended: Set when the code has ended: what is cancelled from then on is not recorded.
    """

    def __init__(
        self,
        segment: _LoggedSegment,
        runtime: ReplicaRuntime,
        attempt: int,
        ensure_row: Callable[[], Awaitable[None]],
        stop_unless_owned: Callable[[SaveResult], None],
    ) -> None:
        self._segment, self._runtime, self._attempt = segment, runtime, attempt
        self._ensure_row, self._stop_unless_owned = ensure_row, stop_unless_owned
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self._count = 0
        self.has_ended = False

    @property
    def is_stopping(self) -> bool:
        """Whether the segment is being stopped from outside, or its code has ended."""
        return self.has_ended or self._segment.stop_reason is not None

    @property
    def free_bytes(self) -> int:
        """How many more bytes the log can have. Some are reserved for failures."""
        waiting = sum(len(each.entry.record) for each in self._waiting)
        return MAX_ROW_BYTES - _RESERVED_BYTES - self._segment.log.size - waiting

    async def ensure_row(self) -> None:
        """Write the task as running, if it has no row yet; see `StepLog`."""
        self._require_running()
        await self._ensure_row()

    def add(self, step: str, record: bytes) -> asyncio.Future[SaveResult]:
        """Append the record of `step`; see `StepLog`."""
        written: asyncio.Future[SaveResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(step, StepEntry(self._attempt, record), written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return written

    async def append(self, step: str, record: bytes) -> None:
        """Append a record and wait until it is durable; see `StepLog`."""
        self._require_running()
        size = self._segment.log.size + len(record)
        if size > MAX_ROW_BYTES:
            raise AgentMisbehaved(
                f"the task's log has {size} bytes; a task keeps {MAX_ROW_BYTES} at most"
            )
        self._stop_unless_owned(await self.add(step, record))

    def _require_running(self) -> None:
        if self.has_ended:  # a pause must know the whole log
            raise AgentMisbehaved(
                f"an asyncio task that outlived its segment used steps: {AWAIT_HINT}"
            )

    async def flush(self) -> None:
        """Wait until all records are durable, or refused because the run has lost its task."""
        while self._writing is not None:
            await asyncio.wait({self._writing})

    async def drop(self) -> None:
        """Take back what this segment has recorded: its code does not fit the task's records."""
        await self.flush()
        if self._count:
            await self._write(self._segment.log.drop_steps(self._count))

    async def close(self) -> None:
        """Stop writing."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_all(self) -> None:
        batch: list[_Waiting] = []
        try:
            await self._ensure_row()  # a step may be cancelled while it waits for the row
            while self._waiting:
                batch, self._waiting = self._waiting, []
                result = await self._write_batch(batch)
                for each in batch:
                    if not each.written.done():
                        each.written.set_result(result)
        except BaseException as error:
            for each in (*batch, *self._waiting):
                if isinstance(error, asyncio.CancelledError):
                    each.written.cancel()
                elif not each.written.done():
                    each.written.set_exception(error)
            self._waiting = []
            if not isinstance(error, Exception):
                raise
        finally:
            self._writing = None

    async def _write_batch(self, batch: Sequence[_Waiting]) -> SaveResult:
        records = [each.entry for each in batch]
        change = self._segment.log.append(records)
        result = await self._write(change, [each.step for each in batch])
        if not isinstance(result, Fenced):
            self._segment.log = self._segment.log.with_steps(change, records)
            self._count += len(records)
        return result

    async def _write(self, change: LogChange, steps: Sequence[str] = ()) -> SaveResult:
        segment, store = self._segment, (self._segment.backend or self._runtime.in_process).store
        command = Append(segment.run, change)
        with self._runtime.steps.step(Step.RECORD, [segment.run.task_id], recorded=[*steps]):
            (result,) = await self._runtime.retry.until_available(lambda: store.append([command]))
        return result
