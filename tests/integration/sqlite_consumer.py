"""A process that consumes requests of "travel" from a SQLite queue.

It prints `<count> <message id>` for each delivery, and the outcome of each command it reads: `ack`
settles the oldest unsettled delivery.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import request_queue
from meshpoint.ports.broker import Delivery


async def main(path: str, prefetch: str) -> None:
    broker = SqliteBroker(path, namespace="demo", lease=timedelta(seconds=1))
    deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

    def on_delivery(delivery: Delivery) -> None:
        deliveries.put_nowait(delivery)
        print(delivery.delivery_count, delivery.message.message_id, flush=True)

    await broker.open()
    await broker.declare(AgentName("travel"))
    await broker.consume(request_queue(AgentName("travel")), int(prefetch), on_delivery)
    while await asyncio.to_thread(sys.stdin.readline):
        print(await (await deliveries.get()).ack(), flush=True)
    await broker.close()


asyncio.run(main(*sys.argv[1:]))
