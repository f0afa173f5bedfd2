"""The fast path on PostgreSQL: the ordinary steps of many tasks in one round trip and one commit.

Each method returns results only for the items it handled, by their position in the batch. The
store passes the others to the general transaction.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import to_json
from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.sql import batch_statements as sql
from meshpoint.adapters.sql.appending import PackedAppend
from meshpoint.adapters.sql.array_literals import (
    int_array,
    joined_values,
    number_array,
    text_array,
)
from meshpoint.adapters.sql.batcher import PART_BYTES
from meshpoint.adapters.sql.checkpointing import PackedPause, committed_pause
from meshpoint.adapters.sql.codec import Packed
from meshpoint.adapters.sql.columns import CONTEXT
from meshpoint.adapters.sql.database import LockedRows, StoreOptions
from meshpoint.adapters.sql.engine import FAST_PATH_CONNECTIONS
from meshpoint.adapters.sql.failures import driver_errors, summarize
from meshpoint.adapters.sql.hand_over import (
    FIND_LEASE,
    FIND_TABLES,
    Offer,
    QueueHandOver,
    hand_over_arrays,
    held_arrays,
)
from meshpoint.adapters.sql.inventory import HEADERS, REASON
from meshpoint.adapters.sql.log_cache import MIN_LOG_BYTES, LogCache, read_log
from meshpoint.adapters.sql.owning import OwnedTask, OwnedTasks, complete_log, keep_log
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.adapters.sql.records import CheckpointRows
from meshpoint.adapters.sql.rows import (
    StoredOutcome,
    duration_seconds,
    epoch_seconds,
    requester_from_row,
)
from meshpoint.adapters.sql.sessions import DatabaseTime
from meshpoint.adapters.sql.timeline_statements import WRITING_ENTRIES
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import KEEP_ALIVES_PER_TIMEOUT, Dispatch, Replica, Reply
from meshpoint.model.transitions import (
    Claim,
    ClaimResult,
    End,
    EndCommitted,
    EndResult,
    Pause,
    PauseResult,
    Save,
    SaveResult,
    StillWaiting,
    TaskReady,
)
from meshpoint.ports.clock import Clock

Array: TypeAlias = Sequence[Any] | str | None
"""The elements of an array, an array literal, or NULL, whose elements are all NULL."""

INLINE_LOG_BYTES = MIN_LOG_BYTES
"""Larger logs are not part of a claim's result row."""


_log = logging.getLogger("meshpoint.store")


class _Statements(NamedTuple):
    """A plain statement, and its variant that also publishes and acks."""

    plain: str
    handing_over: str


_PAUSE_NEW = (
    _Statements(sql.PAUSE_NEW, sql.PAUSE_NEW_HANDING_OVER),
    _Statements(sql.PAUSE_NEW_WITH_LOG, sql.PAUSE_NEW_WITH_LOG_HANDING_OVER),
)
_PAUSE_EXISTING = (
    _Statements(sql.PAUSE_EXISTING, sql.PAUSE_EXISTING_HANDING_OVER),
    _Statements(sql.PAUSE_EXISTING_WITH_LOG, sql.PAUSE_EXISTING_WITH_LOG_HANDING_OVER),
)
_PAUSE_OPERATION = _Statements(sql.PAUSE_OPERATION, sql.PAUSE_OPERATION_HANDING_OVER)
_CLAIM = _Statements(sql.CLAIM, sql.CLAIM_ACKING)
_CLAIM_SKIP_LOCKED = _Statements(sql.CLAIM_SKIP_LOCKED, sql.CLAIM_ACKING_SKIP_LOCKED)
_END = _Statements(sql.END, sql.END_HANDING_OVER)


class FastPath:
    """Runs the statements of `batch_statements`, each kind on a connection of its own.

    Concurrent calls of one method run one after another.

    Raises, from every method that writes:
        StoreUnavailable: Nothing was written.
        CommitInDoubt: The statement was sent, but the response was lost.
        RowLocked: A lock wait timed out.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        options: StoreOptions,
        clock: Clock | None,
        time: DatabaseTime,
        logs: LogCache,
    ) -> None:
        self._options, self._logs = options, logs
        self._time = time
        self._clock = clock
        connections = [PreparedConnection(engine) for _ in range(FAST_PATH_CONNECTIONS)]
        self._pauses, self._claims, self._ends, self._saves, self._reads, self._confirms = (
            self._connections
        ) = connections

    async def close(self) -> None:
        """Return all connections to the pool."""
        for connection in self._connections:
            await connection.close()

    @property
    def _now(self) -> float | None:
        return None if self._clock is None else self._clock.now().timestamp()

    async def _write(
        self,
        connection: PreparedConnection,
        statements: _Statements,
        values: Sequence[Any],
        handed_over: Sequence[Any],
    ) -> tuple[Sequence[Any], bool]:
        """Run a statement that also writes what is `handed_over`, or the plain one.

        If the former fails although the database is available, the plain one follows, so that no
        task depends on queues that the store's login may no longer write, or on its neighbor's
        message.

        Returns the rows, and whether the plain statement has returned them.
        """
        failure: Exception | None = None
        if handed_over:
            given = (*values, *handed_over)
            try:
                return await self._record(connection, statements.handing_over, given), False
            except CommitInDoubt:
                raise
            except driver_errors(StoreUnavailable) as error:
                failure = error
        rows = await self._record(connection, statements.plain, values)
        if failure is not None:
            _log.warning("cannot publish in the commit of a task: %s", summarize(failure))
        return rows, True

    async def _record(
        self, connection: PreparedConnection, statement: str, values: Sequence[Any]
    ) -> Sequence[Any]:
        """Execute a statement, which also writes to the timelines of the tasks that it changes."""
        timeline = self._options.timeline
        if timeline is None or timeline.known_only:  # commands do not use the fast path
            return await connection.write(statement, *values)
        return await connection.write(WRITING_ENTRIES[statement], *values, timeline.replica)

    async def lookup(self, task_ids: Sequence[TaskId]) -> Sequence[Any]:
        """Read the rows that exist; ended tasks include their reply. Also updates `time`."""
        sent_at = self._time.clock()
        rows = await self._reads.read(sql.LOOKUP, self._now, task_ids)
        self._time.observe(rows[0].now, sent_at)
        return [row for row in rows if row.logical_task_id is not None]

    async def pause(self, pauses: Sequence[PackedPause]) -> dict[int, PauseResult]:
        """Write checkpoints if the task's row is as its run expects.

        Only for pauses with `fits_fast_path`.
        """
        # In lock order, since an insert waits for a concurrent insert of the same key.
        places = dict(sorted(_first_positions(each.pause.run.task_id for each in pauses).items()))
        written: dict[str, tuple[float, float | None]] = {}
        fresh = [pauses[place] for place in places.values() if not pauses[place].pause.run.fence]
        known = [pauses[place] for place in places.values() if pauses[place].pause.run.fence]
        fences: list[Array] = [int_array(packed.pause.run.fence for packed in known)]
        for statements, each, more, logs in (
            (_PAUSE_NEW, fresh, self._new_task_arrays(fresh), _new_log_arrays),
            (_PAUSE_EXISTING, known, fences, _log_arrays),
        ):
            with_children = any(packed.children is not None for packed in each)
            with_log = with_children or any(packed.pause.log is not None for packed in each)
            if each:
                try:
                    rows = await self._hand_over(
                        self._pauses,
                        _PAUSE_OPERATION if with_children else statements[with_log],
                        [_offered_requests(packed.pause) for packed in each],
                        self._now,
                        self._options.backoff(1),
                        *self._call_arrays(each),
                        *_task_arrays(each),
                        *more,
                        KEEP_ALIVES_PER_TIMEOUT,
                        *(logs(each) if with_log else ()),
                        *([[packed.children for packed in each]] if with_children else ()),
                    )
                except StoreUnavailable:
                    if not written:
                        raise
                    break
                written.update({task_id: (now, deadline) for task_id, now, deadline, *_ in rows})
        return {
            place: committed_pause(pauses[place].with_deadline(deadline), now)
            for task_id, place in places.items()
            if task_id in written
            for now, deadline in [written[task_id]]
        }

    async def _hand_over(
        self,
        connection: PreparedConnection,
        statements: _Statements,
        offers: Iterable[Offer | None],
        *values: Any,
    ) -> Sequence[Any]:
        """Run a statement that also publishes and acks what the tasks hand over."""
        given = [offer for offer in offers if offer is not None]
        handed_over = hand_over_arrays(given) if given else []
        rows, is_plain = await self._write(connection, statements, values, handed_over)
        if not is_plain:
            done = {row.logical_task_id for row in rows if row.is_handed_over}
            for offer in given:
                if offer.task_id in done:
                    offer.hand_over.finish()
        return rows

    async def finds_lease(self, lease_id: int) -> bool:
        """Whether the queues that have this lease are in the database, and can be written."""
        ((are_writable,),) = await self._reads.read(FIND_TABLES)
        return are_writable and bool(await self._reads.read(FIND_LEASE, lease_id))

    def _call_arrays(self, pauses: Sequence[PackedPause]) -> list[Array]:
        """The columns of the pauses' calls, as arrays.

        The first six are about one call each, and the others about one distinct combination of
        task, peer, headers and timeouts.
        """
        calls = [call for packed in pauses for call in packed.pause.calls]
        first_places = accumulate((len(packed.pause.calls) for packed in pauses), initial=1)
        terms, term_numbers = _number_distinct(
            (
                packed.pause.run.task_id,
                first,
                call.peer,
                to_json(call.headers),
                call.timeout,
                call.idle_timeout,
            )
            for packed, first in zip(pauses, first_places, strict=False)
            for call in packed.pause.calls
        )
        task_ids, firsts, peers, headers, timeouts, idle_timeouts = zip(*terms, strict=True)
        return [
            text_array([call.sub_task_id for call in calls]),
            text_array([call.call_id for call in calls]),
            *joined_values([body for packed in pauses for body in packed.bodies]),
            term_numbers,
            text_array(task_ids),
            int_array(firsts),
            text_array(peers),
            self._seal_headers(pauses, task_ids, [each.decode() for each in headers]),
            number_array(map(duration_seconds, timeouts)),
            number_array(map(duration_seconds, idle_timeouts)),
        ]

    def _seal_headers(
        self, pauses: Sequence[PackedPause], task_ids: Sequence[TaskId], headers: list[str]
    ) -> list[Any]:
        codec, names = self._options.codec, self._options.names
        if codec.sealer is None:
            return headers
        agents = {each.pause.run.task_id: names.qualified(each.pause.run.agent) for each in pauses}
        return [
            codec.text(each, HEADERS, agents[task_id], task_id)
            for each, task_id in zip(headers, task_ids, strict=True)
        ]

    def _seal_reason(self, end: End) -> str | None:
        if end.dead_reason is None:
            return None
        agent = self._options.names.qualified(end.run.agent)
        return self._options.codec.text(end.dead_reason, REASON, agent)

    async def append(self, appends: Sequence[PackedAppend]) -> dict[int, SaveResult]:
        """Append to the logs of tasks if their rows and logs are as their runs expect.

        Logs to be replaced are left out.
        """
        places = dict(
            sorted(_first_positions(each.command.run.task_id for each in appends).items())
        )
        chosen = [appends[place] for place in places.values()]
        chosen = [each for each in chosen if not each.command.log.replaces]
        if not chosen:
            return {}
        rows = await self._saves.write(
            sql.APPEND,
            self._now,
            [each.command.run.task_id for each in chosen],
            [each.command.run.fence for each in chosen],
            [each.command.log.after for each in chosen],
            [len(each.entries) for each in chosen],
            [each.command.run.id for each in chosen],
            *_entry_arrays([(each.command.run.task_id, each.entries) for each in chosen]),
        )
        return {places[row.logical_task_id]: SaveCommitted() for row in rows}

    def _new_task_arrays(self, fresh: Sequence[PackedPause]) -> list[Array]:
        requesters = [packed.pause.requester for packed in fresh]
        return [
            number_array([epoch_seconds(requester.deadline) for requester in requesters]),
            text_array([self._options.names.qualified(each.pause.run.agent) for each in fresh]),
            [packed.request for packed in fresh],
            text_array([requester.reply_to for requester in requesters]),
            text_array([requester.app_id for requester in requesters]),
            text_array([requester.parent_task_id for requester in requesters]),
            number_array([duration_seconds(requester.idle_timeout) for requester in requesters]),
            text_array([packed.digest for packed in fresh]),
            number_array([duration_seconds(requester.result_ttl) for requester in requesters]),
        ]

    async def claim(
        self,
        claims: Sequence[tuple[Claim, Packed]],
        replica: Replica,
        slots: int,
        locked_rows: LockedRows,
    ) -> tuple[dict[int, ClaimResult], OwnedTasks]:
        """Record outcomes of pending calls, and acquire the tasks whose joins are met.

        Leaves out recently locked tasks. Returns acquired tasks as ready, and their rows to be
        decoded.
        """
        places = _first_positions((command.task_id, command.sub_task_id) for command, _ in claims)
        if locked_ids := locked_rows.recently_locked(command.task_id for command, _ in claims):
            places = {key: place for key, place in places.items() if key[0] not in locked_ids}
            if not places:
                return {}, {}
        commands = [claims[place] for place in places.values()]
        terms, term_numbers = _number_distinct(
            (command.task_id, isinstance(command.outcome, Ok), command.sender)
            for command, _ in commands
        )
        held = [
            (number, *message)
            for number, (command, _) in enumerate(commands, 1)
            if command.hand_over is not None and isinstance(command.hand_over, QueueHandOver)
            for message in command.hand_over.held
        ]
        values = (
            self._now,
            replica.id,
            sorted({task_id for task_id, _, _ in terms}),
            self._options.names.qualified(replica.agent),
            text_array([command.sub_task_id for command, _ in commands]),
            text_array([command.id for command, _ in commands]),
            *joined_values([outcome for _, outcome in commands]),
            term_numbers,
            text_array([task_id for task_id, _, _ in terms]),
            number_array([ok for _, ok, _ in terms]),
            text_array([sender for _, _, sender in terms]),
            sorted(replica.formats),
            slots,
            replica.lease.total_seconds(),
            PART_BYTES,
            INLINE_LOG_BYTES,
        )
        statements = _CLAIM_SKIP_LOCKED if locked_rows.skip_locked else _CLAIM
        acks = held_arrays(held) if held else []
        rows, is_plain = await self._write(self._claims, statements, values, acks)
        positions = [0, *places.values()]  # SQL arrays start at 1
        results: dict[int, ClaimResult] = {}
        owned, unseen = dict[str, OwnedTask](), list[Claim]()
        attributes = _attributes(rows)
        for row in rows:
            recorded = [positions[number] for number in row["places"]]
            for place in recorded:
                command, _ = claims[place]
                results[place] = StillWaiting(command.task_id, command.sub_task_id)
            for number in (not is_plain and row["acked"]) or ():
                if (hand_over := claims[positions[number]][0].hand_over) is not None:
                    hand_over.finish()
            if (acquired := row["acquired"]) is None:
                continue
            command, _ = claims[recorded[-1]]  # its id identifies the run
            results[recorded[-1]] = TaskReady(command.task_id, command.sub_task_id)
            if acquired:
                outcomes = _outcomes(row, [claims[place][0].outcome for place in recorded])
                if len(outcomes) == row["total_expected"]:
                    columns = attributes(row)
                    log = await self._complete_log(columns) if columns.log_seq else ()
                    owned[command.task_id] = OwnedTask(columns, outcomes, log)
                else:  # some were recorded while this statement waited for the task's lock
                    unseen.append(command)
        return results, owned | await self._read_owned(unseen, replica)

    async def _complete_log(self, row: Any) -> Sequence[bytes] | None:
        """The log of an acquired task, in another statement if it is large.

        `None` if it is too large for one statement, or the database does not respond.
        """
        if not INLINE_LOG_BYTES < (row.log_bytes or 0) <= PART_BYTES:
            return complete_log(row, row.log_last, row.log_entries or ())
        try:
            log = None
            if (cached := self._logs.find(row.logical_task_id)) is not None:
                log = cached.extend(await self._read_log(row, cached.seq))
            if log is None:
                log = read_log(await self._read_log(row, 1))
        except StoreUnavailable:
            return None
        return keep_log(self._logs, row, log)

    async def _read_log(self, row: Any, first: int) -> Sequence[Any]:
        return await self._reads.read(sql.READ_OWNED_LOG, row.logical_task_id, row.log_seq, first)

    async def _read_owned(self, claims: Sequence[Claim], replica: Replica) -> OwnedTasks:
        if not claims:
            return {}
        try:
            rows = await self._reads.read(
                sql.READ_OWNED,
                [command.task_id for command in claims],
                replica.id,
                [command.id for command in claims],
                PART_BYTES,
            )
        except StoreUnavailable as error:
            raise CommitInDoubt(f"recorded outcomes, but cannot read tasks: {error}") from error
        return {
            row.logical_task_id: OwnedTask(
                row,
                list(zip(row.call_ids, row.peers, row.outcomes, row.ids, strict=True))
                if row.outcome_bytes <= PART_BYTES
                else None,
                complete_log(row, None, ()),
            )
            for row in rows
        }

    async def end(self, ends: Sequence[tuple[End, Packed]]) -> dict[int, EndResult]:
        """Turn tasks into tombstones if their runs own them and they are not operations."""
        places = _first_positions(command.run.task_id for command, _ in ends)
        commands = [ends[place] for place in places.values()]
        rows = await self._hand_over(
            self._ends,
            _END,
            [_offered_reply(command) for command, _ in commands],
            self._now,
            self._options.backoff(1),
            self._options.tombstone_ttl,
            list(places),
            int_array(command.run.fence for command, _ in commands),
            text_array([command.run.id for command, _ in commands]),
            text_array([command.state.value for command, _ in commands]),
            [reply for _, reply in commands],
            _array([self._seal_reason(command) for command, _ in commands]),
        )
        results: dict[int, EndResult] = {}
        for row in map(_attributes(rows), rows):
            place = places[row.logical_task_id]
            command, _ = ends[place]
            results[place] = EndCommitted(
                Reply(
                    command.run.agent,
                    command.run.task_id,
                    command.state,
                    command.reply,
                    requester_from_row(row),
                    fence=command.run.fence,
                )
            )
        return results

    async def save(self, command: Save, encoded: CheckpointRows) -> bool:
        """Write a checkpoint of an operation if its run owns it.

        `encoded` is the same checkpoint. Returns `True` if it was written.
        """
        rows = await self._saves.write(
            sql.SAVE,
            self._now,
            command.run.task_id,
            command.run.fence,
            command.checkpoint.seq,
            self._options.checkpoint_history,
            command.progressed,
            *(encoded.columns[name] for name in sql.SAVED_COLUMNS),
            encoded.starts,
            *([record[name] for record in encoded.records] for name in sql.SAVED_RECORD),
        )
        return bool(rows)

    async def confirm_dispatched(
        self, sent: Sequence[Dispatch]
    ) -> tuple[list[Dispatch], list[Dispatch]]:
        """Record that the broker has stored requests, for pauses whose requests are all in `sent`.

        Returns the requests that are not recorded: first the requests of pauses with other unsent
        requests, then the requests of pauses whose join another session holds.
        """
        if not sent:
            return [], []
        pauses = defaultdict[tuple[TaskId, int], set[TaskId]](set)
        for pause, sends in groupby(sent, attrgetter("task_id", "generation")):
            pauses[pause].update({send.sub_task_id for send in sends})
        rows = await self._confirms.write(
            sql.CONFIRM_DISPATCHED,
            self._now,
            [task_id for task_id, _ in pauses],
            int_array(generation for _, generation in pauses),
            int_array(map(len, pauses.values())),
        )
        if not rows:
            return [], []
        left = {row.logical_task_id: row.complete for row in rows}
        return (
            [send for send in sent if left.get(send.task_id) is False],
            [send for send in sent if left.get(send.task_id) is True],
        )

    async def confirm_replied(self, sent: Sequence[Reply]) -> None:
        """Record that the broker has stored replies. Rows locked by other sessions are skipped."""
        if sent:
            in_order = sorted(
                {(send.task_id, send.fence, send.requester.reply_to or "") for send in sent}
            )
            await self._confirms.write(
                sql.CONFIRM_REPLIED, *map(list, zip(*in_order, strict=True))
            )


def _offered_requests(pause: Pause) -> Offer | None:
    """The hand-over of a pause, whose requests name the deadline of its task."""
    if not isinstance(pause.hand_over, QueueHandOver):
        return None
    deadline = epoch_seconds(pause.requester.deadline)
    return Offer(
        pause.run.task_id,
        None if deadline is None else repr(deadline),
        epoch_seconds(pause.planned_at),
        pause.hand_over,
    )


def _offered_reply(end: End) -> Offer | None:
    """The hand-over of an end, whose reply names its address and the requester's task."""
    if not isinstance(end.hand_over, QueueHandOver):
        return None
    ((address, message),) = end.hand_over.envelopes
    parent = message.headers.get(Header.PARENT_TASK.value, "")
    return Offer(end.run.task_id, f"{address}\n{parent}", None, end.hand_over)


def _attributes(rows: Sequence[Any]) -> Callable[[Any], Any]:
    """Return a function that turns a row into an object with the columns as attributes.

    Look-ups in a driver's record are slow, and so is `dict(record)`.
    """
    names = list(rows[0].keys()) if rows else []
    return lambda row: SimpleNamespace(**dict(zip(names, row, strict=True)))


def _first_positions(keys: Iterable[Hashable]) -> dict[Any, int]:
    """The first position of each key."""
    places = dict[Any, int]()
    for place, key in enumerate(keys):
        if key not in places:
            places[key] = place
    return places


def _outcomes(row: Any, recorded: Sequence[Outcome]) -> list[StoredOutcome]:
    """The outcomes of an acquired task in call order: `recorded` and earlier ones."""
    calls = [
        (*call, "")
        for call in zip(row["seqs"], row["call_ids"], row["peers"], recorded, strict=True)
    ]
    if row["seqs_before"] is not None:
        calls += zip(
            *(row[f"{name}_before"] for name in ("seqs", "call_ids", "peers", "outcomes", "ids")),
            strict=True,
        )
    return [call[1:] for call in sorted(calls, key=itemgetter(0))]


def _task_arrays(pauses: Sequence[PackedPause]) -> list[Array]:
    """The columns of the pauses' tasks, each as an array with one element per pause."""
    return [
        [packed.pause.run.task_id for packed in pauses],
        text_array([packed.pause.run.id for packed in pauses]),
        int_array([packed.pause.run.generation + 1 for packed in pauses]),
        number_array([packed.earliest_timeout for packed in pauses]),
        int_array([len(packed.pause.calls) for packed in pauses]),
        number_array([packed.pause.join.needed for packed in pauses]),
        number_array([duration_seconds(packed.pause.join.deadline) for packed in pauses]),
        *(
            (text_array if name in sql.SHORT_TEXTS else _array)(
                [packed.columns[name] for packed in pauses]
            )
            for name in CONTEXT
        ),
    ]


def _array(values: list[Any]) -> list[Any] | None:
    """`values`, or `None` if all are `None`: the driver looks at each element of an array."""
    return None if values.count(None) == len(values) else values


def _log_arrays(pauses: Sequence[PackedPause]) -> list[Array]:
    """The changes of the tasks' logs, as arrays.

    The first four have one element per pause, in the order of `_task_arrays`, and the others one
    per entry.
    """
    return [
        number_array([packed.log.after if packed.pause.log else None for packed in pauses]),
        number_array([packed.log.replaces for packed in pauses]),
        number_array([packed.log.keeps_state for packed in pauses]),
        *_new_log_arrays(pauses),
    ]


def _new_log_arrays(pauses: Sequence[PackedPause]) -> list[Array]:
    """The logs of new tasks: how many entries each pause has, and then the entries."""
    return [
        int_array(len(packed.entries) for packed in pauses),
        *_entry_arrays([(packed.pause.run.task_id, packed.entries) for packed in pauses]),
    ]


def _entry_arrays(logs: Sequence[tuple[TaskId, Sequence[bytes]]]) -> list[list[Any]]:
    """New log entries as arrays: the task, the number in its log's change, and the bytes."""
    return [
        [task_id for task_id, entries in logs for _ in entries],
        [number for _, entries in logs for number in range(1, len(entries) + 1)],
        [entry for _, entries in logs for entry in entries],
    ]


def _number_distinct(
    terms: Iterable[tuple[Any, ...]],
) -> tuple[Collection[tuple[Any, ...]], str]:
    """The distinct `terms`, and for each term its number among them, from 1 as in SQL arrays."""
    numbers: dict[tuple[Any, ...], int] = {}
    return numbers, int_array([numbers.setdefault(each, len(numbers) + 1) for each in terms])
