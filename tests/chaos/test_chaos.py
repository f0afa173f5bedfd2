"""Every fault in each test run, for less than a minute; `make chaos` is the long form.

The seed also chooses the broker, so a run of the suite tests only one.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from servers import PostgresServer, RabbitServer, RedisServer

from .event_counts import find_replies_in_doubt
from .fault_plan import FaultKind, make_plan
from .run import RunConfig, run

_SECONDS = 45
"""Enough for eight kills and one fault of every other kind."""
SEED = int(os.environ.get("MESHPOINT_CHAOS_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # plus the last answers on a busy machine
async def test_nothing_is_lost_in_chaos(
    request: pytest.FixtureRequest,
    own_postgres: PostgresServer,
    own_redis: RedisServer,
    tmp_path: Path,
) -> None:
    rabbit: RabbitServer | None = None
    if SEED % 2:
        rabbit = request.getfixturevalue("own_rabbit")
    broker = "PostgreSQL alone" if rabbit is None else "RabbitMQ and PostgreSQL"
    print(f"seed {SEED} on {broker}: MESHPOINT_CHAOS_SEED={SEED} repeats the plan")
    config = RunConfig(seed=SEED, seconds=_SECONDS, rate=6, history_folder=tmp_path)
    report = await run(config, rabbit, own_postgres, own_redis)
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


@pytest.mark.parametrize("seconds", [_SECONDS, 60, 300, 1200])
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


def test_a_plan_can_stop_the_database_at_regular_intervals() -> None:
    faults = make_plan(1, 300, 20)
    times = {fault.at for fault in faults if fault.kind is FaultKind.DATABASE_RESTART}
    assert times >= set(range(40, 270, 20))
    assert len(faults) == len(make_plan(1, 300)) + 12


_BEFORE_ROW = [("segment", "after"), ("reply", "before")]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (_BEFORE_ROW, [("redelivered", "info"), ("segment", "after"), ("end", "after")], {"t"}),
        ([*_BEFORE_ROW, ("reply", "after"), ("ack", "after")], [], set()),
        ([("segment", "after"), ("end", "after"), *_BEFORE_ROW], [("redelivered", "info")], set()),
        ([("segment", "before")], [("redelivered", "info"), *_BEFORE_ROW[1:]], set()),
    ],
    ids=["redelivered", "acked", "stored", "only re-sent"],
)
def test_a_reply_is_in_doubt_if_its_request_comes_back(
    tmp_path: Path,
    first: list[tuple[str, str]],
    second: list[tuple[str, str]],
    expected: set[str],
) -> None:
    for name, events in (("1", first), ("2", second)):
        lines = [
            json.dumps([at, step, phase, "leaf", ["t"], {"type": "request"}])
            for at, (step, phase) in enumerate(events)
        ]
        (tmp_path / f"{name}.events").write_text("".join(f"{line}\n" for line in lines))
    assert find_replies_in_doubt(tmp_path) == expected
