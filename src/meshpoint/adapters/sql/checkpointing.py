"""Begin and pause: write a task's row and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import inventory, mailbox, operation_statements
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.appending import (
    seal_entries,
    tasks_with_unknown_entries,
    write_logs,
)
from meshpoint.adapters.sql.batcher import PART_BYTES, split_by_size
from meshpoint.adapters.sql.codec import Packed, pack_all
from meshpoint.adapters.sql.database import StoreOptions, Transaction
from meshpoint.adapters.sql.hand_over import size_of
from meshpoint.adapters.sql.locking import LockedTasks, run_in_rounds
from meshpoint.adapters.sql.records import (
    CheckpointRows,
    checkpoint_rows,
    children_json,
    operation_columns,
)
from meshpoint.adapters.sql.rows import (
    NOT_NEEDED,
    Columns,
    context_columns,
    dispatch_from_row,
    duration_seconds,
    epoch_seconds,
    group_by_task,
    instant,
    is_early_cancel,
    is_later_attempt,
    keep_alive_at,
    outcome_columns,
    ready_at,
    requester_columns,
    wake_time,
)
from meshpoint.adapters.sql.subtasking import save_with_pauses
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.call_attempts import CallAttempt
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import (
    KEEP_ALIVES_PER_TIMEOUT,
    MAX_ROW_BYTES,
    NO_DEADLINE,
    CallState,
    PlannedCall,
    Requester,
    Run,
    TaskState,
    cancel_applies,
    same_requester,
)
from meshpoint.model.transitions import (
    Begin,
    BeginCommitted,
    BeginResult,
    CancelFound,
    Fenced,
    LogChange,
    PastDeadline,
    Pause,
    PauseCommitted,
    PauseResult,
    TaskLocked,
)
from meshpoint.model.waits import SLEEP_PEER, is_wait, sleep_end


async def begin(
    tx: Transaction, begins: Sequence[tuple[Begin, Packed]]
) -> list[BeginResult | TaskLocked]:
    """Insert tasks as running, or as ready if queued, each with its packed request."""

    async def process_round(
        batch: list[tuple[Begin, Packed]], locked: LockedTasks
    ) -> list[BeginResult]:
        first_runs = [(command.run, command.requester) for command, _ in batch]
        await _delete_unrelated_early_cancels(tx, first_runs, locked)
        fresh = [pair for pair in batch if pair[0].run.task_id not in locked.rows]
        await tx.execute_many(
            sql.INSERT_TASK,
            [_begin_columns(tx, command, request, locked.now) for command, request in fresh],
        )
        await tx.execute_many(
            operation_statements.INSERT_OPERATION,
            [
                operation_columns(
                    command.run.task_id,
                    tx.options.names.qualified(command.run.agent),
                    command.operation,
                    locked.now,
                    tx.options,
                )
                for command, _ in fresh
                if command.operation is not None
            ],
        )
        return [
            _begin_result(tx, command, locked.rows.get(command.run.task_id))
            for command, _ in batch
        ]

    return await run_in_rounds(tx, begins, lambda pair: pair[0].run.task_id, process_round)


async def _delete_unrelated_early_cancels(
    tx: Transaction, first_runs: Sequence[tuple[Run, Requester]], locked: LockedTasks
) -> None:
    """Delete tombstones of early cancels that do not apply to these first runs."""
    await locked.delete(
        tx,
        [
            run.task_id
            for run, requester in first_runs
            if run.fence == 0
            and (row := locked.rows.get(run.task_id)) is not None
            and is_early_cancel(row)
            and not (
                _is_same_agent(tx, row, run)
                and cancel_applies(row.requester_app_id, requester.app_id)
            )
        ],
    )


def _is_same_agent(tx: Transaction, row: Row[Any], run: Run) -> bool:
    return bool(row.agent_name == tx.options.names.qualified(run.agent))


def _is_cancelled(tx: Transaction, row: Row[Any], run: Run, requester: Requester) -> bool:
    """Whether this requester's task was cancelled, rather than another task with the same id."""
    if row.status != TaskState.CANCELLED:
        return False
    same = _is_same_agent(tx, row, run) and same_requester(row.requester_app_id, requester.app_id)
    return run.fence > 0 or is_early_cancel(row) or same


def _begin_result(tx: Transaction, command: Begin, row: Row[Any] | None) -> BeginResult:
    run = command.run
    owned = Run(run.task_id, run.agent, run.id, fence=1, generation=0)
    if row is None:
        return BeginCommitted(owned, command.queued)
    if _is_cancelled(tx, row, run, command.requester):
        return CancelFound(None)
    is_repeat = (row.run_id, row.fence, row.generation) == (run.id, 1, 0)
    # A released run has attempt 1 or more.
    queued = row.status == TaskState.READY and row.attempt == 0
    return (
        BeginCommitted(owned, queued)
        if is_repeat and (queued or row.status == TaskState.RUNNING)
        else Fenced()
    )


def _begin_columns(tx: Transaction, command: Begin, request: Packed, now: float) -> Columns:
    return {
        "task_id": command.run.task_id,
        "agent": tx.options.names.qualified(command.run.agent),
        "run_id": command.run.id,
        "status": (TaskState.READY if command.queued else TaskState.RUNNING).value,
        "owner": None if command.queued else command.replica.id,
        "attempt": 0 if command.queued else 1,
        "wake_at": max(now, epoch_seconds(command.start_at) or now)
        if command.queued
        else now + command.replica.lease.total_seconds(),
        "request": request,
        "now": now,
        "checkpoint_seq": None if command.operation is None else 0,
        "order": command.order,
        "digest": tx.options.codec.text(
            command.digest,
            inventory.REQUEST_DIGEST,
            tx.options.names.qualified(command.run.agent),
            command.run.task_id,
        ),
        "state_format": command.state_format,
        "keep_alive_at": keep_alive_at(command.requester, now),
        **requester_columns(command.requester),
    }


@dataclass(slots=True)  # creating a frozen one takes twice as long
class PackedPause:
    """A pause with its values encoded, so that no lock is held while they are compressed."""

    pause: Pause
    request: Packed
    digest: str | None
    columns: Columns
    bodies: tuple[Packed, ...]
    outcomes: tuple[Packed, ...]
    met: bool  # the join is met by calls that are not sent
    sendable: Sequence[PlannedCall]  # unanswered calls to peers
    waits: bool  # some calls are waits that no peer answers
    retries: bool  # some calls may be retried
    closed: int  # number of calls that are not sent, because they have an outcome
    succeeded: int  # number of closed calls with a result
    earliest_timeout: float | None  # seconds until the first sendable call times out
    checkpoint: CheckpointRows | None  # the operation's checkpoint, if the pause has one
    entries: tuple[bytes, ...]  # appended to the log
    children: str | None  # added to the operation
    size: int  # approximate bytes it adds to a statement

    @classmethod
    async def pack(cls, pause: Pause, options: StoreOptions) -> PackedPause:
        """Encode `pause`.

        Raises:
            AgentMisbehaved: The state is larger than a row can store.
        """
        log, codec = pause.log or _NO_CHANGE, options.codec
        agent, task_id = options.names.qualified(pause.run.agent), pause.run.task_id
        seq = pause.run.generation + 1
        columns = {
            **await context_columns(pause.context, codec, agent, task_id, seq),
            "state": None
            if log.keeps_state and pause.run.fence
            else await codec.pack(pause.state, inventory.STATE, agent, task_id, seq=seq),
            "state_format": pause.state_format,
            "app_version": pause.app_version,
            "framework": pause.framework,
        }
        size = sum(map(len, filter(None, columns.values()))) + log.log_bytes
        if size > MAX_ROW_BYTES:
            raise AgentMisbehaved(
                f"the task's state has {size} bytes; a checkpoint keeps {MAX_ROW_BYTES} at most"
            )
        open_calls = [call for call in pause.calls if call.outcome is None]
        # Most calls of a pause have the same peer and timeouts, so these are checked once each.
        waits = any(map(is_wait, {call.peer for call in open_calls}))
        sendable = [call for call in open_calls if not is_wait(call.peer)] if waits else open_calls
        timeouts = {
            timeout
            for call in sendable
            for timeout in (call.timeout, call.idle_timeout)
            if timeout is not None
        }
        closed = len(pause.calls) - len(open_calls)
        succeeded = sum(isinstance(call.outcome, Ok) for call in pause.calls) if closed else 0
        met = pause.join.met(total=len(pause.calls), completed=closed, succeeded=succeeded)
        kept = (
            [call.outcome or (NOT_NEEDED if met else None) for call in pause.calls]
            if closed
            else []
        )
        bodies = tuple(await pack_all([call.body for call in pause.calls]))
        if codec.seals(agent):
            bodies = tuple(
                codec.seal(body, inventory.CALL_REQUEST, agent, task_id, call.sub_task_id, seq=seq)
                for body, call in zip(bodies, pause.calls, strict=True)
            )
        checkpoint = (
            None
            if pause.checkpoint is None
            else checkpoint_rows(pause.checkpoint, codec, options.names)
        )
        entries = await seal_entries(log, codec, agent, task_id) if log.entries else ()
        children = children_json(pause.children, codec, agent, task_id) if pause.children else None
        outcomes: Iterable[Packed] = (None,) * len(pause.calls)
        if closed:
            outcomes = await outcome_columns(
                [
                    (task_id, call.sub_task_id, outcome)
                    for call, outcome in zip(pause.calls, kept, strict=True)
                ],
                codec,
                agent,
            )
        return cls(
            pause,
            await codec.pack(pause.request, inventory.REQUEST, agent, task_id),
            codec.text(pause.digest, inventory.REQUEST_DIGEST, agent, task_id),
            columns,
            bodies=bodies,
            outcomes=tuple(outcomes),
            met=met,
            sendable=sendable,
            waits=waits,
            retries=any(map(_RETRY, sendable)),
            closed=closed,
            succeeded=succeeded,
            earliest_timeout=duration_seconds(min(timeouts, default=None)),
            checkpoint=checkpoint,
            entries=entries,
            children=children,
            size=_size(pause, (*bodies, *entries), checkpoint) + len(children or ""),
        )

    def with_deadline(self, deadline: float | None) -> PackedPause:
        """This pause with another deadline of its task."""
        requester = self.pause.requester
        if deadline == epoch_seconds(requester.deadline):
            return self
        requester = replace(requester, deadline=None if deadline is None else instant(deadline))
        return replace(self, pause=replace(self.pause, requester=requester))

    @property
    def log(self) -> LogChange:
        """The change of the task's log, or an empty one."""
        return self.pause.log or _NO_CHANGE

    @property
    def fits_fast_path(self) -> bool:
        """Whether the fast path can write it.

        It cannot if a call has an outcome already, is a wait, or may be retried, if the pause has
        a checkpoint, if it adds children to a task without a row, or if it is larger than one
        statement may be.
        """
        return not (
            self.closed
            or self.waits
            or self.retries
            or (self.children is not None and not self.pause.run.fence)
            or self.checkpoint
            or self.size > PART_BYTES
        )


_NO_CHANGE = LogChange()
_RETRY = attrgetter("retry")


def _size(pause: Pause, values: Iterable[Packed], checkpoint: CheckpointRows | None) -> int:
    return (
        1024
        + len(pause.state)
        + size_of(pause.hand_over)
        + 512 * len(pause.calls)
        + sum(map(len, filter(None, values)))
        + (0 if checkpoint is None else checkpoint.size)
    )


async def pause(tx: Transaction, pauses: Sequence[PackedPause]) -> list[PauseResult | TaskLocked]:
    """Write checkpoints.

    A repeated pause finds its own checkpoint and returns the requests that are still unsent.
    """

    async def process_round(batch: list[PackedPause], locked: LockedTasks) -> list[PauseResult]:
        first_runs = [(packed.pause.run, packed.pause.requester) for packed in batch]
        await _delete_unrelated_early_cancels(tx, first_runs, locked)
        batch = [_with_stored_deadline(packed, locked) for packed in batch]
        logs = [(packed.pause.run.task_id, packed.pause.log) for packed in batch]
        unknown = await tasks_with_unknown_entries(tx, locked, logs)
        results = {
            packed.pause.run.task_id: _check_pause(tx, packed.pause, locked, unknown)
            for packed in batch
        }
        written = await _write_pauses(
            tx, [packed for packed in batch if results[packed.pause.run.task_id] is None], locked
        )
        await _reload_dispatches(tx, results)
        committed = {
            packed.pause.run.task_id: committed_pause(packed, locked.now) for packed in written
        }
        return [
            results[packed.pause.run.task_id] or committed[packed.pause.run.task_id]
            for packed in batch
        ]

    return await run_in_rounds(tx, pauses, lambda packed: packed.pause.run.task_id, process_round)


def _with_stored_deadline(packed: PackedPause, locked: LockedTasks) -> PackedPause:
    """`packed` with the deadline in the row: a resumed requester may have given another one."""
    row = locked.rows.get(packed.pause.run.task_id)
    return packed if row is None else packed.with_deadline(row.task_deadline)


def _check_pause(
    tx: Transaction, pause: Pause, locked: LockedTasks, unknown: Collection[str]
) -> PauseResult | None:
    """The result of a pause that must not be written, or `None` to write it.

    `PauseCommitted` means that the pause is a repetition; its dispatches are loaded later.
    `unknown` has the tasks with log entries of a run that their row does not record.
    """
    run, row = pause.run, locked.rows.get(pause.run.task_id)
    late = (
        pause.requester.deadline is not None and pause.requester.deadline.timestamp() <= locked.now
    )
    if row is None:
        if run.fence != 0 or pause.checkpoint is not None:  # an operation always has a row
            return Fenced()
        return PastDeadline() if late else None
    if _is_cancelled(tx, row, run, pause.requester):
        return CancelFound(None)
    paused = row.status in {TaskState.WAITING, TaskState.READY}
    if paused and row.run_id == run.id and row.generation == run.generation + 1:
        return PauseCommitted(TaskState(row.status), ())
    if row.status != TaskState.RUNNING or row.fence != run.fence:
        return Fenced()
    if row.checkpoint_seq is None and pause.checkpoint is not None:
        return Fenced()
    if pause.log is not None and (row.log_seq != pause.log.after or run.task_id in unknown):
        return Fenced()
    if row.cancel_requested:
        return CancelFound(run)
    return PastDeadline() if late else None


async def _write_pauses(
    tx: Transaction, batch: Sequence[PackedPause], locked: LockedTasks
) -> Sequence[PackedPause]:
    """Write pauses, with the outcomes from the mailboxes. Returns the pauses as written."""
    batch = sorted(batch, key=lambda packed: packed.pause.run.task_id)
    delivered = await mailbox.deliver(
        tx, [packed.pause for packed in batch if packed.waits], locked.rows, locked.now
    )
    batch = [
        packed
        if (changed := delivered.get(packed.pause.run.task_id)) is None
        else await PackedPause.pack(changed, tx.options)
        for packed in batch
    ]
    await tx.execute_many(
        sql.INSERT_PAUSED,
        [
            {
                **_task_columns(tx, packed, None, locked.now),
                "request": packed.request,
                "digest": packed.digest,
                **requester_columns(packed.pause.requester),
            }
            for packed in batch
            if packed.pause.run.task_id not in locked.rows
        ],
    )
    known = [packed for packed in batch if packed.pause.run.task_id in locked.rows]
    if known:
        ids = [packed.pause.run.task_id for packed in known]
        await tx.execute_many(
            sql.UPDATE_PAUSED,
            [
                _task_columns(tx, packed, locked.rows[packed.pause.run.task_id], locked.now)
                for packed in known
            ],
        )
        await tx.execute(sql.DELETE_DONE_CALLS, ids=ids)
        await tx.execute(sql.DELETE_JOINS, ids=ids)
    await write_logs(
        tx,
        [
            (packed.pause.run.task_id, packed.pause.run.id, packed.log, packed.entries)
            for packed in batch
        ],
    )
    calls = [row for packed in batch for row in _call_columns(tx, packed, locked.now)]
    for part in split_by_size(
        calls, [len(row["request"] or b"") + len(row["outcome"] or b"") for row in calls]
    ):
        await tx.execute_many(sql.INSERT_CALL, part)
    await tx.execute_many(
        sql.CONFIRM_CALL_DISPATCHED,
        [
            {"task_id": row["task_id"], "sub_task_id": row["sub_task_id"]}
            for row in calls
            if is_wait(row["peer"]) and row["outcome"] is None
        ],
    )
    await tx.execute_many(
        sql.INSERT_JOIN, [_join_columns(tx, packed, locked.now) for packed in batch]
    )
    await tx.execute_many(
        operation_statements.ADD_CHILDREN,
        [
            {"task_id": packed.pause.run.task_id, "children": packed.children}
            for packed in batch
            if packed.children is not None
        ],
    )
    await save_with_pauses(
        tx,
        [
            (locked.rows[packed.pause.run.task_id], packed.pause.checkpoint.seq, packed.checkpoint)
            for packed in known
            if packed.pause.checkpoint is not None and packed.checkpoint is not None
        ],
        locked.now,
    )
    await mailbox.record_questions(tx, [packed.pause for packed in batch])
    return batch


async def write_revived(tx: Transaction, packed: PackedPause, row: Row[Any], now: float) -> None:
    """Write the last pause of a revived operation again, with requests that are due at once."""
    await _write_pauses(tx, [packed], LockedTasks(now, {row.logical_task_id: row}))
    generation = packed.pause.run.generation + 1
    due = {"task_id": row.logical_task_id, "generation": generation, "due_at": now}
    await tx.execute(sql.ADVANCE_JOIN, **due)


async def _reload_dispatches(tx: Transaction, results: dict[TaskId, PauseResult | None]) -> None:
    """Add the unsent requests to the results of repeated pauses."""
    again = {
        task_id: found for task_id, found in results.items() if isinstance(found, PauseCommitted)
    }
    if again:
        rows = group_by_task(await tx.fetch(sql.READ_DISPATCHES, ids=sorted(again)))
        for task_id, found in again.items():
            sends = [
                await dispatch_from_row(row, tx.options.names, tx.options.codec, attempt=1)
                for row in rows.get(task_id, [])
                if (row.send_due_at or row.join_due_at) is not None and not is_later_attempt(row)
            ]
            results[task_id] = PauseCommitted(found.state, tuple(sends))


def committed_pause(packed: PackedPause, now: float) -> PauseCommitted:
    """The result of a checkpoint written at `now`, with the requests to dispatch."""
    pause = packed.pause
    if packed.met:
        return PauseCommitted(TaskState.READY, ())
    deadline_of = _deadlines(pause, now)
    return PauseCommitted(
        TaskState.WAITING,
        tuple(pause.dispatch(call, deadline_of[call.timeout]) for call in packed.sendable),
    )


def _deadlines(pause: Pause, now: float) -> dict[timedelta | None, datetime]:
    """The calls' deadlines by timeout, since most calls of a pause have the same timeout."""
    timeouts = {call.timeout for call in pause.calls}
    return {timeout: instant(_absolute_deadline(pause, timeout, now)) for timeout in timeouts}


def _absolute_deadline(pause: Pause, timeout: timedelta | None, now: float) -> float:
    own = None if timeout is None else now + timeout.total_seconds()
    deadlines = [own, epoch_seconds(pause.requester.deadline)]
    known = [deadline for deadline in deadlines if deadline is not None]
    return min(known, default=NO_DEADLINE.timestamp())


def _shortest_timeout(call: PlannedCall) -> float:
    timeouts = [call.timeout, call.idle_timeout]
    return min(timeout.total_seconds() for timeout in timeouts if timeout is not None)


def _wait_ends(pause: Pause, now: float) -> list[float]:
    return [
        _call_deadlines(pause, call, now)[1]
        for call in pause.calls
        if is_wait(call.peer) and call.outcome is None
    ]


def _join_deadline(pause: Pause, now: float) -> float | None:
    return None if pause.join.deadline is None else now + pause.join.deadline.total_seconds()


def _task_columns(
    tx: Transaction, packed: PackedPause, row: Row[Any] | None, now: float
) -> Columns:
    pause, due_at = packed.pause, now if row is None else ready_at(row, now)
    earliest_timeout = None if packed.earliest_timeout is None else now + packed.earliest_timeout
    deadlines = [
        earliest_timeout,
        epoch_seconds(pause.requester.deadline),
        _join_deadline(pause, now),
        *(_wait_ends(pause, now) if packed.waits else ()),
    ]
    known = [each for each in deadlines if each is not None]
    return {
        "task_id": pause.run.task_id,
        "agent": tx.options.names.qualified(pause.run.agent),
        "status": TaskState.READY.value if packed.met else TaskState.WAITING.value,
        "generation": pause.run.generation + 1,
        "run_id": pause.run.id,
        "wake_at": due_at if packed.met else wake_time(min(known), now),
        "keep_alive_at": keep_alive_at(pause.requester, now),
        "keep_alives": KEEP_ALIVES_PER_TIMEOUT,
        "now": now,
        "new_entries": len(packed.entries),
        "keeps_state": packed.log.keeps_state,
        **packed.columns,
    }


def _call_columns(tx: Transaction, packed: PackedPause, now: float) -> list[Columns]:
    pause = packed.pause
    agent, headers = tx.options.names.qualified(pause.run.agent), dict[str, str | None]()
    rows: list[Columns] = []
    for seq, (call, body, outcome) in enumerate(
        zip(pause.calls, packed.bodies, packed.outcomes, strict=True)
    ):
        is_open = call.outcome is None and not packed.met
        absolute_deadline, timeout_deadline = _call_deadlines(pause, call, now)
        attempt = CallAttempt.first(call, now)
        plain = json.dumps(call.headers)
        if plain not in headers:
            headers[plain] = tx.options.codec.text(
                plain, inventory.HEADERS, agent, pause.run.task_id
            )
        rows.append(
            {
                "task_id": pause.run.task_id,
                "sub_task_id": call.sub_task_id,
                "agent": agent,
                "generation": pause.run.generation + 1,
                "seq": seq,
                "call_id": call.call_id,
                "peer": call.peer,
                "headers": headers[plain],
                "request": body,
                "status": CallState.PENDING.value if is_open else CallState.DONE.value,
                "outcome": outcome,
                "send_attempts": int(is_open and not is_wait(call.peer)),
                "idle_timeout": duration_seconds(call.idle_timeout),
                "timeout_deadline": timeout_deadline,
                "absolute_deadline": absolute_deadline,
                "now": now,
                "retry": None if attempt is None else attempt.encode(),
            }
        )
    return rows


def _call_deadlines(pause: Pause, call: PlannedCall, now: float) -> tuple[float, float]:
    """The absolute deadline of a call, and the earlier of its idle and its absolute deadline.

    For a sleep, its end, and the earlier of that and its task's deadline.
    """
    if call.peer == SLEEP_PEER:
        end = sleep_end(call.headers, now)
        return end, min(end, _absolute_deadline(pause, None, now))
    absolute_deadline = _absolute_deadline(pause, call.timeout, now)
    if is_wait(call.peer):
        return absolute_deadline, absolute_deadline
    return absolute_deadline, min(absolute_deadline, now + _shortest_timeout(call))


def _join_columns(tx: Transaction, packed: PackedPause, now: float) -> Columns:
    pause, is_sent = packed.pause, bool(packed.sendable) and not packed.met
    return {
        "task_id": pause.run.task_id,
        "generation": pause.run.generation + 1,
        "total": len(pause.calls),
        "completed": len(pause.calls) if packed.met else packed.closed,
        "succeeded": packed.succeeded,
        "needed": pause.join.needed,
        "join_deadline": _join_deadline(pause, now),
        "agent": tx.options.names.qualified(pause.run.agent),
        "send_due_at": now + tx.options.backoff(1) if is_sent else None,
        "send_attempts": int(is_sent),
    }
