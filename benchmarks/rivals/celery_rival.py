"""Celery on Redis with two worker processes: `python -m benchmarks.rivals.celery_rival URL`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from benchmarks.rivals import driver

_WORKERS = 2
_TIMEOUT_SECONDS = 600.0
"""Maximum seconds for an answer, far more than needed."""


def running(url: str) -> AbstractAsyncContextManager[driver.Ask]:
    """Start a worker, and yield a function that runs one job."""
    os.environ["CELERY_URL"] = url
    app = ["-A", "benchmarks.rivals.celery_app"]
    options = ["--pool", "prefork", "--concurrency", str(_WORKERS), "--loglevel", "ERROR"]
    options += ["--without-gossip", "--without-mingle"]
    command = [sys.executable, "-W", "ignore", "-m", "celery", "--quiet", *app, "worker", *options]
    return driver.asking_workers(command, _connect)


def _connect() -> Callable[[int], object]:
    from benchmarks.rivals.celery_app import root

    def run_job(fan_out: int) -> object:
        return root.delay(fan_out).get(timeout=_TIMEOUT_SECONDS)

    return run_job


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("url")
    driver.serve(running(parser.parse_args().url))


if __name__ == "__main__":
    main()
