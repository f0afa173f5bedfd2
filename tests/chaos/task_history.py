"""The history of a failed task: every event about it, in time order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path

import asyncpg

from . import event_counts
from .event_counts import Effects
from .fault_injector import AppliedFault
from .ledger import RequestRecord


async def write_histories(
    records: Iterable[RequestRecord],
    destination: Path,
    *,
    folder: Path,
    effects: Effects,
    applied_faults: list[AppliedFault],
    db_url: str,
) -> list[Path]:
    """Write a file per entry, with the faults of that time and the rows left in the tables."""
    selected = list(records)[:20]
    if not selected:
        return []
    destination.mkdir(parents=True, exist_ok=True)
    ids = {
        record.task_id: {record.task_id, *effects.tasks.get(record.work.number, ())}
        for record in selected
    }
    wanted_ids = set[str]().union(*ids.values())
    lines = await asyncio.to_thread(event_lines, folder, wanted_ids)
    files = []
    for entry in selected:
        own_lines = [(at, text) for at, line_ids, text in lines if line_ids & ids[entry.task_id]]
        until = max((at for at, _ in own_lines), default=entry.sent_at)
        own_lines += [
            (fault.started_at, f"FAULT {fault.kind.value}: {fault.description}")
            for fault in applied_faults
            if fault.started_at <= until + 5
        ]
        text_lines = [
            f"{format_time(at)} {text}"
            for at, text in sorted(own_lines)
            if at >= entry.sent_at - 10
        ]
        rows = await _remaining_rows(db_url, ids[entry.task_id])
        path = destination / f"request-{entry.work.number}.txt"
        path.write_text("\n".join([*_header(entry), *text_lines, "", "rows left:", *rows, ""]))
        files.append(path)
    return files


def _header(record: RequestRecord) -> list[str]:
    answers = [
        f"answered {format_time(reply.at)} by {reply.sender}: {reply.outcome}"
        for reply in record.answers
    ]
    return [
        f"task {record.task_id}: {record.work}, sent {format_time(record.sent_at)}",
        *(answers or ["no answer"]),
        "",
    ]


def event_lines(folder: Path, wanted_ids: set[str]) -> list[tuple[float, set[str], str]]:
    matches = []
    for path in sorted(folder.glob("*.events")):
        for at, step, phase, agent, ids, detail in event_counts.read_replica_events(path):
            if matching_ids := wanted_ids.intersection(ids):
                text = (
                    f"[{path.stem}] {agent} {step}:{phase} {' '.join(sorted(matching_ids))} "
                    f"{json.dumps(detail)}"
                )
                matches.append((at, matching_ids, text))
    return matches


async def _remaining_rows(db_url: str, ids: set[str]) -> list[str]:
    try:
        connection = await asyncpg.connect(db_url)
    except (OSError, asyncpg.PostgresError) as error:
        return [f"cannot read the tables: {error}"]
    try:
        tasks = await connection.fetch(
            "SELECT logical_task_id, agent_name, status, generation, fence, owner, attempt, "
            "wake_at, reply_sent, dead_reason FROM agent_paused_tasks "
            "WHERE logical_task_id = ANY($1)",
            list(ids),
        )
        calls = await connection.fetch(
            "SELECT sub_task_id, logical_task_id, invocation_id, call_id, status, claim_id, "
            "send_due_at, send_attempts FROM agent_peer_sub_tasks WHERE logical_task_id = "
            "ANY($1)",
            list(ids),
        )
    finally:
        await connection.close()
    return [str(dict(row)) for row in (*tasks, *calls)]


def format_time(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03}"
