"""Count the tokens of responses that arrive after the mesh has closed their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.codec import pack
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.records import usage_from_column
from meshpoint.adapters.sql.subtasking import read_outcome
from meshpoint.model.outcomes import encode_outcome, lacks_usage
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Claim
from meshpoint.model.usage import TokenUsage

LateClaims: TypeAlias = Mapping[tuple[str, str], tuple[Claim, Row[Any]]]
"""Claims that came too late, each with the locked row of its task, by task and call."""


def has_late_usage(claim: Claim, row: Row[Any], call: Row[Any]) -> bool:
    """Whether a claim of a closed call has tokens that its task can still count.

    A running task has read its outcomes, and an ended one counts only as an operation that keeps
    its last pause.
    """
    if claim.outcome.usage.is_empty or call.claim_id is not None:
        return False
    if call.invocation_id != row.generation:
        return False
    state = TaskState(row.status)
    return row.checkpoint_seq is not None if state.is_final else state is not TaskState.RUNNING


async def record_late_usage(tx: Transaction, late: LateClaims) -> None:
    """Add the tokens of each claim to the outcome of its call, once.

    The tokens of an ended operation are added to its row as well.
    """
    if not late:
        return
    ended: dict[str, list[tuple[str, TokenUsage]]] = {}
    for call in await tx.fetch(sql.READ_CALL_OUTCOMES, pairs=json.dumps(sorted(late))):
        claim, row = late[(call.logical_task_id, call.sub_task_id)]
        recorded, usage = await read_outcome(call), claim.outcome.usage
        if recorded is None or not lacks_usage(recorded):
            continue
        await tx.execute(
            sql.UPDATE_CALL_USAGE,
            task_id=claim.task_id,
            sub_task_id=claim.sub_task_id,
            outcome=await pack(encode_outcome(replace(recorded, usage=usage))),
        )
        if TaskState(row.status).is_final:
            ended.setdefault(claim.task_id, []).append((call.peer_agent, usage))
    if ended:
        await _add_to_operations(tx, ended)


async def _add_to_operations(
    tx: Transaction, used: Mapping[str, list[tuple[str, TokenUsage]]]
) -> None:
    for row in await tx.fetch(sql.READ_PAUSE_USAGE, ids=sorted(used)):
        total = usage_from_column(row.token_usage) or TokenUsage()
        for peer, usage in used[row.logical_task_id]:
            total.merge(usage, source=peer)
        await tx.execute(
            sql.UPDATE_USAGE, task_id=row.logical_task_id, token_usage=total.model_dump_json()
        )
