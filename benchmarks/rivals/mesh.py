"""Meshpoint: replicas as processes, and a client. `python -m benchmarks.rivals.mesh --help`."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.rivals import driver
from meshpoint.connecting import connect_to
from meshpoint.model.ids import new_id
from meshpoint.settings import AgentSettings, MeshSettings, Settings

MAX_CONCURRENCY = 64
"""Concurrent segments: the most requests ever in flight, so that no default is the limit."""


@asynccontextmanager
async def mesh(options: Namespace) -> AsyncIterator[driver.Ask]:
    """Start a mesh that serves the job, and yield a function that runs one.

    The peer never pauses, so it needs no database.
    """
    settings = MeshSettings(namespace=f"bench-{new_id()}", broker_url=options.broker_url)
    async with AsyncExitStack() as stack:
        groups: Sequence[Sequence[str]] = (
            [["root", "peer"]] if options.together else [["root"], ["peer"]]
        )
        for names in groups:
            agents = tuple(
                _agent(name, options, options.db_url if name == "root" else None) for name in names
            )
            await stack.enter_async_context(_replica(Settings(mesh=settings, agents=agents)))
        client = await stack.enter_async_context(connect_to(settings))

        async def ask(fan_out: int) -> object:
            return await client.call("root", fan_out)

        yield ask


def _agent(name: str, options: Namespace, db_url: str | None) -> AgentSettings:
    durable = {"database_url": db_url, "history": options.timeline} if db_url else {}
    entrypoint = f"{options.agents}:{name}"
    return AgentSettings.model_validate(
        {"name": name, "entrypoint": entrypoint, "max_concurrency": MAX_CONCURRENCY, **durable}
    )


@asynccontextmanager
async def _replica(settings: Settings) -> AsyncIterator[None]:
    """A process that serves `settings` and drains at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.rivals.mesh_replica",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(settings.model_dump_json().encode() + b"\n")
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("a replica did not start; see above")
        yield
    finally:
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("broker_url")
    parser.add_argument("db_url", nargs="?", help="without it, stateless_checkpointing is false")
    parser.add_argument("--together", action="store_true", help="run root and peer in one process")
    parser.add_argument("--timeline", action="store_true", help="record timelines")
    parser.add_argument(
        "--agents", default="benchmarks.rivals.mesh_agents", help="module of root and peer"
    )
    driver.serve(mesh(parser.parse_args()))


if __name__ == "__main__":
    main()
