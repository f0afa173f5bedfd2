"""Celery on Redis with two worker processes: `python -m benchmarks.rivals.celery_rival URL`."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from benchmarks.rivals import driver

_WORKERS, _THREADS = 2, 64
_TIMEOUT_SECONDS = 600.0
"""Maximum seconds for an answer, far more than needed."""


@asynccontextmanager
async def running(url: str) -> AsyncIterator[driver.Ask]:
    """Start a worker, and yield a function that runs one job.

    Results are awaited in threads, because Celery's client blocks.
    """
    os.environ["CELERY_URL"] = url
    app = ["-A", "benchmarks.rivals.celery_app"]
    options = ["--pool", "prefork", "--concurrency", str(_WORKERS), "--loglevel", "ERROR"]
    options += ["--without-gossip", "--without-mingle"]
    command = [sys.executable, "-W", "ignore", "-m", "celery", "--quiet", *app, "worker", *options]
    worker = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    try:
        from benchmarks.rivals.celery_app import root

        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(_THREADS)

        def run_job(fan_out: int) -> object:
            return root.delay(fan_out).get(timeout=_TIMEOUT_SECONDS)

        async def ask(fan_out: int) -> object:
            return await loop.run_in_executor(threads, run_job, fan_out)

        await ask(1)  # wait until the worker is ready
        yield ask
    finally:
        worker.terminate()
        await worker.wait()


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("url")
    driver.serve(running(parser.parse_args().url))


if __name__ == "__main__":
    main()
