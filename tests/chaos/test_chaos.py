"""One minute of every fault in each test run; `make chaos` is the long form."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from servers import PostgresServer, RabbitServer, RedisServer

from .fault_plan import FaultKind, make_plan
from .run import RunConfig, run

SEED = int(os.environ.get("MESHPOINT_CHAOS_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one minute, plus the last answers on a busy machine
async def test_nothing_is_lost_in_a_minute_of_chaos(
    own_rabbit: RabbitServer, own_postgres: PostgresServer, own_redis: RedisServer, tmp_path: Path
) -> None:
    print(f"seed {SEED}: MESHPOINT_CHAOS_SEED={SEED} repeats the plan")
    config = RunConfig(seed=SEED, seconds=60, rate=6, history_folder=tmp_path)
    report = await run(config, own_rabbit, own_postgres, own_redis)
    verdict = {
        "lost": report.lost,
        "duplicated": report.duplicated,
        "stuck": report.stuck,
        "wrong": report.wrong,
    }
    assert verdict == dict.fromkeys(verdict, 0), (SEED, report.leftovers, report.bad)
    assert report.answers == report.requests
    assert all(report.faults[kind.value] >= 1 for kind in FaultKind), report.faults
    assert report.faults["kill"] >= 8
    assert report.effects >= report.answers
    assert report.late_drains == 0


def test_a_fault_plan_is_the_same_for_the_same_seed() -> None:
    assert make_plan(7, 60) == make_plan(7, 60) != make_plan(8, 60)


@pytest.mark.parametrize("seconds", [60, 300, 1200])
def test_all_faults_fit_into_the_run(seconds: int) -> None:
    faults = make_plan(1, seconds)
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert faults == sorted(faults, key=lambda fault: fault.at)
    assert all(0 < fault.at < seconds for fault in faults)


def test_a_twenty_minute_plan_contains_the_documented_faults() -> None:
    counts = [fault.kind for fault in make_plan(1, 1200)]
    assert counts.count(FaultKind.KILL) >= 200
    assert counts.count(FaultKind.BROKER_RESTART) >= 10
    assert counts.count(FaultKind.DATABASE_RESTART) >= 10
