"""One minute of mutated messages on both brokers in each test run; `make fuzz` is the long form."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import pytest

from servers import PostgresServer, RabbitServer

from .amqp import Letter, field_value, readable
from .branches import Counting, branches
from .excluded import is_a_matter_of_time, reason_never, reason_to_exclude
from .recipes import RECIPES, Cook, World, a_request
from .run import Wish, run

SEED = int(os.environ.get("MESHPOINT_FUZZ_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one minute, plus the last answers on a busy machine
async def test_mutated_messages_harm_nobody_on_rabbitmq(
    own_rabbit: RabbitServer, own_postgres: PostgresServer
) -> None:
    print(f"seed {SEED}: MESHPOINT_FUZZ_SEED={SEED} repeats the messages")
    wish = Wish(SEED, 60.0, "rabbitmq", by_the_clock=False, reached=1)
    report = await run(wish, own_rabbit, own_postgres)
    print(*report.connections, sep="\n")
    assert report.good, (SEED, report.faults, report.unreached, report.defects, report.unaccounted, report.honest[:3])


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


_COUNTED = """
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
    (tmp_path / "fuzz_counted.py").write_text(_COUNTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("fuzz_counted")
    counting = Counting(("fuzz_counted",))
    counting.start()
    assert [module.caught(1), module.caught(2), module.caught(0), await module.waits()] == ["one", 2, 5, [1, 2]]
    assert {
        f"{branch.function}: {branch.what}": counting.counts[branch.module, branch.line]
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


def test_there_are_branches_and_most_are_judged() -> None:
    every = branches()
    excluded = [branch for branch in every if reason_to_exclude(branch)]
    assert len(every) > 150
    assert len(excluded) <= 20
    assert not [branch for branch in excluded if reason_never(branch)]
    assert len([branch for branch in every if is_a_matter_of_time(branch)]) < len(every) / 3
