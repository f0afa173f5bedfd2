"""The history of a failed task: every event about it, in time order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path

import asyncpg

from . import tally
from .ledger import Entry
from .strikes import Strike
from .tally import Effects


async def write(
    entries: Iterable[Entry], into: Path, *, folder: Path, found: Effects, strikes: list[Strike], db_url: str
) -> list[Path]:
    """Write a file per entry, with the faults of that time and the rows left in the tables."""
    chosen = list(entries)[:20]
    if not chosen:
        return []
    into.mkdir(parents=True, exist_ok=True)
    ids = {entry.task_id: {entry.task_id, *found.tasks.get(entry.work.number, ())} for entry in chosen}
    wanted = set[str]().union(*ids.values())
    lines = await asyncio.to_thread(_lines, folder, wanted)
    files = []
    for entry in chosen:
        mine = [(at, text) for at, about, text in lines if about & ids[entry.task_id]]
        until = max((at for at, _ in mine), default=entry.sent_at)
        mine += [(each.at, f"FAULT {each.kind.value}: {each.what}") for each in strikes if each.at <= until + 5]
        told = [f"{_clock(at)} {text}" for at, text in sorted(mine) if at >= entry.sent_at - 10]
        rows = await _rows(db_url, ids[entry.task_id])
        path = into / f"request-{entry.work.number}.txt"
        path.write_text("\n".join([*_head(entry), *told, "", "rows left:", *rows, ""]))
        files.append(path)
    return files


def _head(entry: Entry) -> list[str]:
    answers = [f"answered {_clock(each.at)} by {each.sender}: {each.outcome}" for each in entry.answers]
    return [f"task {entry.task_id}: {entry.work}, sent {_clock(entry.sent_at)}", *(answers or ["no answer"]), ""]


def _lines(folder: Path, wanted: set[str]) -> list[tuple[float, set[str], str]]:
    found = []
    for path in sorted(folder.glob("*.events")):
        for at, step, phase, agent, ids, detail in tally.events_of(path):
            if about := wanted.intersection(ids):
                text = f"[{path.stem}] {agent} {step}:{phase} {' '.join(sorted(about))} {json.dumps(detail)}"
                found.append((at, about, text))
    return found


async def _rows(db_url: str, ids: set[str]) -> list[str]:
    try:
        connection = await asyncpg.connect(db_url)
    except (OSError, asyncpg.PostgresError) as error:
        return [f"cannot read the tables: {error}"]
    try:
        tasks = await connection.fetch(
            "SELECT logical_task_id, agent_name, status, generation, fence, owner, attempt, wake_at, reply_sent,"
            " dead_reason FROM agent_paused_tasks WHERE logical_task_id = ANY($1)",
            list(ids),
        )
        calls = await connection.fetch(
            "SELECT sub_task_id, logical_task_id, invocation_id, call_id, status, claim_id, send_due_at,"
            " send_attempts FROM agent_peer_sub_tasks WHERE logical_task_id = ANY($1)",
            list(ids),
        )
    finally:
        await connection.close()
    return [str(dict(row)) for row in (*tasks, *calls)]


def _clock(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03}"
