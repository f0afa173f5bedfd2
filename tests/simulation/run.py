"""One simulated day of a mesh: `simulate(seed)`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

import uuid_utils

from meshpoint.engine import runtime

from .fault_plan import FaultPlan
from .loop import Deadlock, SimulatedLoop
from .mesh import Mesh
from .replicas import EventLoopLeaseRenewer


@dataclass
class Report:
    """Result of a seed. `violations` is empty when no rule was broken."""

    seed: int
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Virtual seconds."""

    @property
    def digest(self) -> str:
        """Short hash of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        replay = f"replay: make simulation SEED={self.seed}"
        return f"seed {self.seed}: " + (
            "\n  ".join([*self.violations[:10], replay]) if self.violations else "well"
        )


def simulate(seed: int) -> Report:
    """Run one seed from start to end."""
    report = Report(seed)
    loop = SimulatedLoop(Random(f"{seed}/order"), shuffles=bool(seed % 2))

    def trace(what: str) -> None:
        report.trace.append(f"{loop.time():.5f} {what}")

    with (
        _seed_ids(seed, loop),
        _collect_errors(report),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        loop.set_exception_handler(
            lambda _, context: report.violations.append(f"unhandled: {context}")
        )
        try:
            runner.run(_run_plan(seed, report, trace))
        except Deadlock as deadlock:
            report.violations.append(f"stuck: {deadlock}")
    return report


def simulate_without_trace(seed: int) -> Report:
    """Run one seed and drop the trace."""
    report = simulate(seed)
    report.trace = []
    return report


async def _run_plan(seed: int, report: Report, trace: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    mesh = Mesh(seed, loop, trace)
    plan = FaultPlan(mesh, Random(f"{seed}/plan"))
    try:
        await plan.run()
    finally:
        report.violations += mesh.ledger.violations
        report.seconds = loop.time()
        saved_trace = list(report.trace)
        saved_violations = list(report.violations)
        await mesh.tear_down()
        report.trace, report.violations = saved_trace, saved_violations


@contextmanager
def _seed_ids(seed: int, loop: SimulatedLoop) -> Iterator[None]:
    """Derive ids and back-offs from the seed."""
    rng, state_before = Random(f"{seed}/ids"), random.getstate()
    random.seed(f"{seed}/back-off")

    def id_() -> uuid.UUID:
        milliseconds = int((1_767_225_600 + loop.time()) * 1000)
        return uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | rng.getrandbits(62))

    try:
        with (
            patch.object(uuid_utils, "uuid7", id_),
            patch.object(runtime, "LeaseRenewer", EventLoopLeaseRenewer),
        ):
            yield
    finally:
        random.setstate(state_before)


class _ErrorCollector(logging.Handler):
    """Collects errors that the product logs: each is a defect that it survived."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Record it."""
        traceback = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        self._report.violations.append(f"logged: {record.getMessage()} {traceback}")


@contextmanager
def _collect_errors(report: Report) -> Iterator[None]:
    handler, logger = _ErrorCollector(report), logging.getLogger("meshpoint")
    propagate, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
