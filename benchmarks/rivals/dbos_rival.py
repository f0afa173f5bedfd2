"""DBOS on PostgreSQL: `python -m benchmarks.rivals.dbos_rival URL`.

A workflow starts a child workflow for each peer, all in one process without a transport. The 8 KB
state is the result of a step, as a model's response would be.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dbos import DBOS, DBOSConfig

from benchmarks.rivals import driver, job


@DBOS.step()
async def load_state() -> list[dict[str, Any]]:
    """The root's state while it waits."""
    return list(job.history())


@DBOS.workflow()
async def peer(question: str) -> str:
    """Answer at once."""
    return job.answer()


@DBOS.workflow()
async def root(fan_out: int) -> str:
    """Ask `fan_out` peers."""
    await load_state()
    handles = [await DBOS.start_workflow_async(peer, job.QUESTION) for _ in range(fan_out)]
    return job.summary([await handle.get_result() for handle in handles])


@asynccontextmanager
async def running(db_url: str) -> AsyncIterator[driver.Ask]:
    """Start DBOS in this process, and yield a function that runs one job."""
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": db_url,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()
    try:

        async def ask(fan_out: int) -> object:
            return await (await DBOS.start_workflow_async(root, fan_out)).get_result()

        yield ask
    finally:
        DBOS.destroy()


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("db_url")
    driver.serve(running(parser.parse_args(sys.argv[1:]).db_url))


if __name__ == "__main__":
    main()
