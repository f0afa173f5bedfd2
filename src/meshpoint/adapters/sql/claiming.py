"""Claim: record each outcome once, and acquire the tasks whose joins are met."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.codec import RAW, Packed
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.late_usage import has_late_usage, record_late_usage
from meshpoint.adapters.sql.locking import lock_tasks
from meshpoint.adapters.sql.owning import OwnedTasks, assign_owners, read_owned
from meshpoint.adapters.sql.retrying import (
    AttemptFailure,
    CallKey,
    PlannedRetry,
    plan_retries,
    supersede_open_attempt,
    write_retries,
)
from meshpoint.adapters.sql.rows import NOT_NEEDED, Columns, cancel_notice_from_row, group_by_task
from meshpoint.model.call_attempts import superseded
from meshpoint.model.calls import Join
from meshpoint.model.ids import AgentName
from meshpoint.model.outcomes import Failed, Ok, encode_outcome
from meshpoint.model.tasks import CallState, CancelNotice, Replica, Resumable, TaskState
from meshpoint.model.transitions import (
    CallRetried,
    Claim,
    ClaimResult,
    DuplicateOutcome,
    JoinCompleted,
    StillWaiting,
    TaskLocked,
    TaskReady,
    UnknownCall,
    WrongSender,
)

_NO_FENCES: Mapping[str, int] = {}


@dataclass(slots=True)
class _Tally:
    """Counts of one locked task while the claims of a batch are applied."""

    row: Row[Any]
    completed: int = 0
    succeeded: int = 0
    total: int = 0
    answered: dict[str, Columns] = field(default_factory=dict)
    met_by: Claim | None = None

    def record(self, claim: Claim, outcome: Packed, call: Row[Any]) -> None:
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
        if Join(call.needed).met(
            total=self.total, completed=self.completed, succeeded=self.succeeded
        ):
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
    tx: Transaction,
    claims: Sequence[tuple[Claim, Packed]],
    replica: Replica,
    slots: int,
    unread: Mapping[str, int] = _NO_FENCES,
) -> tuple[list[ClaimResult], OwnedTasks]:
    """Record outcomes, each given as the claim and the packed outcome.

    Returns the tasks that this replica owns now as `TaskReady`, and their rows to be decoded. A
    repeated claim finds what it wrote and gets its first result again. A failed attempt at a call
    that is retried does not count.

    `unread` has tasks that this replica has just acquired, with their fences. Their runs have not
    begun, so a task is read again if a claim changes an outcome.
    """
    locked = await lock_tasks(tx, [command.task_id for command, _ in claims])
    agent = tx.options.names.qualified(replica.agent)
    tallies = {id_: _Tally(row) for id_, row in locked.rows.items() if row.agent_name == agent}
    keys = json.dumps(sorted({(command.task_id, command.sub_task_id) for command, _ in claims}))
    calls = {
        (row.logical_task_id, row.sub_task_id): row
        for row in await tx.fetch(sql.READ_CALLS, pairs=keys)
    }
    attempts = await _read_attempts(tx, claims, tallies, calls, locked.now)
    if attempts.repeated:  # they depend on what the other claims of their calls write
        first = [place for place in range(len(claims)) if place not in attempts.repeated]
        results, owned = await claim(
            tx, [claims[place] for place in first], replica, slots, unread
        )
        more, owned_later = await claim(
            tx, [claims[place] for place in attempts.repeated], replica, slots - len(owned), unread
        )
        by_place = dict(zip([*first, *attempts.repeated], [*results, *more], strict=True))
        return [by_place[place] for place in range(len(claims))], owned | owned_later
    results = [
        TaskLocked(command.task_id, command.sub_task_id)
        if command.task_id in locked.locked_elsewhere
        else _apply_claim(
            command,
            outcome,
            tallies.get(command.task_id),
            calls.get((command.task_id, command.sub_task_id)),
            replica,
            attempts,
        )
        for command, outcome in claims
    ]
    await _write_attempts(tx, claims, results, attempts, locked.now)
    met_before = [each.task_id for each in results if isinstance(each, TaskReady)]
    owned_before = [id_ for id_ in met_before if _is_owner(replica, tallies[id_].row)]
    cancels = await _write_outcomes(
        tx, [tally for tally in tallies.values() if tally.answered], locked.now
    )
    cancels |= await _read_unsent_cancels(tx, met_before)
    met = [
        (tally.row, tally.met_by.id, locked.now)
        for _, tally in sorted(tallies.items())
        if tally.met_by is not None
    ]
    owners = assign_owners(met, replica, slots - len(owned_before))
    await tx.execute_many(sql.UPDATE_OWNER, owners)
    for place, (command, _) in enumerate(claims):
        tally, task_id = tallies.get(command.task_id), command.task_id
        if isinstance(results[place], TaskReady) or (tally and tally.met_by is command):
            results[place] = TaskReady(task_id, command.sub_task_id, cancels.get(task_id, ()))
    owned_now = [columns["task_id"] for columns in owners if columns["owner"] is not None]
    still_unread = {
        task_id
        for task_id, tally in tallies.items()
        if _is_owner(replica, tally.row)
        and (task_id in owned_before or unread.get(task_id) == tally.row.fence)
    }
    late = _late_claims(claims, results, tallies, calls, owned_now, still_unread)
    await record_late_usage(tx, late)
    changed = still_unread.intersection(task_id for task_id, _ in late).difference(owned_before)
    return results, await read_owned(tx, [*owned_before, *owned_now, *sorted(changed)])


def _late_claims(
    claims: Sequence[tuple[Claim, Packed]],
    results: Sequence[ClaimResult],
    tallies: Mapping[str, _Tally],
    calls: Mapping[tuple[str, str], Row[Any]],
    owned: Sequence[str],
    unread: Collection[str],
) -> dict[tuple[str, str], tuple[Claim, Row[Any]]]:
    """Claims that came too late to be outcomes, but have tokens for `record_late_usage`.

    `owned` are the tasks that this batch has assigned to a run, which sees none of their later
    claims. The runs of `unread` tasks will read the outcomes after this.
    """
    late: dict[tuple[str, str], tuple[Claim, Row[Any]]] = {}
    running = set[str]()
    for (command, _), result in zip(claims, results, strict=True):
        key, tally = (command.task_id, command.sub_task_id), tallies.get(command.task_id)
        if tally is None:
            continue
        if tally.met_by is command and command.task_id in owned:
            running.add(command.task_id)
        if not isinstance(result, DuplicateOutcome) or command.task_id in running:
            continue
        if command.sub_task_id in tally.answered or key in late:
            continue
        is_unread = command.task_id in unread
        if has_late_usage(command, tally.row, calls[key], is_unread=is_unread):
            late[key] = (command, tally.row)
    return late


def with_tasks(
    results: Sequence[ClaimResult], readable: Mapping[str, Resumable]
) -> list[ClaimResult]:
    """Add the decoded tasks to the results of the claims that met their joins."""
    return [
        JoinCompleted(each.task_id, each.sub_task_id, readable[each.task_id], each.cancels)
        if isinstance(each, TaskReady) and each.task_id in readable
        else each
        for each in results
    ]


@dataclass(frozen=True, slots=True)
class _Attempts:
    """What a batch of claims means for calls that are retried.

    Attributes:
        retries: the attempts that follow the failed ones.
        open_attempts: the open attempts of calls for which an earlier attempt has a result.
        repeated: places of claims of a call for which the batch has an earlier claim.
    """

    retries: Mapping[CallKey, PlannedRetry] = field(default_factory=dict)
    open_attempts: Mapping[CallKey, Row[Any]] = field(default_factory=dict)
    repeated: Sequence[int] = ()


_NO_ATTEMPTS = _Attempts()


async def _read_attempts(
    tx: Transaction,
    claims: Sequence[tuple[Claim, Packed]],
    tallies: Mapping[str, _Tally],
    calls: Mapping[CallKey, Row[Any]],
    now: float,
) -> _Attempts:
    if all(call.retry is None for call in calls.values()):
        return _NO_ATTEMPTS
    seen, repeated = set[tuple[str, str]](), list[int]()
    failures, open_attempts = dict[CallKey, AttemptFailure](), dict[CallKey, Row[Any]]()
    for place, (command, _) in enumerate(claims):
        key, tally = (command.task_id, command.sub_task_id), tallies.get(command.task_id)
        call = calls.get(key)
        if call is None or call.retry is None or tally is None:
            continue
        if tally.row.status != TaskState.WAITING or command.sender not in {None, call.peer_agent}:
            continue
        is_earlier = (
            isinstance(command.outcome, Ok)
            and call.invocation_id == superseded(tally.row.generation)
            and call.claim_id != command.id
        )
        if not (is_earlier or call.status == CallState.PENDING):
            continue  # a duplicate in any case
        if (command.task_id, call.call_id) in seen:
            repeated.append(place)
            continue
        if is_earlier:
            found = await tx.fetch(
                sql.READ_OPEN_ATTEMPT, task_id=command.task_id, call_id=call.call_id
            )
            if not found:
                continue
            open_attempts[key] = found[0]
        elif isinstance(command.outcome, Failed):
            failures[key] = AttemptFailure(
                command.outcome, now, command.retryable, command.retry_after
            )
        seen.add((command.task_id, call.call_id))
    if repeated:
        return _Attempts(repeated=repeated)
    return _Attempts(await plan_retries(tx, failures), open_attempts)


async def _write_attempts(
    tx: Transaction,
    claims: Sequence[tuple[Claim, Packed]],
    results: Sequence[ClaimResult],
    attempts: _Attempts,
    now: float,
) -> None:
    if attempts is _NO_ATTEMPTS:
        return
    closed: dict[CallKey, Columns] = {}
    for (command, outcome), result in zip(claims, results, strict=True):
        key = (command.task_id, command.sub_task_id)
        if isinstance(result, CallRetried):
            closed[key] = {
                "status": CallState.DONE.value,
                "outcome": outcome,
                "claim_id": command.id,
                "send_due_at": None,
            }
        elif isinstance(result, StillWaiting) and key in attempts.open_attempts:
            await supersede_open_attempt(tx, key, attempts.open_attempts[key], now)
    await write_retries(tx, [attempts.retries[key] for key in closed], closed)


def _apply_claim(
    command: Claim,
    outcome: Packed,
    tally: _Tally | None,
    call: Row[Any] | None,
    replica: Replica,
    attempts: _Attempts,
) -> ClaimResult:
    """Record a claim on its task's tally, or return why it does not count."""
    if tally is None or call is None:
        return UnknownCall(command.task_id, command.sub_task_id)
    if command.sender is not None and command.sender != call.peer_agent:
        return WrongSender(command.task_id, command.sub_task_id, AgentName(call.peer_agent))
    key, is_waiting = (command.task_id, command.sub_task_id), tally.row.status == TaskState.WAITING
    wins_late = key in attempts.open_attempts and isinstance(command.outcome, Ok)
    if call.status != CallState.PENDING and not wins_late:
        return _repeated_result(command, tally.row, call, replica)
    current = is_waiting and (call.invocation_id == tally.row.generation or wins_late)
    if tally.met_by or command.sub_task_id in tally.answered or not current:
        return DuplicateOutcome(command.task_id, command.sub_task_id)
    if key in attempts.retries:
        return attempts.retries[key].to_result()
    tally.record(command, outcome, call)
    return StillWaiting(command.task_id, command.sub_task_id)


def _repeated_result(
    command: Claim, row: Row[Any], call: Row[Any], replica: Replica
) -> ClaimResult:
    """The result of a claim's first attempt, whose response to COMMIT was lost.

    A duplicate if another claim recorded the outcome.
    """
    if call.claim_id != command.id:
        return DuplicateOutcome(command.task_id, command.sub_task_id)
    met = row.run_id == command.id and call.invocation_id == row.generation
    if met and (row.status == TaskState.READY or _is_owner(replica, row)):
        return TaskReady(command.task_id, command.sub_task_id)
    return StillWaiting(command.task_id, command.sub_task_id)


def _is_owner(replica: Replica, row: Row[Any]) -> bool:
    return bool(row.status == TaskState.RUNNING and row.owner == replica.id)


async def _write_outcomes(
    tx: Transaction, tallies: Sequence[_Tally], now: float
) -> dict[str, tuple[CancelNotice, ...]]:
    """Write outcomes and counters, and close calls that met joins no longer need.

    Returns the cancels to send, by task.
    """
    await tx.execute_many(
        sql.UPDATE_CALL_OUTCOME,
        [columns for tally in tallies for columns in tally.answered.values()],
    )
    await tx.execute_many(sql.UPDATE_JOIN, [tally.counters() for tally in tallies])
    early = [
        tally.row.logical_task_id
        for tally in tallies
        if tally.met_by and tally.completed < tally.total
    ]
    return await close_pending(tx, early, now)


async def _read_unsent_cancels(
    tx: Transaction, task_ids: Sequence[str]
) -> dict[str, tuple[CancelNotice, ...]]:
    """Read the unsent cancels of tasks whose joins were met earlier, by task, in call order."""
    if not task_ids:
        return {}
    return _notices(tx, await tx.fetch(sql.READ_CANCELLING, ids=sorted(set(task_ids))))


async def close_pending(
    tx: Transaction, task_ids: Sequence[str], now: float
) -> dict[str, tuple[CancelNotice, ...]]:
    """Close the pending calls of locked tasks.

    Returns the cancels to send, by task, in call order.
    """
    if not task_ids:
        return {}
    closed = await tx.fetch(
        sql.CLOSE_PENDING,
        ids=sorted(task_ids),
        outcome=RAW + encode_outcome(NOT_NEEDED),  # a constant, so it is never sealed
        send_due_at=now + tx.options.backoff(1),
    )
    return _notices(tx, sorted(closed, key=lambda row: row.seq))


def _notices(tx: Transaction, rows: Sequence[Row[Any]]) -> dict[str, tuple[CancelNotice, ...]]:
    return {
        task_id: tuple(cancel_notice_from_row(row, tx.options.names) for row in calls)
        for task_id, calls in group_by_task(
            [row for row in rows if row.status == CallState.CANCELLING]
        ).items()
    }
