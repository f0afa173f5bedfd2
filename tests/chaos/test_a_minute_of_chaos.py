"""One minute of every fault in each test run; `make chaos` is the long form."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from servers import PostgresServer, RabbitServer, RedisServer

from .plan import Kind, plan
from .run import Wish, run

SEED = int(os.environ.get("MESHPOINT_CHAOS_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one minute, plus the last answers on a busy machine
async def test_a_minute_of_chaos(
    own_rabbit: RabbitServer, own_postgres: PostgresServer, own_redis: RedisServer, tmp_path: Path
) -> None:
    print(f"seed {SEED}: MESHPOINT_CHAOS_SEED={SEED} repeats the plan")
    wish = Wish(seed=SEED, seconds=60, rate=6, stories=tmp_path)
    report = await run(wish, own_rabbit, own_postgres, own_redis)
    verdict = {"lost": report.lost, "duplicated": report.duplicated, "stuck": report.stuck, "wrong": report.wrong}
    assert verdict == dict.fromkeys(verdict, 0), (SEED, report.leftovers, report.bad)
    assert report.answers == report.requests
    assert all(report.faults[kind.value] >= 1 for kind in Kind), report.faults
    assert report.faults["kill"] >= 8
    assert report.effects >= report.answers
    assert report.late_drains == 0


def test_a_plan_repeats() -> None:
    assert plan(7, 60) == plan(7, 60) != plan(8, 60)


@pytest.mark.parametrize("seconds", [60, 300, 1200])
def test_a_plan_fits_its_time(seconds: int) -> None:
    faults = plan(1, seconds)
    assert {fault.kind for fault in faults} == set(Kind)
    assert faults == sorted(faults, key=lambda fault: fault.at)
    assert all(0 < fault.at < seconds for fault in faults)


def test_twenty_minutes_hold_what_was_promised() -> None:
    kinds = [fault.kind for fault in plan(1, 1200)]
    assert kinds.count(Kind.KILL) >= 200
    assert kinds.count(Kind.BROKER) >= 10
    assert kinds.count(Kind.DATABASE) >= 10
