"""Claim: record the outcomes that messages bring, each once, and take the tasks whose join they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.checkpointing import NOT_NEEDED
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, Terms, lock_tasks
from meshpoint.adapters.sql.owning import OwnedTasks, given_to, made_ready, new_owner, read_owned
from meshpoint.adapters.sql.rows import Columns, by_task, notice_of, outcome_column, pairs
from meshpoint.model.calls import Join
from meshpoint.model.checkpoint import (
    AllArrived,
    Arrival,
    CallState,
    CancelNotice,
    Claim,
    Duplicate,
    Locked,
    MadeReady,
    Replica,
    Resumable,
    StillWaiting,
    TaskState,
    Unknown,
    WrongSender,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Ok


@dataclass(frozen=True, slots=True)
class Taken:
    """A claim met the join, and the task is this replica's: an `AllArrived` whose task is still to be decoded."""

    task_id: TaskId
    sub_task_id: TaskId
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What became of a batch of claims."""

    verdicts: list[Arrival | Taken]
    owned: OwnedTasks


def with_tasks(verdicts: Sequence[Arrival | Taken], readable: Mapping[str, Resumable]) -> list[Arrival]:
    """`verdicts` with the tasks that were taken; those that are not `readable` were given back."""
    return [_with_task(each, readable.get(each.task_id)) if isinstance(each, Taken) else each for each in verdicts]


def _with_task(taken: Taken, task: Resumable | None) -> AllArrived | MadeReady:
    if task is None:
        return MadeReady(taken.task_id, taken.sub_task_id, taken.cancels)
    return AllArrived(taken.task_id, taken.sub_task_id, task, taken.cancels)


@dataclass(slots=True)
class _Tally:
    """One locked task while the claims of a batch are counted on it."""

    row: Row[Any]
    completed: int = 0
    succeeded: int = 0
    total: int = 0
    answered: dict[str, Columns] = field(default_factory=dict)
    met_by: Claim | None = None

    def record(self, claim: Claim, outcome: bytes | None, call: Row[Any]) -> None:
        if not self.answered:
            self.completed, self.succeeded = call.completed_count, call.succeeded_count
            self.total = call.total_expected
        self.answered[claim.sub_task_id] = {
            "task_id": claim.task_id,
            "sub_task_id": claim.sub_task_id,
            "outcome": outcome,
            "claim_id": claim.id,
        }
        self.completed += 1
        self.succeeded += isinstance(claim.outcome, Ok)
        if Join(call.needed).met(total=self.total, completed=self.completed, succeeded=self.succeeded):
            self.met_by = claim

    def counters(self) -> Columns:
        return {
            "task_id": self.row.logical_task_id,
            "generation": self.row.generation,
            "completed": self.total if self.met_by else self.completed,
            "succeeded": self.succeeded,
            "met": self.met_by is not None,
        }


async def claim(
    tx: Transaction, claims: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int, terms: Terms
) -> Arrivals:
    """Record outcomes, given packed beside their claims."""
    locked = await lock_tasks(tx, [wish.task_id for wish, _ in claims])
    tallies, now = _tallies(locked, replica, terms), locked.now
    calls = await _calls(tx, claims)
    verdicts = _judge_all(claims, tallies, calls, replica)
    verdicts = [Locked(each.task_id, each.sub_task_id) if each.task_id in locked.held else each for each in verdicts]
    taken_before = [each.task_id for each in verdicts if isinstance(each, Taken)]
    met_before = [each.task_id for each in verdicts if isinstance(each, Taken | MadeReady)]
    cancels = await _record(tx, [tally for tally in tallies.values() if tally.answered], now, terms)
    cancels |= await _still_cancelling(tx, met_before, terms)
    met = {task_id: tally for task_id, tally in sorted(tallies.items()) if tally.met_by}
    handed = _hand_out(met, replica, slots - len(taken_before), now)
    await tx.each(sql.UPDATE_OWNER, [columns for columns, _ in handed.values()])
    taken_now = [task_id for task_id, (_, here) in handed.items() if here]
    for index, (wish, _) in enumerate(claims):
        verdict, notices = verdicts[index], cancels.get(wish.task_id, ())
        if isinstance(verdict, Taken | MadeReady):
            verdicts[index] = replace(verdict, cancels=notices)
        elif isinstance(verdict, StillWaiting) and wish.task_id in met and met[wish.task_id].met_by is wish:
            kind = Taken if handed[wish.task_id][1] else MadeReady
            verdicts[index] = kind(wish.task_id, wish.sub_task_id, notices)
    return Arrivals(verdicts, await read_owned(tx, taken_before + taken_now))


def _tallies(locked: LockedTasks, replica: Replica, terms: Terms) -> dict[str, _Tally]:
    agent = terms.names.qualified(replica.agent)
    return {id_: _Tally(row) for id_, row in locked.rows.items() if row.agent_name == agent}


async def _calls(tx: Transaction, claims: Sequence[tuple[Claim, bytes | None]]) -> dict[tuple[str, str], Row[Any]]:
    keys = sorted({(wish.task_id, wish.sub_task_id) for wish, _ in claims})
    return {(row.logical_task_id, row.sub_task_id): row for row in await tx.rows(sql.READ_CALLS, pairs=pairs(keys))}


def _judge_all(
    claims: Sequence[tuple[Claim, bytes | None]],
    tallies: dict[str, _Tally],
    calls: dict[tuple[str, str], Row[Any]],
    replica: Replica,
) -> list[Arrival | Taken]:
    verdicts: list[Arrival | Taken] = []
    seen: set[str] = set()
    for wish, outcome in claims:
        if wish.id in seen:
            verdicts.append(Duplicate(wish.task_id, wish.sub_task_id))
            continue
        seen.add(wish.id)
        call = calls.get((wish.task_id, wish.sub_task_id))
        verdicts.append(_judge(wish, outcome, tallies.get(wish.task_id), call, replica))
    return verdicts


def _judge(
    wish: Claim, outcome: bytes | None, tally: _Tally | None, call: Row[Any] | None, replica: Replica
) -> Arrival | Taken:
    """Record `wish` on its task's tally, or say why not."""
    if tally is None or call is None:
        return Unknown(wish.task_id, wish.sub_task_id)
    if wish.sender is not None and wish.sender != call.peer_agent:
        return WrongSender(wish.task_id, wish.sub_task_id, AgentName(call.peer_agent))
    if call.status != CallState.PENDING:
        return _again(wish, tally.row, call, replica) or Duplicate(wish.task_id, wish.sub_task_id)
    current = tally.row.status == TaskState.WAITING and call.invocation_id == tally.row.generation
    if tally.met_by or wish.sub_task_id in tally.answered or not current:
        return Duplicate(wish.task_id, wish.sub_task_id)
    tally.record(wish, outcome, call)
    return StillWaiting(wish.task_id, wish.sub_task_id)


def _again(wish: Claim, row: Row[Any], call: Row[Any], replica: Replica) -> Arrival | Taken | None:
    """The first result of a claim that was repeated because the answer to its COMMIT was lost."""
    if call.claim_id != wish.id:
        return None
    if row.run_id == wish.id and call.invocation_id == row.generation:
        if row.status == TaskState.RUNNING and row.owner == replica.id:
            return Taken(wish.task_id, wish.sub_task_id)
        if row.status == TaskState.READY:
            return MadeReady(wish.task_id, wish.sub_task_id)
    return StillWaiting(wish.task_id, wish.sub_task_id)


async def _record(
    tx: Transaction, tallies: Sequence[_Tally], now: float, terms: Terms
) -> dict[str, tuple[CancelNotice, ...]]:
    """Write outcomes and counters, and close what a met join no longer needs; by task, whom to tell."""
    await tx.each(sql.UPDATE_ANSWERED, [columns for tally in tallies for columns in tally.answered.values()])
    await tx.each(sql.UPDATE_JOIN, [tally.counters() for tally in tallies])
    early = [tally.row.logical_task_id for tally in tallies if tally.met_by and tally.completed < tally.total]
    return await close_pending(tx, early, now, terms)


async def _still_cancelling(
    tx: Transaction, task_ids: Sequence[str], terms: Terms
) -> dict[str, tuple[CancelNotice, ...]]:
    """By task, in call order, the peers that were to be told when these tasks' joins were met before."""
    if not task_ids:
        return {}
    rows = by_task(await tx.rows(sql.READ_CANCELLING, ids=sorted(set(task_ids))))
    return {task_id: tuple(notice_of(row, terms.names) for row in calls) for task_id, calls in rows.items()}


async def close_pending(
    tx: Transaction, task_ids: Sequence[str], now: float, terms: Terms
) -> dict[str, tuple[CancelNotice, ...]]:
    """Close the calls of locked tasks that have no outcome; by task, in call order, whom to tell."""
    if not task_ids:
        return {}
    outcome = await outcome_column(NOT_NEEDED)
    closed = await tx.rows(
        sql.CLOSE_PENDING, ids=sorted(task_ids), outcome=outcome, send_due_at=now + terms.backoff(1)
    )
    ordered = by_task(sorted(closed, key=lambda row: row.seq))
    return {task_id: tuple(notice_of(row, terms.names) for row in rows) for task_id, rows in ordered.items()}


def _hand_out(met: dict[str, _Tally], replica: Replica, slots: int, now: float) -> dict[str, tuple[Columns, bool]]:
    """Owner columns of each met task, and whether it is this replica's; slots go to the first ids."""
    handed: dict[str, tuple[Columns, bool]] = {}
    for task_id, tally in met.items():
        assert tally.met_by is not None
        here = new_owner(replica, tally.row, slots)
        slots -= here
        columns = (
            given_to(replica, tally.row, tally.met_by.id, attempt=1, now=now)
            if here
            else made_ready(tally.row, tally.met_by.id, now)
        )
        handed[task_id] = columns, here
    return handed
