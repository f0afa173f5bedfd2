"""Callers on RabbitMQ: they reconnect, and let their process exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import meshpoint
from meshpoint import SendInDoubt, TaskExecutionContext, agent
from meshpoint.local import local_mesh
from recorded_events import RecordedEvents
from servers import Proxy, RabbitServer

GATES: list[asyncio.Event] = []


@agent("echo")
async def echo(ctx: TaskExecutionContext, text: str) -> str:
    await ctx.update_status(text)
    await GATES[-1].wait()
    return text


async def test_a_caller_reconnects_after_its_connections_are_cut(
    amqp_url: str, namespace: str
) -> None:
    GATES.append(asyncio.Event())
    async with (
        local_mesh(echo, broker_url=amqp_url, namespace=namespace, observer=RecordedEvents()),
        Proxy(amqp_url) as proxy,
        meshpoint.connect(proxy.url, namespace=namespace, name="api") as mesh,
    ):
        task = await mesh.send(echo, "before", task_id="order-17")
        updates = task.updates()
        assert (await anext(updates)).kind == "status"
        proxy.cut()
        GATES[-1].set()
        assert await task.result() == "before"
        # The broker may deliver an update again whose ack was lost with the connection.
        kinds = [update.kind async for update in updates]
        assert kinds in (["ended"], ["status", "ended"])
        while True:
            try:
                again = await mesh.send(echo, "after", task_id="order-18")
                break
            except SendInDoubt:
                continue  # repeated with the same id
        assert await again.result() == "after"


async def test_a_caller_survives_a_restart_of_the_broker(
    own_rabbit: RabbitServer, namespace: str
) -> None:
    GATES.append(asyncio.Event())
    async with (
        local_mesh(
            echo,
            broker_url=own_rabbit.url,
            namespace=namespace,
            observer=RecordedEvents(),
            sweep_interval_seconds=0.2,
        ),
        meshpoint.connect(own_rabbit.url, namespace=namespace) as mesh,
    ):
        task = await mesh.send(echo, "before")
        assert (await anext(task.updates())).kind == "status"
        await own_rabbit.restart(immediate=True)
        GATES[-1].set()
        assert await task.result() == "before"


FORGETFUL = """
import asyncio, sys
import meshpoint

async def main():
    mesh = await meshpoint.connect(sys.argv[1], namespace=sys.argv[2])
    try:
        await mesh.send("nobody", 1)
    except meshpoint.UnknownAgent:
        print("sent")

asyncio.run(main())
"""


def test_a_process_can_exit_without_closing_its_connection(amqp_url: str, namespace: str) -> None:
    command = [sys.executable, "-c", FORGETFUL, amqp_url, namespace]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr
