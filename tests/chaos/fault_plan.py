"""Which fault strikes when: derived from a seed before the run starts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Kinds of fault."""

    KILL = "kill"  # SIGKILL to a replica
    FREEZE = "freeze"  # SIGSTOP until after the lease has expired, then SIGCONT
    ROLLING_RESTART = "roll"  # SIGTERM to each replica in turn, like a deployment
    BROKER_RESTART = "broker"  # the broker restarts, alternately immediate and clean
    DATABASE_RESTART = "database"  # PostgreSQL stops immediately and restarts
    REDIS_FLUSH = "flush"  # FLUSHALL: deletes every working memory and snapshot in Redis
    REDIS_RESTART = "redis"  # Redis is killed and restarted: it loses what is not on disk yet
    CUT_BROKER = "cut broker"  # a replica's connections to the broker are reset
    CUT_DATABASE = "cut database"  # a replica's connections to PostgreSQL are reset
    SILENCE = "silence"  # a replica's connections to both stay open but carry nothing
    LOCKED_ROWS = "locked rows"  # a session locks rows of tasks, calls and joins
    BAD_REPLY_QUEUES = "bad reply queues"  # requests whose reply queue is full or missing
    POISON = "poison"  # a request that kills each process that runs it
    FLOOD = "flood"  # one sender requests a thousand tasks at once
    CLOCK_STEP = "clock step"  # the clock of a replica jumps ahead, and back later
    # a replica drains while agent code ignores its cancel for a minute
    IGNORED_CANCEL = "swallowed cancel"


PER_MINUTE = {
    FaultKind.KILL: 12.5,
    FaultKind.FREEZE: 2.0,
    FaultKind.ROLLING_RESTART: 0.6,
    FaultKind.BROKER_RESTART: 0.6,
    FaultKind.DATABASE_RESTART: 0.6,
    FaultKind.REDIS_FLUSH: 1.5,
    FaultKind.REDIS_RESTART: 0.6,
    FaultKind.CUT_BROKER: 1.5,
    FaultKind.CUT_DATABASE: 1.5,
    FaultKind.SILENCE: 0.6,
    FaultKind.LOCKED_ROWS: 2.0,
    FaultKind.BAD_REPLY_QUEUES: 0.6,
    FaultKind.POISON: 0.3,
    FaultKind.FLOOD: 0.3,
    FaultKind.CLOCK_STEP: 0.6,
    FaultKind.IGNORED_CANCEL: 0.3,
}
DURATIONS = {
    # the lease is 2 s; the broker drops a silent connection after about 10 s
    FaultKind.FREEZE: (3.0, 13.0),
    FaultKind.BROKER_RESTART: (0.0, 3.0),
    FaultKind.DATABASE_RESTART: (0.0, 5.0),  # a first checkpoint is retried for 2 s
    FaultKind.REDIS_RESTART: (0.0, 3.0),
    FaultKind.SILENCE: (3.0, 9.0),
    FaultKind.LOCKED_ROWS: (2.0, 6.0),
    FaultKind.BAD_REPLY_QUEUES: (4.0, 10.0),
    FaultKind.CLOCK_STEP: (5.0, 15.0),
}
BLOCK_SECONDS = 300.0
"""Seconds per block. Its first tenth is fault-free, as a baseline."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `at` seconds from the start; `target` in 0..1 picks the replica."""

    at: float
    kind: FaultKind
    target: float
    duration: float = 0.0
    immediate: bool = True


def make_plan(seed: int, seconds: float, database_every: float | None = None) -> list[Fault]:
    """All faults of a run in time order. Each kind occurs at its rate, and at least once.

    With `database_every`, PostgreSQL also stops this often, in seconds.
    """
    rng = random.Random(seed)
    quiet_seconds = min(seconds, BLOCK_SECONDS) / 10
    blocks = max(1, round(seconds / BLOCK_SECONDS))
    active_seconds = seconds - (blocks + 1) * quiet_seconds  # fault-free at the end too
    faults = [
        fault for kind in FaultKind for fault in _faults_of(kind, rng, seconds, active_seconds)
    ]
    active_per_block = active_seconds / blocks
    shifted = [
        _shifted(fault, quiet_seconds * (1 + fault.at // active_per_block)) for fault in faults
    ]
    if database_every is not None:
        times = range(1, int((seconds - quiet_seconds) / database_every) + 1)
        stops = [Fault(n * database_every, FaultKind.DATABASE_RESTART, 0.0) for n in times]
        shifted += [stop for stop in stops if stop.at > quiet_seconds]
    return sorted(shifted, key=lambda fault: fault.at)


def _faults_of(
    kind: FaultKind, rng: random.Random, seconds: float, active_seconds: float
) -> Iterator[Fault]:
    count = max(1, round(PER_MINUTE[kind] * seconds / 60))
    for number in range(count):
        at = (number + rng.random() * 0.999) * active_seconds / count
        duration = rng.uniform(*DURATIONS.get(kind, (0.0, 0.0)))
        immediate = kind is not FaultKind.BROKER_RESTART or number % 2 == 0
        yield Fault(at, kind, rng.random(), duration, immediate)


def _shifted(fault: Fault, offset: float) -> Fault:
    return Fault(fault.at + offset, fault.kind, fault.target, fault.duration, fault.immediate)
