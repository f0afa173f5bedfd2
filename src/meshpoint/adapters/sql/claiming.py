"""Claim: record each outcome once, and acquire the tasks whose joins are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.checkpointing import NOT_NEEDED
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, StoreOptions, lock_tasks
from meshpoint.adapters.sql.owning import OwnedTasks, can_run, owner_columns, read_owned, ready_columns
from meshpoint.adapters.sql.rows import Columns, cancel_notice_from_row, encode_pairs, group_by_task, outcome_column
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
class Acquired:
    """A claim met the join, and this replica owns the task.

    It becomes an `AllArrived` when the task is decoded.
    """

    task_id: TaskId
    sub_task_id: TaskId
    cancels: tuple[CancelNotice, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimResults:
    """Results of a batch of claims, in their order, and the rows of acquired tasks."""

    results: list[Arrival | Acquired]
    owned: OwnedTasks


def with_tasks(results: Sequence[Arrival | Acquired], readable: Mapping[str, Resumable]) -> list[Arrival]:
    """Replace `Acquired` by the decoded tasks. A task that is not in `readable` was released."""
    return [_with_task(each, readable.get(each.task_id)) if isinstance(each, Acquired) else each for each in results]


def _with_task(acquired: Acquired, task: Resumable | None) -> AllArrived | MadeReady:
    if task is None:
        return MadeReady(acquired.task_id, acquired.sub_task_id, acquired.cancels)
    return AllArrived(acquired.task_id, acquired.sub_task_id, task, acquired.cancels)


@dataclass(slots=True)
class _Tally:
    """Counts of one locked task while the claims of a batch are applied."""

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
    tx: Transaction, claims: Sequence[tuple[Claim, bytes | None]], replica: Replica, slots: int, options: StoreOptions
) -> ClaimResults:
    """Record outcomes, each given as the claim and the packed outcome.

    A repeated claim finds what it wrote and gets its first result again.
    """
    locked = await lock_tasks(tx, [wish.task_id for wish, _ in claims])
    tallies, now = _tallies(locked, replica, options), locked.now
    calls = await _read_calls(tx, claims)
    results = _apply_claims(claims, tallies, calls, replica)
    results = [
        Locked(each.task_id, each.sub_task_id) if each.task_id in locked.locked_elsewhere else each
        for each in results
    ]
    acquired_before = [each.task_id for each in results if isinstance(each, Acquired)]
    met_before = [each.task_id for each in results if isinstance(each, Acquired | MadeReady)]
    cancels = await _write_outcomes(tx, [tally for tally in tallies.values() if tally.answered], now, options)
    cancels |= await _read_unsent_cancels(tx, met_before, options)
    met = {task_id: tally for task_id, tally in sorted(tallies.items()) if tally.met_by}
    assigned = _assign_owners(met, replica, slots - len(acquired_before), now)
    await tx.execute_many(sql.UPDATE_OWNER, [columns for columns, _ in assigned.values()])
    acquired_now = [task_id for task_id, (_, here) in assigned.items() if here]
    for index, (command, _) in enumerate(claims):
        verdict, notices = results[index], cancels.get(command.task_id, ())
        if isinstance(verdict, Acquired | MadeReady):
            results[index] = replace(verdict, cancels=notices)
        elif isinstance(verdict, StillWaiting) and command.task_id in met and met[command.task_id].met_by is command:
            kind = Acquired if assigned[command.task_id][1] else MadeReady
            results[index] = kind(command.task_id, command.sub_task_id, notices)
    return ClaimResults(results, await read_owned(tx, acquired_before + acquired_now))


def _tallies(locked: LockedTasks, replica: Replica, options: StoreOptions) -> dict[str, _Tally]:
    agent = options.names.qualified(replica.agent)
    return {id_: _Tally(row) for id_, row in locked.rows.items() if row.agent_name == agent}


async def _read_calls(
    tx: Transaction, claims: Sequence[tuple[Claim, bytes | None]]
) -> dict[tuple[str, str], Row[Any]]:
    keys = sorted({(command.task_id, command.sub_task_id) for command, _ in claims})
    return {
        (row.logical_task_id, row.sub_task_id): row
        for row in await tx.fetch(sql.READ_CALLS, pairs=encode_pairs(keys))
    }


def _apply_claims(
    claims: Sequence[tuple[Claim, bytes | None]],
    tallies: dict[str, _Tally],
    calls: dict[tuple[str, str], Row[Any]],
    replica: Replica,
) -> list[Arrival | Acquired]:
    results: list[Arrival | Acquired] = []
    seen: set[str] = set()
    for command, outcome in claims:
        if command.id in seen:
            results.append(Duplicate(command.task_id, command.sub_task_id))
            continue
        seen.add(command.id)
        call = calls.get((command.task_id, command.sub_task_id))
        results.append(_apply_claim(command, outcome, tallies.get(command.task_id), call, replica))
    return results


def _apply_claim(
    command: Claim, outcome: bytes | None, tally: _Tally | None, call: Row[Any] | None, replica: Replica
) -> Arrival | Acquired:
    """Record a claim on its task's tally, or return why it does not count."""
    if tally is None or call is None:
        return Unknown(command.task_id, command.sub_task_id)
    if command.sender is not None and command.sender != call.peer_agent:
        return WrongSender(command.task_id, command.sub_task_id, AgentName(call.peer_agent))
    if call.status != CallState.PENDING:
        return _repeated_result(command, tally.row, call, replica) or Duplicate(command.task_id, command.sub_task_id)
    current = tally.row.status == TaskState.WAITING and call.invocation_id == tally.row.generation
    if tally.met_by or command.sub_task_id in tally.answered or not current:
        return Duplicate(command.task_id, command.sub_task_id)
    tally.record(command, outcome, call)
    return StillWaiting(command.task_id, command.sub_task_id)


def _repeated_result(command: Claim, row: Row[Any], call: Row[Any], replica: Replica) -> Arrival | Acquired | None:
    """The result of a claim's first attempt, whose response to COMMIT was lost.

    `None` if another claim recorded the outcome.
    """
    if call.claim_id != command.id:
        return None
    if row.run_id == command.id and call.invocation_id == row.generation:
        if row.status == TaskState.RUNNING and row.owner == replica.id:
            return Acquired(command.task_id, command.sub_task_id)
        if row.status == TaskState.READY:
            return MadeReady(command.task_id, command.sub_task_id)
    return StillWaiting(command.task_id, command.sub_task_id)


async def _write_outcomes(
    tx: Transaction, tallies: Sequence[_Tally], now: float, options: StoreOptions
) -> dict[str, tuple[CancelNotice, ...]]:
    """Write outcomes and counters, and close calls that met joins no longer need.

    Returns the cancels to send, by task.
    """
    await tx.execute_many(
        sql.UPDATE_CALL_OUTCOME, [columns for tally in tallies for columns in tally.answered.values()]
    )
    await tx.execute_many(sql.UPDATE_JOIN, [tally.counters() for tally in tallies])
    early = [tally.row.logical_task_id for tally in tallies if tally.met_by and tally.completed < tally.total]
    return await close_pending(tx, early, now, options)


async def _read_unsent_cancels(
    tx: Transaction, task_ids: Sequence[str], options: StoreOptions
) -> dict[str, tuple[CancelNotice, ...]]:
    """Read the unsent cancels of tasks whose joins were met earlier, by task, in call order."""
    if not task_ids:
        return {}
    rows = group_by_task(await tx.fetch(sql.READ_CANCELLING, ids=sorted(set(task_ids))))
    return {
        task_id: tuple(cancel_notice_from_row(row, options.names) for row in calls) for task_id, calls in rows.items()
    }


async def close_pending(
    tx: Transaction, task_ids: Sequence[str], now: float, options: StoreOptions
) -> dict[str, tuple[CancelNotice, ...]]:
    """Close the pending calls of locked tasks.

    Returns the cancels to send, by task, in call order.
    """
    if not task_ids:
        return {}
    outcome = await outcome_column(NOT_NEEDED)
    closed = await tx.fetch(
        sql.CLOSE_PENDING, ids=sorted(task_ids), outcome=outcome, send_due_at=now + options.backoff(1)
    )
    ordered = group_by_task(sorted(closed, key=lambda row: row.seq))
    return {
        task_id: tuple(cancel_notice_from_row(row, options.names) for row in rows)
        for task_id, rows in ordered.items()
    }


def _assign_owners(
    met: dict[str, _Tally], replica: Replica, slots: int, now: float
) -> dict[str, tuple[Columns, bool]]:
    """Owner columns of each task whose join is met, and whether this replica owns it.

    Slots go to the first tasks in order of id.
    """
    assigned: dict[str, tuple[Columns, bool]] = {}
    for task_id, tally in met.items():
        assert tally.met_by is not None
        runs_here = can_run(replica, tally.row, slots)
        slots -= runs_here
        columns = (
            owner_columns(replica, tally.row, tally.met_by.id, attempt=1, now=now)
            if runs_here
            else ready_columns(tally.row, tally.met_by.id, now)
        )
        assigned[task_id] = columns, runs_here
    return assigned
