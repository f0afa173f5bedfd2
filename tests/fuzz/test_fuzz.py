"""A minute of mutated messages on RabbitMQ, and less of rows; `make fuzz` is the long form.

The seed also chooses the database of the rows, so a run of the suite tests only one.
"""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import pytest

from servers import PostgresServer, RabbitServer

from .amqp import WireMessage, decode_header, encode_field
from .branches import BranchCounter, branches
from .excluded_branches import (
    depends_on_timing,
    reason_to_exclude,
    reason_unreachable,
    rules_without_branch,
)
from .recipes import RECIPES, FuzzState, RecipeScheduler, make_request
from .run import RunConfig, run

_QUIET_SECONDS = 2.0
"""Honest traffic alone is the baseline for latencies, which the long form compares."""
SEED = int(os.environ.get("MESHPOINT_FUZZ_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # plus the last answers on a busy machine
async def test_mutated_messages_do_not_affect_valid_requests_on_rabbitmq(
    own_rabbit: RabbitServer, own_postgres: PostgresServer
) -> None:
    print(f"seed {SEED}: MESHPOINT_FUZZ_SEED={SEED} repeats the messages")
    config = RunConfig(
        SEED,
        60.0,  # and then more until each branch was reached
        "rabbitmq",
        quiet_seconds=_QUIET_SECONDS,
        check_timing=False,
        min_branch_hits=1,
    )
    report = await run(config, own_rabbit, own_postgres)
    print(*report.connections, *report.unreached, sep="\n")
    assert report.good, (
        SEED,
        report.faults,
        report.unreached,
        report.defects,
        report.unaccounted,
        report.honest[:3],
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_mutated_rows_do_not_affect_valid_requests(own_postgres: PostgresServer) -> None:
    broker, postgres = ("postgresql", own_postgres) if SEED % 2 else ("sqlite", None)
    print(f"seed {SEED} on {broker}: MESHPOINT_FUZZ_SEED={SEED} repeats the messages")
    config = RunConfig(
        SEED,
        8.0,
        broker,
        quiet_seconds=_QUIET_SECONDS,
        check_timing=False,
        min_branch_hits=0,
    )
    report = await run(config, None, postgres)
    assert report.good, (
        SEED,
        report.faults,
        report.defects,
        report.unaccounted,
        report.honest[:3],
    )


def test_the_same_seed_produces_the_same_messages() -> None:
    def chosen_recipes(seed: int) -> list[str]:
        scheduler = RecipeScheduler(FuzzState(random.Random(seed)), list(RECIPES))
        return [chosen[0] for _ in range(200) if (chosen := scheduler.next())]

    assert chosen_recipes(7) == chosen_recipes(7) != chosen_recipes(8)


def test_hand_encoded_headers_can_be_decoded() -> None:
    message = make_request(FuzzState(random.Random(1))).with_headers(
        {"x-deadline": 1.5, "x-attempt": 3, "traceparent": "t"}
    )
    decoded = decode_header(message.header_payload())
    assert decoded is not None
    properties, headers = decoded
    assert properties["app_id"] == "mallory"
    assert headers == {"x-call-depth": 0, "x-deadline": 1.5, "x-attempt": 3, "traceparent": "t"}
    assert decode_header(WireMessage("k", {"app_id": b"\xff"}).header_payload()) is None
    assert encode_field([None, True]) == b"A\0\0\0\x03Vt\x01"


_SAMPLE_MODULE = """
import asyncio
from functools import lru_cache

class Box:
    def open(self, value):
        match value:
            case 1:
                found = "one"
            case _:
                return self.inner(value)()
        return found

    def inner(self, value):
        def later():
            if value:
                return value
            else:
                raise ValueError
        return later

@lru_cache
def caught(value, *, default=5):
    try:
        return Box().open(value)
    except ValueError:
        pass
    return default

async def waits():
    for number in range(3):
        await asyncio.sleep(0)
        if number % 2 == 0:
            await asyncio.sleep(0)
    return [each for each in (1, 2) if each]
"""


async def test_taken_branches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fuzz_counted.py").write_text(_SAMPLE_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("fuzz_counted")
    counting = BranchCounter(("fuzz_counted",))
    counting.start()
    assert [module.caught(1), module.caught(2), module.caught(0), await module.waits()] == [
        "one",
        2,
        5,
        [1, 2],
    ]
    assert {
        f"{branch.function}: {branch.text}": counting.counts[branch.module, branch.line]
        for branch in branches(("fuzz_counted",))
    } == {
        'Box.open: case 1: found = "one"': 1,
        "Box.open: case _: return self.inner(value)()": 2,
        "Box.open: return found": 1,
        "Box.inner.later: if value: return value": 1,
        "Box.inner.later: not value: raise ValueError": 1,
        "Box.inner: return later": 2,
        "caught: return Box().open(value)": 3,
        "caught: except ValueError: pass": 1,
        "caught: return default": 1,
        "waits: if number % 2 == 0: await asyncio.sleep(0)": 2,
        "waits: return [each for each in (1, 2) if each]": 1,
    }


def test_most_branches_of_message_handling_are_checked() -> None:
    every = branches()
    excluded = [branch for branch in every if reason_to_exclude(branch)]
    assert len(every) > 150
    assert len(excluded) < len(every) / 12
    assert not [branch for branch in excluded if reason_unreachable(branch)]
    assert len([branch for branch in every if depends_on_timing(branch)]) < len(every) / 3


def test_every_rule_about_branches_matches_one() -> None:
    assert rules_without_branch(branches()) == []
    without_requests = [each for each in branches() if each.module != "meshpoint.engine.requests"]
    assert rules_without_branch(without_requests)
