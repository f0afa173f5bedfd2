"""The fast path on PostgreSQL: the ordinary steps of many tasks in one round trip and one commit.

Each method returns results only for the items it handled, by their position in the batch. The
store passes the others to the general transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from pydantic_core import to_json
from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.sql import batch_statements as sql
from meshpoint.adapters.sql.batcher import PART_BYTES
from meshpoint.adapters.sql.checkpointing import (
    KEEP_ALIVES_PER_TIMEOUT,
    PackedPause,
    committed_pause,
)
from meshpoint.adapters.sql.claiming import Acquired
from meshpoint.adapters.sql.engine import FAST_PATH_CONNECTIONS
from meshpoint.adapters.sql.locking import StoreOptions, duration_seconds
from meshpoint.adapters.sql.owning import OwnedTasks
from meshpoint.adapters.sql.prepared import PreparedConnection, as_namespace
from meshpoint.adapters.sql.rows import Columns, StoredOutcome, requester_from_row
from meshpoint.adapters.sql.time import DatabaseTime
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.model.checkpoint import (
    Arrival,
    Claim,
    Dispatch,
    End,
    Ended,
    EndResult,
    MadeReady,
    PauseResult,
    Replica,
    Reply,
    Save,
    StillWaiting,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.ports.clock import Clock


class FastPath:
    """Runs the statements of `batch_statements`, each kind on a connection of its own.

    Concurrent calls of one method run one after another.

    Raises, from every method that writes:
        StoreUnavailable: Nothing was written.
        CommitInDoubt: The statement was sent, but the response was lost.
        RowLocked: A lock wait timed out.
    """

    def __init__(self, engine: AsyncEngine, options: StoreOptions, clock: Clock | None, time: DatabaseTime) -> None:
        self._options = options
        self._time = time
        self._clock = clock
        connections = [PreparedConnection(engine) for _ in range(FAST_PATH_CONNECTIONS)]
        self._pauses, self._claims, self._ends, self._saves, self._reads, self._confirms = self._connections = (
            connections
        )

    async def close(self) -> None:
        """Return all connections to the pool."""
        for connection in self._connections:
            await connection.close()

    @property
    def _now(self) -> float | None:
        return None if self._clock is None else self._clock.now().timestamp()

    async def lookup(self, task_ids: Sequence[TaskId]) -> Sequence[Any]:
        """Read the rows that exist; ended tasks include their reply. Also updates `time`."""
        sent_at = self._time.clock()
        rows = await self._reads.read(sql.LOOKUP, self._now, task_ids)
        self._time.observe(rows[0].now, sent_at)
        return [row for row in rows if row.logical_task_id is not None]

    async def pause(self, pauses: Sequence[tuple[PackedPause, bytes | None]]) -> dict[int, PauseResult]:
        """Write checkpoints if the task's row is as its run expects.

        Only for pauses with `fits_fast_path`.
        """
        # In lock order, since an insert waits for a concurrent insert of the same key.
        places = dict(sorted(_first_positions(packed.pause.run.task_id for packed, _ in pauses).items()))
        written: dict[str, float] = {}
        fresh = [pauses[place] for place in places.values() if pauses[place][0].pause.run.fence == 0]
        known = [pauses[place] for place in places.values() if pauses[place][0].pause.run.fence != 0]
        for statement, each, more in (
            (sql.PAUSE_NEW, fresh, self._new_task_arrays(fresh)),
            (sql.PAUSE_EXISTING, known, ()),
        ):
            if each:
                calls = _call_arrays([packed for packed, _ in each])
                tasks = _task_arrays([packed for packed, _ in each])
                values = (self._now, self._options.backoff(1), *calls, *tasks, *more, KEEP_ALIVES_PER_TIMEOUT)
                try:
                    rows = await self._pauses.write(statement, *values)
                except StoreUnavailable:
                    if not written:
                        raise
                    break
                written.update({row.logical_task_id: row.now for row in rows})
        return {
            place: committed_pause(pauses[place][0], written[task_id])
            for task_id, place in places.items()
            if task_id in written
        }

    def _new_task_arrays(self, fresh: Sequence[tuple[PackedPause, bytes | None]]) -> tuple[list[Any], ...]:
        requesters = [packed.pause.requester for packed, _ in fresh]
        return (
            [self._options.names.qualified(packed.pause.run.agent) for packed, _ in fresh],
            [request for _, request in fresh],
            [requester.reply_to for requester in requesters],
            [requester.app_id for requester in requesters],
            [requester.parent_task_id for requester in requesters],
            [duration_seconds(requester.idle_timeout) for requester in requesters],
            [packed.pause.digest for packed, _ in fresh],
        )

    async def claim(
        self, claims: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int, *, skip_locked: bool
    ) -> tuple[dict[int, Arrival | Acquired], OwnedTasks]:
        """Record outcomes of pending calls, and acquire the tasks whose joins are met.

        Also returns the rows of the acquired tasks.
        """
        places = _first_positions((wish.task_id, wish.sub_task_id) for wish, _ in claims)
        commands = [claims[place] for place in places.values()]
        terms, term_numbers = _number_distinct(
            (wish.task_id, isinstance(wish.outcome, Ok), wish.sender) for wish, _ in commands
        )
        rows = await self._claims.write(
            sql.CLAIM_SKIP_LOCKED if skip_locked else sql.CLAIM,
            self._now,
            replica.id,
            sorted({task_id for task_id, _, _ in terms}),
            self._options.names.qualified(replica.agent),
            [wish.sub_task_id for wish, _ in commands],
            [wish.id for wish, _ in commands],
            [outcome for _, outcome in commands],
            term_numbers,
            *map(list, zip(*terms, strict=True)),
            sorted(replica.formats),
            slots,
            replica.lease.total_seconds(),
            PART_BYTES,
        )
        positions = [0, *places.values()]  # SQL arrays start at 1
        arrivals: dict[int, Arrival | Acquired] = {}
        owned, unseen = OwnedTasks(), list[Claim]()
        for row in rows:
            for number in row["places"]:
                command, _ = claims[positions[number]]
                arrivals[positions[number]] = StillWaiting(command.task_id, command.sub_task_id)
            if (acquired := row["acquired"]) is None:
                continue
            last = positions[max(row["places"])]
            command, _ = claims[last]
            arrivals[last] = (Acquired if acquired else MadeReady)(command.task_id, command.sub_task_id)
            if acquired:
                outcomes = _outcomes(row, [claims[positions[number]][0].outcome for number in row["places"]])
                if len(outcomes) == row["total_expected"]:
                    owned.tasks[command.task_id], owned.calls[command.task_id] = as_namespace(row), outcomes
                else:  # some were recorded while this statement waited for the task's lock
                    unseen.append(command)
        return arrivals, owned.merged_with(await self._read_owned(unseen, replica))

    async def _read_owned(self, claims: Sequence[Claim], replica: Replica) -> OwnedTasks:
        if not claims:
            return OwnedTasks()
        task_ids, run_ids = [command.task_id for command in claims], [wish.id for wish in claims]
        try:
            rows = await self._reads.read(sql.READ_OWNED, task_ids, replica.id, run_ids, PART_BYTES)
        except StoreUnavailable as error:
            raise CommitInDoubt(f"recorded outcomes, but cannot read tasks: {error}") from error
        return OwnedTasks(
            {row.logical_task_id: row for row in rows},
            {
                row.logical_task_id: list(zip(row.call_ids, row.peers, row.outcomes, strict=True))
                for row in rows
                if row.outcome_bytes <= PART_BYTES
            },
        )

    async def end(self, ends: Sequence[tuple[End, bytes | None]]) -> dict[int, EndResult]:
        """Turn tasks into tombstones if their runs own them and they are not operations."""
        places = _first_positions(command.run.task_id for command, _ in ends)
        commands = [ends[place] for place in places.values()]
        rows = await self._ends.write(
            sql.END,
            self._now,
            self._options.backoff(1),
            self._options.tombstone_ttl,
            list(places),
            [wish.run.fence for wish, _ in commands],
            [wish.run.id for wish, _ in commands],
            [wish.state.value for wish, _ in commands],
            [reply for _, reply in commands],
            [wish.dead_reason for wish, _ in commands],
        )
        return {
            places[row.logical_task_id]: self._end_result(ends[places[row.logical_task_id]][0], row) for row in rows
        }

    def _end_result(self, command: End, row: Any) -> Ended:
        agent = self._options.names.plain(row.agent_name)
        run = command.run
        return Ended(
            Reply(agent, run.task_id, command.state, command.reply, requester_from_row(row), fence=run.fence)
        )

    async def save(self, command: Save, columns: Columns) -> bool:
        """Write a checkpoint of an operation if its run owns it.

        `columns` is the encoded checkpoint. Returns `True` if it was written.
        """
        rows = await self._saves.write(
            sql.SAVE,
            self._now,
            command.run.task_id,
            command.run.fence,
            command.checkpoint.seq,
            self._options.checkpoint_history,
            command.progressed,
            *(columns[name] for name in sql.SAVED_COLUMNS),
        )
        return bool(rows)

    async def confirm_dispatched(self, sent: Sequence[Dispatch]) -> tuple[list[Dispatch], list[Dispatch]]:
        """Record that the broker has stored requests, for pauses whose requests are all in `sent`.

        Returns the requests that are not recorded: first the requests of pauses with other unsent
        requests, then the requests of pauses whose join another session holds.
        """
        if not sent:
            return [], []
        pauses: dict[tuple[TaskId, int], set[TaskId]] = {}
        for send in sent:
            pauses.setdefault((send.task_id, send.generation), set()).add(send.sub_task_id)
        rows = await self._confirms.write(
            sql.CONFIRM_DISPATCHED,
            self._now,
            [task_id for task_id, _ in pauses],
            [generation for _, generation in pauses],
            [len(requests) for requests in pauses.values()],
        )
        left = {row.logical_task_id: row.complete for row in rows}
        return (
            [send for send in sent if left.get(send.task_id) is False],
            [send for send in sent if left.get(send.task_id) is True],
        )

    async def confirm_replied(self, sent: Sequence[Reply]) -> None:
        """Record that the broker has stored replies. Rows locked by other sessions are skipped."""
        if sent:
            in_order = sorted({(send.task_id, send.fence, send.requester.reply_to or "") for send in sent})
            await self._confirms.write(sql.CONFIRM_REPLIED, *map(list, zip(*in_order, strict=True)))


def _first_positions(keys: Iterable[Hashable]) -> dict[Any, int]:
    """The first position of each key."""
    places: dict[Any, int] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, place)
    return places


def _outcomes(row: Any, recorded: Sequence[Outcome]) -> list[StoredOutcome]:
    """The outcomes of an acquired task in call order: `recorded` and earlier ones."""
    calls = list(zip(row["seqs"], row["call_ids"], row["peers"], recorded, strict=True))
    if row["seqs_before"] is not None:
        calls += zip(
            *(row[f"{name}_before"] for name in ("seqs", "call_ids", "peers", "outcomes")),
            strict=True,
        )
    return [call[1:] for call in sorted(calls, key=itemgetter(0))]


def _task_arrays(pauses: Sequence[PackedPause]) -> list[list[Any]]:
    """The columns of the pauses' tasks, each as an array with one element per pause."""
    plain = [
        (
            packed.pause.run.task_id,
            packed.pause.run.id,
            packed.pause.run.generation + 1,
            packed.earliest_timeout,
            None if packed.pause.requester.deadline is None else packed.pause.requester.deadline.timestamp(),
            len(packed.pause.calls),
            packed.pause.join.needed,
            duration_seconds(packed.pause.join.deadline),
            packed.pause.run.fence,
        )
        for packed in pauses
    ]
    return [
        *map(list, zip(*plain, strict=True)),
        *([packed.columns[name] for packed in pauses] for name in sql.CONTEXT_TYPES),
    ]


def _call_arrays(pauses: Sequence[PackedPause]) -> list[list[Any]]:
    """The columns of the pauses' calls, as arrays.

    The first four have one element per call, the others one per distinct terms (task, peer,
    headers and timeouts).
    """
    calls = [call for packed in pauses for call in packed.pause.calls]
    first_places = accumulate((len(packed.pause.calls) for packed in pauses), initial=1)
    terms, term_numbers = _number_distinct(
        (packed.pause.run.task_id, first, call.peer, to_json(call.headers), call.timeout, call.idle_timeout)
        for packed, first in zip(pauses, first_places, strict=False)
        for call in packed.pause.calls
    )
    task_ids, firsts, peers, headers, timeouts, idle_timeouts = zip(*terms, strict=True)
    return [
        [call.sub_task_id for call in calls],
        [call.call_id for call in calls],
        [body for packed in pauses for body in packed.bodies],
        term_numbers,
        list(task_ids),
        list(firsts),
        list(peers),
        [each.decode() for each in headers],
        [timeout.total_seconds() for timeout in timeouts],
        [duration_seconds(idle_timeout) for idle_timeout in idle_timeouts],
    ]


def _number_distinct(terms: Iterable[tuple[Any, ...]]) -> tuple[Collection[tuple[Any, ...]], list[int]]:
    """The distinct `terms`, and for each term its number among them, from 1 as in SQL arrays."""
    numbers: dict[tuple[Any, ...], int] = {}
    assigned = [numbers.setdefault(each, len(numbers) + 1) for each in terms]
    return numbers, assigned
