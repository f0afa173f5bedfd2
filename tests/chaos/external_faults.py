"""Faults from outside: locks on rows, floods, and requests with undeliverable replies."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from itertools import count

import asyncpg

from meshpoint.errors import Unavailable
from meshpoint.model.bodies import A2AMessage, Part, RequestBody
from meshpoint.model.ids import AgentName, new_id
from meshpoint.model.messages import Address, Message, MessageType, request_queue
from meshpoint.ports.broker import Broker

from .agents import Piece
from .queue_server import UNAVAILABLE_ERRORS, QueueServer

_LOCK_STATEMENTS = (
    "SELECT 1 FROM agent_paused_tasks WHERE ctid IN (SELECT ctid FROM agent_paused_tasks "
    "WHERE status NOT IN ('completed', 'failed', 'cancelled') ORDER BY random() "
    "LIMIT 3) FOR UPDATE SKIP LOCKED",
    "SELECT 1 FROM agent_peer_sub_tasks WHERE ctid IN (SELECT ctid FROM agent_peer_sub_tasks"
    " ORDER BY random() LIMIT 3) FOR UPDATE SKIP LOCKED",
    "SELECT 1 FROM agent_parallel_invocations WHERE ctid IN (SELECT ctid "
    "FROM agent_parallel_invocations ORDER BY random() LIMIT 2) FOR UPDATE SKIP LOCKED",
)
FLOOD_SIZE = 1000
_UNAVAILABLE_ERRORS = (Unavailable, *UNAVAILABLE_ERRORS)
_numbers = count(100_000_000)


async def lock_rows(db_url: str, seconds: float) -> str:
    """Lock some open rows for `seconds`."""
    locked = 0
    try:
        connection = await asyncpg.connect(db_url, timeout=5)
        try:
            async with connection.transaction():
                deadline = time.monotonic() + seconds
                while not locked and time.monotonic() < deadline:
                    for statement in _LOCK_STATEMENTS:
                        locked += len(await connection.fetch(statement, timeout=5))
                    await asyncio.sleep(0.02)
                await asyncio.sleep(max(0.0, deadline - time.monotonic()))
        finally:
            connection.terminate()
    except _UNAVAILABLE_ERRORS as error:
        return f"{locked} rows, until {type(error).__name__}"
    return f"{locked} rows"


def make_request(sender: str, reply_to: str | None) -> Message:
    """A request to `leaf` from a sender outside the ledger."""
    task_id = new_id()
    piece = Piece(number=next(_numbers), round=0, index=0)
    message = A2AMessage(
        message_id=task_id,
        role="ROLE_USER",
        parts=[Part(data=piece.model_dump())],
        task_id=task_id,
    )
    return Message(
        type=MessageType.REQUEST,
        body=RequestBody(message=message).to_bytes(),
        message_id=task_id,
        correlation_id=task_id,
        app_id=sender,
        reply_to=None if reply_to is None else Address(reply_to),
        timestamp=datetime.now(UTC),
    )


async def send_flood(broker: Broker) -> str:
    """Send a thousand requests at once."""
    leaf = request_queue(AgentName("leaf"))
    try:
        await broker.publish([(leaf, make_request("flood", None)) for _ in range(FLOOD_SIZE)])
    except _UNAVAILABLE_ERRORS as error:
        return type(error).__name__
    return f"{FLOOD_SIZE} requests"


async def send_with_bad_reply_queues(
    queues: QueueServer, namespace: str, broker: Broker, rng: random.Random, seconds: float
) -> str:
    """Send requests with a full reply queue, and with many that do not exist; delete it later."""
    sender, leaf = f"bad{rng.randrange(10**6)}", request_queue(AgentName("leaf"))
    full_address = f"{sender}.replies"
    addresses = [*[full_address] * 20, *(f"{sender}.gone-{number}" for number in range(20))]
    try:
        async with queues.full_queue(namespace, full_address):
            await broker.publish([(leaf, make_request(sender, address)) for address in addresses])
            await asyncio.sleep(seconds)
    except _UNAVAILABLE_ERRORS as error:
        return f"until {type(error).__name__}"
    return f"{len(addresses)} requests"
