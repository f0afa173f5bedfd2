"""A minute of mutated messages on both brokers, in each run of the tests; `make fuzz` is the long form."""

from __future__ import annotations

import os
import random

import pytest

from servers import PostgresServer, RabbitServer

from .amqp import Letter, field_value, readable
from .branches import branches
from .excluded import is_a_matter_of_time, reason_never, reason_to_exclude
from .recipes import RECIPES, Cook, World, a_request
from .run import Wish, run

SEED = int(os.environ.get("MESHPOINT_FUZZ_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute, and as long as a busy machine needs for the last answers
async def test_mutated_messages_harm_nobody_on_rabbitmq(
    own_rabbit: RabbitServer, own_postgres: PostgresServer
) -> None:
    print(f"seed {SEED}: MESHPOINT_FUZZ_SEED={SEED} repeats the messages")
    wish = Wish(SEED, 60.0, "rabbitmq", by_the_clock=False, reached=1)
    report = await run(wish, own_rabbit, own_postgres)
    assert report.good, (
        SEED,
        report.faults,
        report.unreached,
        report.defects,
        report.unaccounted,
        report.connections,
        report.honest[:3],
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_mutated_rows_harm_nobody_on_sqlite() -> None:
    print(f"seed {SEED}: MESHPOINT_FUZZ_SEED={SEED} repeats the messages")
    report = await run(Wish(SEED, 15.0, "sqlite", by_the_clock=False, reached=0), None, None)
    assert report.good, (SEED, report.faults, report.defects, report.unaccounted, report.honest[:3])


def test_messages_repeat() -> None:
    def marks(seed: int) -> list[str]:
        cook = Cook(World(random.Random(seed)), list(RECIPES))
        return [made[0] for _ in range(200) if (made := cook.next())]

    assert marks(7) == marks(7) != marks(8)


def test_what_is_written_by_hand_can_be_read() -> None:
    letter = a_request(World(random.Random(1))).with_headers({"x-deadline": 1.5, "x-attempt": 3, "traceparent": "t"})
    found = readable(letter.header_payload())
    assert found is not None
    properties, headers = found
    assert properties["app_id"] == "mallory"
    assert headers == {"x-call-depth": 0, "x-deadline": 1.5, "x-attempt": 3, "traceparent": "t"}
    assert readable(Letter("k", {"app_id": b"\xff"}).header_payload()) is None
    assert field_value([None, True]) == b"A\0\0\0\x03Vt\x01"


def test_there_are_branches_and_most_are_judged() -> None:
    every = branches()
    excluded = [branch for branch in every if reason_to_exclude(branch)]
    assert len(every) > 150
    assert len(excluded) <= 20
    assert not [branch for branch in excluded if reason_never(branch)]
    assert len([branch for branch in every if is_a_matter_of_time(branch)]) < len(every) / 3
