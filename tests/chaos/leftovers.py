"""What is left in the tables and the queues when all is quiet: it must be nothing that still wants something."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

import asyncpg

from meshpoint.errors import Unavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import dead_letters_of, requests_of, responses_of
from meshpoint.ports.broker import Broker

from .crew import AGENTS

_ROWS = {
    "open tasks": "SELECT count(*) FROM agent_paused_tasks WHERE status NOT IN ('completed', 'failed', 'cancelled')",
    "replies not sent": "SELECT count(*) FROM agent_paused_tasks WHERE reply IS NOT NULL AND NOT reply_sent",
    "calls": "SELECT count(*) FROM agent_peer_sub_tasks",
    "joins": "SELECT count(*) FROM agent_parallel_invocations",
}


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Rows and messages that still want something."""

    rows: dict[str, int]
    queues: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.rows.values()) + sum(self.queues.values())

    def to_dict(self) -> dict[str, dict[str, int]]:
        """As JSON, without what is zero."""
        return {name: {key: count for key, count in part.items() if count} for name, part in asdict(self).items()}


async def look(db_url: str, broker: Broker) -> Leftovers:
    """What is there now. Un-acked messages are not seen: look again when the consumers have gone."""
    connection = await asyncpg.connect(db_url)
    try:
        rows = {name: int(await connection.fetchval(query)) for name, query in _ROWS.items()}
    finally:
        await connection.close()
    queues: dict[str, int] = {}
    for agent in (*AGENTS, "ledger"):
        for address in (requests_of, responses_of, dead_letters_of):
            name = address(AgentName(agent))
            queues[name] = await broker.depth(name) or 0
    return Leftovers(rows, queues)


async def until_none(db_url: str, broker: Broker, limit: float) -> Leftovers:
    """What is left after `limit` seconds, or as soon as nothing is."""
    end = asyncio.get_running_loop().time() + limit
    while True:
        try:
            left = await look(db_url, broker)
        except (Unavailable, OSError, asyncpg.PostgresError) as error:
            left = Leftovers({f"cannot look: {type(error).__name__}": 1}, {})
        if not left.total or asyncio.get_running_loop().time() > end:
            return left
        await asyncio.sleep(0.5)


async def statuses(db_url: str) -> dict[str, int]:
    """How many task rows stand in which state."""
    connection = await asyncpg.connect(db_url)
    try:
        found = await connection.fetch("SELECT status, count(*) AS rows FROM agent_paused_tasks GROUP BY status")
    finally:
        await connection.close()
    return {row["status"]: row["rows"] for row in found}
