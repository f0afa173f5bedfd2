"""Meshpoint: replicas as processes, and a client. `python -m benchmarks.rivals.mesh --help`."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

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
        collector = None
        if options.sample is not None:
            collector = await stack.enter_async_context(_collector())
        groups: Sequence[Sequence[str]] = (
            [["root", "peer"]] if options.together else [["root"], ["peer"]]
        )
        for names in groups:
            agents = tuple(
                _agent(name, options, options.db_url if name == "root" else None) for name in names
            )
            await stack.enter_async_context(
                _replica(Settings(mesh=settings, agents=agents), collector, options.sample)
            )
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


@dataclass(frozen=True, slots=True)
class _Collector:
    """A running collector. Ports of Prometheus endpoints are written to its `stdin`."""

    address: str
    stdin: asyncio.StreamWriter


@asynccontextmanager
async def _process(
    module: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader]]:
    """Run a module, and yield its input and output. It ends when its input closes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdin, process.stdout
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def _collector() -> AsyncIterator[_Collector]:
    """A process that receives spans and metrics while the block runs."""
    async with _process("benchmarks.rivals.collector") as (stdin, stdout):
        yield _Collector((await stdout.readline()).decode().strip(), stdin)


@asynccontextmanager
async def _replica(
    settings: Settings, collector: _Collector | None, sample: str | None
) -> AsyncIterator[None]:
    """A process that serves `settings` and drains at the end of the block."""
    telemetry = []
    if collector is not None:
        from servers.process import free_port  # not on the path of every caller

        telemetry = [collector.address, str(sample), str(free_port())]
    async with _process("benchmarks.rivals.mesh_replica", *telemetry) as (stdin, stdout):
        stdin.write(settings.model_dump_json().encode() + b"\n")
        if await stdout.readline() != b"ready\n":
            raise RuntimeError("a replica did not start; see above")
        if collector is not None:
            collector.stdin.write(f"{telemetry[-1]}\n".encode())
        yield


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("broker_url")
    parser.add_argument("db_url", nargs="?", help="without it, stateless_checkpointing is false")
    parser.add_argument("--together", action="store_true", help="run root and peer in one process")
    parser.add_argument("--timeline", action="store_true", help="record timelines")
    parser.add_argument(
        "--sample", help="let a collector scrape metrics, and send it this share of traces"
    )
    parser.add_argument(
        "--agents", default="benchmarks.rivals.mesh_agents", help="module of root and peer"
    )
    driver.serve(mesh(parser.parse_args()))


if __name__ == "__main__":
    main()
