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

from meshpoint.engine import worker

from .loop import SimulatedLoop, Stuck
from .mesh import Mesh
from .plan import Plan
from .replicas import LeasesInLoop


@dataclass
class Report:
    """Result of a seed. `broken` is empty when no rule was broken."""

    seed: int
    broken: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Virtual seconds."""

    @property
    def digest(self) -> str:
        """Short hash of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        replay = f"replay: make simulation SEED={self.seed}"
        return f"seed {self.seed}: " + ("\n  ".join([*self.broken[:10], replay]) if self.broken else "well")


def simulate(seed: int) -> Report:
    """Run one seed from start to end."""
    report = Report(seed)
    loop = SimulatedLoop(Random(f"{seed}/order"), unruly=bool(seed % 2))

    def tell(what: str) -> None:
        report.trace.append(f"{loop.time():.5f} {what}")

    with _seeded(seed, loop), _defects(report), asyncio.Runner(loop_factory=lambda: loop) as runner:
        loop.set_exception_handler(lambda _, context: report.broken.append(f"unhandled: {context}"))
        try:
            runner.run(_live(seed, report, tell))
        except Stuck as stuck:
            report.broken.append(f"stuck: {stuck}")
    return report


def brief(seed: int) -> Report:
    """Run one seed and drop the trace."""
    report = simulate(seed)
    report.trace = []
    return report


async def _live(seed: int, report: Report, tell: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    mesh = Mesh(seed, loop, tell)
    plan = Plan(mesh, Random(f"{seed}/plan"))
    try:
        await plan.run()
    finally:
        report.broken += mesh.ledger.broken
        report.seconds = loop.time()
        trace = list(report.trace)
        broken = list(report.broken)
        await mesh.tear_down()
        report.trace, report.broken = trace, broken


@contextmanager
def _seeded(seed: int, loop: SimulatedLoop) -> Iterator[None]:
    """Derive ids and back-offs from the seed."""
    dice, before = Random(f"{seed}/ids"), random.getstate()
    random.seed(f"{seed}/back-off")

    def id_() -> uuid.UUID:
        milliseconds = int((1_767_225_600 + loop.time()) * 1000)
        return uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | dice.getrandbits(62))

    try:
        with patch.object(uuid_utils, "uuid7", id_), patch.object(worker, "LeaseKeeper", LeasesInLoop):
            yield
    finally:
        random.setstate(before)


class _Errors(logging.Handler):
    """Collects errors that the product logs: each is a defect that it survived."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Record it."""
        why = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        self._report.broken.append(f"logged: {record.getMessage()} {why}")


@contextmanager
def _defects(report: Report) -> Iterator[None]:
    handler, logger = _Errors(report), logging.getLogger("meshpoint")
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
