"""A minute of mutated messages on both brokers, in each run of the tests; `make fuzz` is the long form."""

from __future__ import annotations

import os
import random

from .amqp import Letter, field_value, readable
from .branches import branches
from .excluded import reason_to_exclude
from .recipes import RECIPES, Cook, World, a_request

SEED = int(os.environ.get("MESHPOINT_FUZZ_SEED", random.SystemRandom().randrange(1_000_000)))


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
    assert len(every) > 100
    assert len(excluded) < len(every) / 3
