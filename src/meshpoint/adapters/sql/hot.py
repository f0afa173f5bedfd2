"""The hot path on PostgreSQL: what every task ordinarily needs, a batch in one round trip and one commit.

Each method does what it can and returns it, by the item's place; the store gives the rest to the general transaction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from pydantic_core import to_json
from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.sql import arrays as sql
from meshpoint.adapters.sql.checkpointing import (
    KEEP_ALIVES_PER_TIMEOUT,
    PackedPause,
    committed,
)
from meshpoint.adapters.sql.claiming import Taken
from meshpoint.adapters.sql.lane import Lane
from meshpoint.adapters.sql.locking import Terms, seconds_of
from meshpoint.adapters.sql.owning import OwnedTasks
from meshpoint.adapters.sql.rows import requester_columns, requester_of
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
    StillWaiting,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Ok
from meshpoint.ports.clock import Clock

LANES = 5
"""Connections that one store keeps for this."""


class HotPath:
    """The ordinary steps of many tasks at once."""

    def __init__(self, engine: AsyncEngine, terms: Terms, clock: Clock | None) -> None:
        self._terms = terms
        self._clock = clock
        self._pauses, self._claims, self._ends, self._reads, self._marks = (Lane(engine) for _ in range(LANES))

    async def close(self) -> None:
        """Give all connections back."""
        for lane in (self._pauses, self._claims, self._ends, self._reads, self._marks):
            await lane.close()

    @property
    def _now(self) -> float | None:
        return None if self._clock is None else self._clock.now().timestamp()

    async def lookup(self, task_ids: Sequence[TaskId]) -> Sequence[Any]:
        """The rows that exist."""
        return await self._reads.read(sql.LOOKUP, self._now, task_ids)

    # ── pause ──────────────────────────────────────────────────────────────────────────────────────

    async def pause(self, pauses: Sequence[tuple[PackedPause, bytes | None]]) -> dict[int, PauseResult]:
        """Write checkpoints whose rows are as their runs expect."""
        # Sorted, as locks are: an insert waits for another of its key.
        places = dict(sorted(_first_of_each(packed.pause.run.task_id for packed, _ in pauses).items()))
        written: dict[str, float] = {}
        fresh = [pauses[place] for place in places.values() if pauses[place][0].pause.run.fence == 0]
        known = [pauses[place] for place in places.values() if pauses[place][0].pause.run.fence != 0]
        for statement, each, more in (
            (sql.PAUSE_NEW, fresh, self._of_new_tasks(fresh)),
            (sql.PAUSE_AGAIN, known, ()),
        ):
            if each:
                calls = _call_arrays([packed for packed, _ in each])
                tasks = _task_arrays([packed for packed, _ in each])
                values = (self._now, self._terms.backoff(1), *calls, *tasks, *more, KEEP_ALIVES_PER_TIMEOUT)
                try:
                    rows = await self._pauses.write(statement, *values)
                except StoreUnavailable:
                    if not written:
                        raise
                    break
                written.update({row.logical_task_id: row.now for row in rows})
        return {
            place: committed(pauses[place][0], written[task_id])
            for task_id, place in places.items()
            if task_id in written
        }

    def _of_new_tasks(self, fresh: Sequence[tuple[PackedPause, bytes | None]]) -> tuple[list[Any], ...]:
        requesters = [requester_columns(packed.pause.requester) for packed, _ in fresh]
        return (
            [self._terms.names.qualified(packed.pause.run.agent) for packed, _ in fresh],
            [request for _, request in fresh],
            *(
                [columns[name] for columns in requesters]
                for name in ("reply_to", "requester_app_id", "parent_task_id", "idle_timeout")
            ),
        )

    # ── claim ──────────────────────────────────────────────────────────────────────────────────────

    async def claim(
        self, claims: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int
    ) -> tuple[dict[int, Arrival | Taken], OwnedTasks]:
        """Record outcomes of pending calls, and take the tasks whose join they meet."""
        places = _first_of_each((wish.task_id, wish.sub_task_id) for wish, _ in claims)
        wishes = [claims[place] for place in places.values()]
        rows = await self._claims.write(
            sql.CLAIM,
            self._now,
            replica.id,
            sorted({wish.task_id for wish, _ in wishes}),
            self._terms.names.qualified(replica.agent),
            [wish.task_id for wish, _ in wishes],
            [wish.sub_task_id for wish, _ in wishes],
            [wish.id for wish, _ in wishes],
            [outcome for _, outcome in wishes],
            [isinstance(wish.outcome, Ok) for wish, _ in wishes],
            [wish.sender for wish, _ in wishes],
            sorted(replica.formats),
            slots,
            replica.lease.total_seconds(),
        )
        in_place = list(places.values())
        arrivals: dict[int, Arrival | Taken] = {}
        for number, here in rows:
            place = in_place[number - 1]
            wish = claims[place][0]
            kind = StillWaiting if here is None else Taken if here else MadeReady
            arrivals[place] = kind(wish.task_id, wish.sub_task_id)
        taken = [claims[place][0] for place, arrival in arrivals.items() if isinstance(arrival, Taken)]
        return arrivals, await self._read_owned(taken, replica)

    async def _read_owned(self, met_by: Sequence[Claim], replica: Replica) -> OwnedTasks:
        if not met_by:
            return OwnedTasks()
        task_ids, run_ids = [wish.task_id for wish in met_by], [wish.id for wish in met_by]
        try:
            rows = await self._claims.read(sql.READ_OWNED, task_ids, replica.id, run_ids)
        except StoreUnavailable as error:
            raise CommitInDoubt(f"claimed, but not read: {error}") from error
        return OwnedTasks(
            {row.logical_task_id: row for row in rows},
            {row.logical_task_id: list(zip(row.call_ids, row.peers, row.outcomes, strict=True)) for row in rows},
        )

    # ── end ────────────────────────────────────────────────────────────────────────────────────────

    async def end(self, ends: Sequence[tuple[End, bytes | None]]) -> dict[int, EndResult]:
        """Turn tasks that their runs own into tombstones."""
        places = _first_of_each(wish.run.task_id for wish, _ in ends)
        wishes = [ends[place] for place in places.values()]
        rows = await self._ends.write(
            sql.END,
            self._now,
            self._terms.backoff(1),
            self._terms.tombstone_ttl,
            list(places),
            [wish.run.fence for wish, _ in wishes],
            [wish.run.id for wish, _ in wishes],
            [wish.state.value for wish, _ in wishes],
            [reply for _, reply in wishes],
            [wish.dead_reason for wish, _ in wishes],
        )
        return {places[row.logical_task_id]: self._ended(ends[places[row.logical_task_id]][0], row) for row in rows}

    def _ended(self, wish: End, row: Any) -> Ended:
        agent = self._terms.names.plain(row.agent_name)
        return Ended(Reply(agent, wish.run.task_id, wish.state, wish.reply, requester_of(row), timedelta()))

    # ── marks ──────────────────────────────────────────────────────────────────────────────────────

    async def mark_dispatched(self, sent: Sequence[Dispatch]) -> list[Dispatch]:
        """Note that the broker has all requests of pauses; those of which that is still to be noted."""
        if not sent:
            return []
        tasks, calls = [send.task_id for send in sent], [send.sub_task_id for send in sent]
        rows = await self._marks.write(sql.MARK_DISPATCHED, self._now, tasks, calls, sorted(set(tasks)))
        left = {row.logical_task_id for row in rows}
        return [send for send in sent if send.task_id in left]

    async def mark_replied(self, sent: Sequence[Reply]) -> None:
        """Note that the broker has replies."""
        if sent:
            await self._marks.write(sql.MARK_REPLIED, [send.task_id for send in sent])


def _first_of_each(keys: Iterable[Hashable]) -> dict[Any, int]:
    """Where each key comes first."""
    places: dict[Any, int] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, place)
    return places


def _task_arrays(pauses: Sequence[PackedPause]) -> list[list[Any]]:
    """The columns of `pauses`, each as an array over them."""
    plain = [
        (
            packed.pause.run.task_id,
            "ready" if packed.met else "waiting",
            packed.pause.run.id,
            packed.pause.run.generation + 1,
            packed.soonest,
            None if packed.pause.requester.deadline is None else packed.pause.requester.deadline.timestamp(),
            len(packed.pause.calls),
            len(packed.pause.calls) if packed.met else packed.failed,
            packed.pause.join.needed,
            seconds_of(packed.pause.join.deadline),
            packed.pause.run.fence,
        )
        for packed in pauses
    ]
    return [
        *map(list, zip(*plain, strict=True)),
        *([packed.columns[name] for packed in pauses] for name in sql.CONTEXT),
    ]


def _call_arrays(pauses: Sequence[PackedPause]) -> list[list[Any]]:
    """The columns of all calls of `pauses`, each as an array over them."""
    rows = [
        (
            packed.pause.run.task_id,
            call.sub_task_id,
            seq,
            call.call_id,
            call.peer,
            to_json(call.headers).decode(),
            body,
            call.outcome is None and not packed.met,
            outcome,
            seconds_of(call.idle_timeout),
            call.timeout.total_seconds(),
        )
        for packed in pauses
        for seq, (call, body, outcome) in enumerate(
            zip(packed.pause.calls, packed.bodies, packed.outcomes, strict=True)
        )
    ]
    return [*map(list, zip(*rows, strict=True))]
