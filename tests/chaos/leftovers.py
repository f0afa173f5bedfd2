"""What remains in tables and queues at the end: nothing unfinished may be among it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import asyncpg

from meshpoint.model.ids import AgentName
from meshpoint.model.messages import dead_letter_queue, nested_queue, request_queue, response_queue

from .queue_server import QueueServer, connect
from .replica_pool import AGENTS

_COUNT_QUERIES = {
    "open tasks": (
        "SELECT count(*) FROM agent_paused_tasks "
        "WHERE status NOT IN ('completed', 'failed', 'cancelled')"
    ),
    "replies not sent": (
        "SELECT count(*) FROM agent_paused_tasks WHERE reply IS NOT NULL AND NOT reply_sent"
    ),
    "calls": "SELECT count(*) FROM agent_peer_sub_tasks",
    "joins": "SELECT count(*) FROM agent_parallel_invocations",
    "checkpoints": "SELECT count(*) FROM agent_checkpoints",
    "subtask records": "SELECT count(*) FROM agent_subtask_records",
}


_TASK_QUERY = """
SELECT logical_task_id, t.agent_name, t.status, generation, fence, owner, attempt, reply_sent,
       dead_reason, wake_at - extract(epoch FROM now()) AS wakes_in,
       ended_at - extract(epoch FROM now()) AS ended_ago,
       c.sub_task_id, c.invocation_id, c.call_id, c.status AS call, c.send_attempts, c.claim_id,
       c.send_due_at - extract(epoch FROM now()) AS send_due_in, j.invocation_id AS joined,
       j.send_due_at - extract(epoch FROM now()) AS requests_due_in,
       j.send_attempts AS requests_sent
  FROM agent_paused_tasks t LEFT JOIN agent_peer_sub_tasks c USING (logical_task_id)
  LEFT JOIN agent_parallel_invocations j USING (logical_task_id)
 WHERE t.status NOT IN ('completed', 'failed', 'cancelled')
       OR t.reply IS NOT NULL AND NOT reply_sent
       OR c.sub_task_id IS NOT NULL OR j.invocation_id IS NOT NULL
 ORDER BY logical_task_id, sub_task_id LIMIT 500
"""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Unfinished rows and messages."""

    rows: dict[str, int]
    queues: dict[str, int]
    tasks: frozenset[str] = frozenset()  # tasks of these rows
    task_rows: tuple[str, ...] = ()  # the rows themselves

    @property
    def total(self) -> int:
        return sum(self.rows.values()) + sum(self.queues.values())

    def to_dict(self) -> dict[str, dict[str, int]]:
        """As JSON, without zero counts."""
        parts = {"rows": self.rows, "queues": self.queues}
        return {
            name: {key: count for key, count in part.items() if count}
            for name, part in parts.items()
        }


async def _count_rows(db_url: str) -> dict[str, int]:
    connection = await connect(db_url)
    try:
        return {
            name: int(await connection.fetchval(query)) for name, query in _COUNT_QUERIES.items()
        }
    finally:
        await connection.close()


async def _fetch_tasks(db_url: str) -> list[asyncpg.Record]:
    connection = await connect(db_url)
    try:
        return list(await connection.fetch(_TASK_QUERY))
    finally:
        await connection.close()


async def _count_messages(queues: QueueServer, namespace: str) -> dict[str, int]:
    """Messages in the shared queues, unacked ones included.

    Messages in a dead replica's private queue do not count: nothing needs them, and the queue
    expires.
    """
    queue_kinds = (request_queue, nested_queue, response_queue, dead_letter_queue)
    shared = {
        f"{namespace}.{address(AgentName(agent))}"
        for agent in (*AGENTS, "ledger")
        for address in queue_kinds
    }
    message_counts = await queues.messages()
    return {
        name.removeprefix(f"{namespace}."): message_counts.get(name, 0) for name in sorted(shared)
    }


async def wait_until_none(
    db_url: str, queues: QueueServer, namespace: str, limit: float
) -> Leftovers:
    """Wait until nothing is left, or until the leftovers have not changed for `limit` seconds."""
    loop, deadline = asyncio.get_running_loop(), 0.0
    previous: Leftovers | None = None
    while True:
        leftovers = Leftovers(await _count_rows(db_url), {})
        if not leftovers.total:
            leftovers = Leftovers(leftovers.rows, await _count_messages(queues, namespace))
        if not leftovers.total:
            return leftovers
        if leftovers != previous:
            previous, deadline = leftovers, loop.time() + limit
        if loop.time() > deadline:
            rows = await _fetch_tasks(db_url)
            tasks = frozenset(row["logical_task_id"] for row in rows)
            return replace(leftovers, tasks=tasks, task_rows=tuple(str(dict(row)) for row in rows))
        await asyncio.sleep(0.5)
