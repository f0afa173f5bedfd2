"""Count the tokens of responses that arrive after the mesh has closed their calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.inventory import TOKEN_USAGE
from meshpoint.adapters.sql.records import usage_from_column
from meshpoint.adapters.sql.rows import outcome_column
from meshpoint.adapters.sql.subtasking import find_outcome
from meshpoint.errors import KeyMissing
from meshpoint.model.call_attempts import superseded
from meshpoint.model.outcomes import lacks_usage
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Claim
from meshpoint.model.usage import TokenUsage

LateClaims: TypeAlias = Mapping[tuple[str, str], tuple[Claim, Row[Any]]]
"""Claims that came too late, each with the locked row of its task, by task and call."""


def has_late_usage(claim: Claim, row: Row[Any], call: Row[Any], *, is_unread: bool) -> bool:
    """Whether a claim of a closed call has tokens that its task can still count.

    A running task has read its outcomes unless `is_unread`, and an ended one counts only as an
    operation that keeps its last pause.
    """
    if claim.outcome.usage.is_empty or call.claim_id is not None:
        return False
    if call.invocation_id not in {row.generation, superseded(row.generation)}:
        return False
    state = TaskState(row.status)
    if state.is_final:
        return row.checkpoint_seq is not None
    return is_unread or state is not TaskState.RUNNING


async def record_late_usage(tx: Transaction, late: LateClaims) -> None:
    """Add the tokens of each claim to the outcome of its call, once.

    The tokens of an ended operation, and of an earlier attempt at a call, are added to the task's
    row as well.
    """
    if not late:
        return
    added: list[tuple[str, str, TokenUsage]] = []
    for call in await tx.fetch(sql.READ_CALL_OUTCOMES, pairs=json.dumps(sorted(late))):
        claim, row = late[(call.logical_task_id, call.sub_task_id)]
        recorded, usage = await find_outcome(call, tx.options.codec), claim.outcome.usage
        if recorded is None or not lacks_usage(recorded):
            continue
        await tx.execute(
            sql.UPDATE_CALL_USAGE,
            task_id=claim.task_id,
            sub_task_id=claim.sub_task_id,
            outcome=await outcome_column(
                replace(recorded, usage=usage), tx.options.codec, call, call.agent_name
            ),
        )
        if TaskState(row.status).is_final or call.invocation_id != row.generation:
            added.append((claim.task_id, call.peer_agent, usage))
    await add_usage(tx, added)


async def add_usage(tx: Transaction, used: Iterable[tuple[str, str, TokenUsage]]) -> None:
    """Add tokens, each given with its task and its peer, to the totals of locked tasks."""
    by_task: dict[str, list[tuple[str, TokenUsage]]] = {}
    for task_id, peer, usage in used:
        if not usage.is_empty:
            by_task.setdefault(task_id, []).append((peer, usage))
    if not by_task:
        return
    for row in await tx.fetch(sql.READ_PAUSE_USAGE, ids=sorted(by_task)):
        codec, key = tx.options.codec, (TOKEN_USAGE, row.agent_name, row.logical_task_id)
        try:
            stored = codec.read_text(row.token_usage, *key)
        except KeyMissing:
            continue  # rather than lose the stored total
        total = usage_from_column(stored) or TokenUsage()
        for peer, usage in by_task[row.logical_task_id]:
            total.merge(usage, source=peer)
        await tx.execute(
            sql.UPDATE_USAGE,
            task_id=row.logical_task_id,
            token_usage=codec.text(total.model_dump_json(), *key),
        )
