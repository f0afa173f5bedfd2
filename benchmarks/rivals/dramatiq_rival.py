"""dramatiq on Redis, two processes of eight threads: `python -m …rivals.dramatiq_rival URL`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from uuid import uuid4

from benchmarks.rivals import driver

_PROCESSES, _WORKER_THREADS = 2, 8
_TIMEOUT_SECONDS = 600.0
"""Maximum seconds for an answer, far more than needed."""
_POLL_MILLISECONDS = 10
"""Maximum time between two polls of an idle worker. The default, a second, would be its speed."""


def running(url: str) -> AbstractAsyncContextManager[driver.Ask]:
    """Start workers, and yield a function that runs one job."""
    os.environ["DRAMATIQ_URL"] = f"{url}?socket_timeout={_TIMEOUT_SECONDS}"
    os.environ["dramatiq_worker_timeout"] = str(_POLL_MILLISECONDS)  # noqa: SIM112  # theirs
    sizes = ["--processes", str(_PROCESSES), "--threads", str(_WORKER_THREADS)]
    command = [sys.executable, "-m", "dramatiq", "benchmarks.rivals.dramatiq_app", *sizes]
    return driver.asking_workers(command, _connect)


def _connect() -> Callable[[int], object]:
    from benchmarks.rivals.dramatiq_app import result_of, root

    def run_job(fan_out: int) -> object:
        job_id = str(uuid4())
        root.send(fan_out, job_id)
        return result_of(job_id, _TIMEOUT_SECONDS)

    return run_job


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("url")
    driver.serve(running(parser.parse_args().url))


if __name__ == "__main__":
    main()
