"""The subtasks of one segment: run once, recorded before their deliverable is returned, reused where it is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from inspect import isawaitable
from typing import Any, Protocol

from pydantic import JsonValue

from meshpoint.errors import AgentMisbehaved, SubtaskRefused
from meshpoint.model.checkpoint import Checkpoint, Run
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.json_values import check_json
from meshpoint.model.snapshot import change, changes, rewind, snapshot
from meshpoint.model.subtasking import current_subtask, inside
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Operation,
    SubtaskProgress,
    SubtaskRecord,
    SubtaskStatus,
    progress_of,
)
from meshpoint.model.typed import DoesNotFit
from meshpoint.ports.agent import Plan
from meshpoint.ports.observer import Steps
from meshpoint.subtasks.deliverable import Deliverable
from meshpoint.subtasks.failures import kept, made_again
from meshpoint.subtasks.inputs import difference, digests
from meshpoint.subtasks.names import MAX_NAME, is_name
from meshpoint.subtasks.versions import version_of

_LEFT_WITHIN = 5.0
"""Seconds that a cancelled subtask, left behind, may take to end."""


class Ledger(Protocol):
    """Where the records of one segment's task are written."""

    async def open(self, operation: Operation) -> None:
        """Make the task an operation, if it is none yet.

        Raises:
            CancelledError: the task is not this run's any more, or was cancelled.
        """

    async def save(self, checkpoint: AgentCheckpoint, subtask: str, *, progressed: bool) -> None:
        """Write a checkpoint, however long the database is away. `progressed`: the task has come further by it.

        Raises:
            CancelledError: as `open`.
        """


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which run of which attempt at the operation this is. `parameters` is the request's input."""

    run: Run
    retry_count: int
    seq: int
    parameters: JsonValue


class Over:
    """The `SubtaskRunner` of a segment that is over: an asyncio task that it left behind runs nothing unrecorded."""

    def __init__(self, progress: SubtaskProgress) -> None:
        self.progress = progress

    async def run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse to run."""
        raise AgentMisbehaved(f"a task that its segment left behind began subtask {name!r}: {_AWAIT_IT}")

    async def save_progress(self, subtask: str, state: object) -> None:
        """Refuse to save."""
        raise AgentMisbehaved(f"a task that its segment left behind saved progress of {subtask!r}: {_AWAIT_IT}")

    def saved_progress(self, subtask: str) -> JsonValue:
        """None."""
        return None


_AWAIT_IT = "an agent awaits what it has started before it ends or pauses"


class Subtasks:
    """The `SubtaskRunner` of one segment.

    A record is valid as long as its function and its inputs are those of now. In a new attempt the first one that
    differs runs again, and with it everything that was begun after it. Within one attempt nobody changed anything,
    so inputs that differ depend on time or chance, and are refused.
    """

    def __init__(
        self,
        ctx: TaskExecutionContext,
        plan: Plan,
        attempt: Attempt,
        restored: AgentCheckpoint | None,
        ledger: Ledger,
        steps: Steps,
        now: Callable[[], datetime],
        *,
        opened: bool,
        secret_keys: Sequence[str] = (),
    ) -> None:
        self._ctx, self._plan, self._attempt, self._ledger = ctx, plan, attempt, ledger
        self._steps, self._now, self._opened = steps, now, opened
        self._secret_keys = secret_keys
        self._records = {record.name: record for record in restored.subtasks} if restored else {}
        self._saved = dict(restored.saved_progress) if restored else {}
        self._found = dict(self._saved)  # by the run before, which may have died of what it saved
        self._seq = max(attempt.seq, restored.seq if restored else 0)
        self._asked: list[str] = []
        self._running: list[str] = []
        self._counting: set[str] = set()  # whose record this run has used or made
        self._within: set[asyncio.Task[Any]] = set()  # whoever is in a subtask now
        self._boundary: Checkpoint = {}  # the context when a subtask last began alone, or ended
        self._all_saved = True
        self._writing = asyncio.Lock()
        self.paused_in: str | None = None

    @property
    def opened(self) -> bool:
        """Whether the task is an operation."""
        return self._opened

    @property
    def retry_count(self) -> int:
        """How often the operation was resumed."""
        return self._attempt.retry_count

    @property
    def outdated(self) -> frozenset[str]:
        """The subtasks whose records did not count: what they had asked their peers does not either."""
        return frozenset(name for name, record in self._records.items() if self._is_again(record))

    @property
    def progress(self) -> SubtaskProgress:
        """How far the task is."""
        current = self._running[-1] if self._running else None
        return progress_of(self._plan.subtasks, self._records.values(), current)

    async def run(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The deliverable of a subtask: the recorded one if it is valid, else that of the function, now recorded."""
        self._check(name)
        self._asked.append(name)
        asked = SubtaskRecord(
            name=name,
            status=SubtaskStatus.STARTED,
            function=version_of(function),
            inputs=digests(name, function, args, kwargs),
            retry=self._attempt.retry_count,
            generation=self._attempt.run.generation,
        )
        form = Deliverable.of(function)
        await self.open()
        record = self._valid(asked)
        if record is not None and record.error is not None and self._met_before(record):
            self._put_back(record)
            raise made_again(name, record.error)
        if record is not None and record.completed:
            try:
                return self._reused(record, form)
            except DoesNotFit as error:
                self._outdate(record, f"its deliverable no longer fits: {error}")
        return await self._run(asked, form, function, args, kwargs)

    def _check(self, name: str) -> None:
        if not is_name(name):
            raise SubtaskRefused(
                f"{name!r} is no name of a subtask: use printable text of 1 to {MAX_NAME} characters"
            )
        if (outer := current_subtask()) is not None:
            raise SubtaskRefused(
                f"subtask {name!r} is begun inside subtask {outer!r}: record the one or the other, "
                "and call plain functions in it"
            )
        earlier = self._records.get(name)
        in_an_earlier_handler = (
            earlier is not None
            and self._ctx.calls_are_not_recorded
            and earlier.completed
            and earlier.retry == self._attempt.retry_count
            and earlier.generation < self._attempt.run.generation
        )
        if name in self._asked or in_an_earlier_handler:
            raise SubtaskRefused(
                f"two subtasks of this run are called {name!r}: give each a name of its own, such as '{name}-2'"
            )

    @property
    def place(self) -> tuple[int, int]:
        """How many pauses of the task, and how many subtasks of this run, lie before the code that runs now."""
        return self._ctx.pauses_passed(self._attempt.run.generation), len(self._asked)

    async def open(self) -> None:
        """Make the task an operation, if it is none yet."""
        async with self._writing:
            if not self._opened:
                plan = self._plan
                await self._ledger.open(
                    Operation(
                        type=plan.type,
                        parameters=self._attempt.parameters,
                        subject=self._ctx.subject,
                        exclusive=plan.exclusive,
                        preserve=plan.preserve,
                    )
                )
                self._opened = True

    # ── what is recorded ───────────────────────────────────────────────────────────────────────────

    def _valid(self, asked: SubtaskRecord) -> SubtaskRecord | None:
        """The record of a subtask if it is valid; else it, and all that were begun after it, are outdated."""
        record = self._records.get(asked.name)
        if record is None:
            for left in self._left():
                self._mark(left, f"after {asked.name!r}, which is new")
            return None
        if record.status is SubtaskStatus.OUTDATED:
            return None
        differs = self._differs(record, asked)
        if differs is None:
            return record
        self._outdate(record, differs)
        return None

    def _left(self) -> list[SubtaskRecord]:
        """The records of earlier attempts that this one, which runs from the top, has not come to."""
        if self._attempt.run.generation > 0 and self._ctx.calls_are_not_recorded:
            return []  # an earlier handler may have come to them
        retry = self._attempt.retry_count
        return [each for each in self._records.values() if each.retry < retry and each.name not in self._asked]

    def _outdate(self, record: SubtaskRecord, why: str) -> None:
        self._mark(record, why)
        if record.completed:
            records = list(self._records.values())
            for later in records[[each.name for each in records].index(record.name) + 1 :]:
                self._mark(later, f"after {record.name!r}, which runs again")

    def _mark(self, record: SubtaskRecord, why: str) -> None:
        if record.name in self._counting:
            return
        self._saved.pop(record.name, None)
        if record.completed:
            nothing = {"result": None, "context": None, "secrets": (), "seconds": 0.0}
            changed = {"status": SubtaskStatus.OUTDATED, "again": why, "retry": self._attempt.retry_count}
            self._records[record.name] = record.model_copy(update={**nothing, **changed})

    def _is_again(self, record: SubtaskRecord) -> bool:
        since = record.retry == self._attempt.retry_count or record.status is SubtaskStatus.OUTDATED
        return record.again is not None and since

    def _differs(self, record: SubtaskRecord, asked: SubtaskRecord) -> str | None:
        if record.function is None and not record.inputs:
            return None  # a migration vouches for it
        if record.function is not None and record.function != asked.function:
            return "its function has changed"
        differs = difference(record.inputs, asked.inputs)
        if differs is not None and record.completed and record.retry == asked.retry:
            raise SubtaskRefused(
                f"subtask {asked.name!r}: {differs} from when it ran in this attempt; it depends on time, chance or "
                "anything else outside the request and recorded results: pass what does not change, or make it in "
                "a subtask of its own"
            )
        return differs

    def _reused(self, record: SubtaskRecord, form: Deliverable) -> Any:
        assert record.result is not None
        deliverable = form.read(record.result)
        self._counting.add(record.name)
        self._put_back(record)
        seconds = round(record.seconds, 3)
        self._steps.note(
            Step.SUBTASK_REUSED, self._ctx.task_id, subtask=record.name, seconds=seconds, retry=record.retry
        )
        return deliverable

    def _put_back(self, record: SubtaskRecord) -> None:
        """Leave the context, and the calls that are recorded, as the subtask did."""
        if record.context is not None:
            change(self._ctx, json.loads(record.context))
        changed = snapshot(self._ctx)
        self._ctx.skip_calls_of(record.name)  # the last of which may bring back what the last pause kept
        rewind(self._ctx, changed)

    def _met_before(self, record: SubtaskRecord) -> bool:
        """Whether a function that runs again from the top had this failure behind it when it paused."""
        run, retry = self._attempt.run, self._attempt.retry_count
        runs_again = record.retry == retry and record.generation < run.generation
        return runs_again and not self._ctx.calls_are_not_recorded

    # ── what runs ──────────────────────────────────────────────────────────────────────────────────

    async def _run(
        self,
        asked: SubtaskRecord,
        form: Deliverable,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        name, began = asked.name, self._now()
        if not self._running:
            self._boundary = snapshot(self._ctx)
        if (earlier := self._records.get(name)) is not None and self._is_again(earlier):
            self._steps.note(Step.SUBTASK_AGAIN, self._ctx.task_id, subtask=name, why=earlier.again)
            asked = asked.model_copy(update={"again": earlier.again})
        self._records[name] = asked
        self._counting.add(name)
        self._running.append(name)
        me = asyncio.current_task()
        assert me is not None
        self._within.add(me)
        try:
            text, places = form.write(name, await self._called(name, function, args, kwargs))
        except Exception as error:
            self._end(asked, SubtaskStatus.FAILED, began, error=kept(error, self._secret_keys))
            self._all_saved = False
            raise
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.paused_in = name
            raise
        finally:
            self._running.remove(name)
            self._within.discard(me)
        self._end(asked, SubtaskStatus.COMPLETED, began, result=text, secrets=places)
        self._saved.pop(name, None)
        await self._save(name, progressed=True)
        return form.read(text)

    def _end(self, asked: SubtaskRecord, status: SubtaskStatus, began: datetime, **known: object) -> None:
        # Of those that run side by side, each is given what has changed since another of them ended.
        now = snapshot(self._ctx)
        changed, self._boundary = changes(self._boundary, now), now
        context = json.dumps(changed) if changed else None
        seconds = (self._now() - began).total_seconds()
        ended = {"status": status, "seconds": seconds, "context": context, **known}
        self._records[asked.name] = asked.model_copy(update=ended)

    async def stop_left(self) -> None:
        """Cancel subtasks that the code has left running when it ended: nobody would record what they come to."""
        if self._within:
            for left in self._within:
                left.cancel()
            await asyncio.wait(self._within, timeout=_LEFT_WITHIN)

    async def _called(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        ended: BaseException | None = None
        with inside(name), self._steps.step(Step.SUBTASK, [self._ctx.task_id], subtask=name):
            try:
                value = function(*args, **kwargs)
                return await value if isawaitable(value) else value
            except Exception:
                raise
            except BaseException as signal:  # a pause, or the end of the run: no failure of the subtask
                ended = signal
        assert ended is not None
        raise ended

    async def save_progress(self, subtask: str, state: object) -> None:
        """Keep the state of a subtask that runs."""
        if subtask not in self._running:
            raise AgentMisbehaved(f"subtask {subtask!r} has ended: its progress is its deliverable")
        text = json.dumps(check_json(state, f"saved_progress of subtask {subtask!r}"))
        further = text != self._found.get(subtask)
        self._saved[subtask] = text
        await self._save(subtask, progressed=further)

    def saved_progress(self, subtask: str) -> JsonValue:
        """The state that was kept of it."""
        text = self._saved.get(subtask)
        state: JsonValue = None if text is None else json.loads(text)
        return state

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────────

    async def _save(self, subtask: str, *, progressed: bool) -> None:
        async with self._writing:
            await self._ledger.save(self.so_far(), subtask, progressed=progressed)

    @property
    def unsaved(self) -> bool:
        """Whether a pause would leave something out: that a subtask has begun, or failed, or that there are any."""
        return self._opened and (self.paused_in is not None or self._seq == 0 or not self._all_saved)

    def last(self, reason: str, details: dict[str, JsonValue] | None) -> AgentCheckpoint:
        """The checkpoint of an operation that ends without having completed."""
        return self.so_far().model_copy(update={"failure_reason": reason, "error_details": details})

    def so_far(self) -> AgentCheckpoint:
        """The next checkpoint: all that is recorded by now."""
        # Counted before it is written: if the write is given up halfway, the next one must not be taken for it.
        self._seq += 1
        self._all_saved = True
        plan, run = self._plan, self._attempt.run
        return AgentCheckpoint(
            operation_id=run.task_id,
            agent=run.agent,
            seq=self._seq,
            subject=self._ctx.subject,
            planned=plan.subtasks,
            subtasks=tuple(self._records.values()),
            saved_progress=dict(self._saved),
            current_subtask=self.progress.current,
            agent_config={"type": plan.type, "exclusive": plan.exclusive, "preserve": plan.preserve},
            agent_version=plan.version,
            retry_count=self._attempt.retry_count,
        )
