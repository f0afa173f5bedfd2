"""Which fault strikes when: derived from a seed before the run starts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of fault."""

    KILL = "kill"  # SIGKILL to a replica
    FREEZE = "freeze"  # SIGSTOP until after the lease has expired, then SIGCONT
    ROLL = "roll"  # SIGTERM to each replica in turn, like a deployment
    BROKER = "broker"  # RabbitMQ restarts, alternately immediate and clean
    DATABASE = "database"  # PostgreSQL stops immediately and restarts
    FLUSH = "flush"  # FLUSHALL: deletes every working memory and snapshot in Redis
    REDIS = "redis"  # Redis is killed and restarted: it loses what is not on disk yet
    CUT_BROKER = "cut broker"  # a replica's connections to RabbitMQ are reset
    CUT_DATABASE = "cut database"  # a replica's connections to PostgreSQL are reset
    SILENCE = "silence"  # a replica's connections to both stay open but carry nothing
    LOCK = "locked rows"  # a session locks rows of tasks, calls and joins
    REPLIES = "bad reply queues"  # requests whose reply queue is full or missing
    POISON = "poison"  # a request that kills each process that runs it
    FLOOD = "flood"  # one sender requests a thousand tasks at once
    CLOCK = "clock step"  # the clock of a replica jumps ahead, and back later
    # a replica drains while agent code ignores its cancel for a minute
    SWALLOW = "swallowed cancel"


PER_MINUTE = {
    Kind.KILL: 12.5,
    Kind.FREEZE: 2.0,
    Kind.ROLL: 0.6,
    Kind.BROKER: 0.6,
    Kind.DATABASE: 0.6,
    Kind.FLUSH: 1.5,
    Kind.REDIS: 0.6,
    Kind.CUT_BROKER: 1.5,
    Kind.CUT_DATABASE: 1.5,
    Kind.SILENCE: 0.6,
    Kind.LOCK: 2.0,
    Kind.REPLIES: 0.6,
    Kind.POISON: 0.3,
    Kind.FLOOD: 0.3,
    Kind.CLOCK: 0.6,
    Kind.SWALLOW: 0.3,
}
SECONDS = {
    # the lease is 2 s; the broker drops a silent connection after about 10 s
    Kind.FREEZE: (3.0, 13.0),
    Kind.BROKER: (0.0, 3.0),
    Kind.DATABASE: (0.0, 5.0),  # a first checkpoint is retried for 2 s
    Kind.REDIS: (0.0, 3.0),
    Kind.SILENCE: (3.0, 9.0),
    Kind.LOCK: (2.0, 6.0),
    Kind.REPLIES: (4.0, 10.0),
    Kind.CLOCK: (5.0, 15.0),
}
BLOCK = 300.0
"""Seconds per block. Its first tenth is fault-free, as a baseline."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at` seconds from the start, for `seconds`; `aim` in 0..1 picks the replica."""

    at: float
    kind: Kind
    aim: float
    seconds: float = 0.0
    immediate: bool = True


def plan(seed: int, seconds: float) -> list[Fault]:
    """All faults of a run in time order. Each kind occurs at its rate, and at least once."""
    chance = random.Random(seed)
    quiet = min(seconds, BLOCK) / 10
    blocks = max(1, round(seconds / BLOCK))
    active = seconds - (blocks + 1) * quiet  # fault-free at the end too
    faults = [fault for kind in Kind for fault in _of(kind, chance, seconds, active)]
    share = active / blocks
    moved = [_moved(fault, quiet * (1 + fault.at // share)) for fault in faults]
    return sorted(moved, key=lambda fault: fault.at)


def _of(kind: Kind, chance: random.Random, seconds: float, active: float) -> Iterator[Fault]:
    count = max(1, round(PER_MINUTE[kind] * seconds / 60))
    for number in range(count):
        at = (number + chance.random() * 0.999) * active / count
        length = chance.uniform(*SECONDS.get(kind, (0.0, 0.0)))
        immediate = kind is not Kind.BROKER or number % 2 == 0
        yield Fault(at, kind, chance.random(), length, immediate)


def _moved(fault: Fault, by: float) -> Fault:
    return Fault(fault.at + by, fault.kind, fault.aim, fault.seconds, fault.immediate)
