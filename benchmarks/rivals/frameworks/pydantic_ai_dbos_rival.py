"""Pydantic AI with its DBOS integration: `python -m … URL [--here]`.

A run of the agent is a workflow, and each request to its model a step. The agent's tool enqueues
the peer's workflow on a queue that another process serves, and waits in `DBOS.recv` for a message
from it, as DBOS recommends for events from outside. With `--here` the peer is a child workflow in
the same process, without a queue.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from dbos import DBOS, DBOSConfig
from pydantic_ai import Tool
from pydantic_ai.durable_exec.dbos import DBOSDurability

from benchmarks.rivals import driver, job
from benchmarks.rivals.frameworks.pydantic_ai_agent import make_agent
from benchmarks.rivals.frameworks.role_process import role_process, serve_role

_QUEUE = "peer"
_POLLING_SECONDS = 0.02
"""The default, one second, would be most of the time of a task."""
_TIMEOUT_SECONDS = 600.0


@DBOS.workflow()
async def answer(question: str) -> str:
    """The peer in the process of the agent."""
    return job.answer()


@DBOS.workflow()
async def answer_to(workflow_id: str, question: str) -> None:
    """The peer in another process."""
    await DBOS.send_async(workflow_id, job.answer())


async def _ask_here(request: str) -> str:
    handle = await DBOS.start_workflow_async(answer, request)
    return str(await handle.get_result())


async def _ask_queue(request: str) -> str:
    assert DBOS.workflow_id is not None
    await DBOS.enqueue_workflow_async(_QUEUE, answer_to, DBOS.workflow_id, request)
    return str(await DBOS.recv_async(timeout_seconds=_TIMEOUT_SECONDS))


def _make_root(ask_peer: Callable[[str], Awaitable[str]]) -> Callable[[int], Any]:
    """The workflow that runs the agent. DBOS must know it before it launches."""
    agent = make_agent(tools=[Tool(ask_peer, name="peer")], capabilities=[DBOSDurability()])

    @DBOS.workflow(name="root")
    async def root(pauses: int) -> str:
        return (await agent.run(str(pauses))).output

    run_root: Callable[[int], Any] = root
    return run_root


def _launch(db_url: str, name: str, queues: list[str]) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": db_url,
        "log_level": "ERROR",
        "executor_id": name,
        "application_version": "1",  # otherwise each process has one of its own code
    }
    DBOS(config=config)
    DBOS.listen_queues(queues)
    DBOS.launch()


@asynccontextmanager
async def _peer(options: Namespace) -> AsyncIterator[None]:
    _launch(options.db_url, "peer", [_QUEUE])
    try:
        yield
    finally:
        DBOS.destroy()


@asynccontextmanager
async def _running(options: Namespace) -> AsyncIterator[driver.Ask]:
    """Start DBOS in this process, and yield a function that runs one job."""
    root = _make_root(_ask_here if options.here else _ask_queue)
    _launch(options.db_url, "root", [])
    try:
        await DBOS.register_queue_async(_QUEUE, polling_interval_sec=_POLLING_SECONDS)

        async def ask(pauses: int) -> object:
            return await (await DBOS.start_workflow_async(root, pauses)).get_result()

        if options.here:
            yield ask
            return
        async with role_process(__spec__.name, options.db_url, "--role", "peer"):
            yield ask
    finally:
        DBOS.destroy()


def main() -> None:
    """Serve the driver, or the peer."""
    parser = ArgumentParser()
    parser.add_argument("db_url")
    parser.add_argument("--here", action="store_true", help="run the peer in this process")
    parser.add_argument("--role", choices=["peer"])
    options = parser.parse_args()
    if options.role:
        asyncio.run(serve_role(_peer(options)))
    else:
        driver.serve(_running(options))


if __name__ == "__main__":
    main()
