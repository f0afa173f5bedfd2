"""A second process of a contender, for the peer. It ends when its standard input closes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager


@asynccontextmanager
async def role_process(module: str, *arguments: str) -> AsyncIterator[None]:
    """Run `python -m module` with `arguments` while the block runs."""
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
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{module} did not start; see above")
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def serve_role(role: AbstractAsyncContextManager[object]) -> None:
    """Serve until standard input closes."""
    closed = asyncio.Event()
    async with role:
        asyncio.get_running_loop().add_reader(0, closed.set)  # nothing is ever sent
        print("ready", flush=True)
        await closed.wait()
        asyncio.get_running_loop().remove_reader(0)
