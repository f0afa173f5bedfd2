"""Each segment runs twice, and a difference fails the test."""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from meshpoint import Done, Paused, Peer, Replies, StatefulAgent, TaskExecutionContext, agent
from meshpoint.testing import ReplayDiffers, TestMesh
from meshpoint.testing.replay_check import find_difference


class Query(BaseModel):
    city: str
    id: str = ""


flights = Peer("flights", Query, int)
weather = Peer("weather", str, str)
runs: Counter[str] = Counter()


def book(city: str) -> str:
    runs["book"] += 1
    return f"{city} {uuid.uuid4()}"


@agent("steady")
async def steady(ctx: TaskExecutionContext, city: str) -> str:
    runs["steady"] += 1
    booked = await ctx.step("book", book, city)
    price, sky = await ctx.gather(flights(Query(city=booked)), weather(city))
    await ctx.step("book", book, city)
    async with asyncio.timeout(60):
        await asyncio.sleep(random.Random(7).random() / 1000)
    ctx.flags["sky"] = sky
    return f"{price} {sky} {await weather(str(price))}"


async def test_a_deterministic_agent_passes() -> None:
    runs.clear()
    async with TestMesh(steady, always_replay=True) as mesh:
        asked = mesh.stub(flights).returns(120)
        mesh.stub(weather).returns("sunny")
        assert await mesh.call(steady, "Rome") == "120 sunny sunny"
    assert len(asked.requests) == 1
    assert runs == {"book": 2, "steady": 6}, "each of three segments runs twice, each step once"


@agent("careless")
async def careless(ctx: TaskExecutionContext, city: str) -> int:
    await weather(city)
    return await flights(Query(city=city, id=str(uuid.uuid4())))  # the line in the message


async def test_the_call_the_field_and_the_place_are_named() -> None:
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# the line in the message" in text
    )
    async with TestMesh(careless, always_replay=True) as mesh:
        mesh.stub(flights).returns(120)
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers) as error:
            await mesh.call(careless, "Rome")
    place = f"test_replay_check.py:{line}: uuid.uuid4() → ctx.uuid4()"
    assert str(error.value) == f"replay differs at call 2 (input.id); {place}"


@pytest.mark.parametrize(
    ("read", "name", "advice"),
    [
        (lambda: datetime.datetime.now(datetime.UTC).isoformat(), "datetime.now", "now"),
        (lambda: str(time.time_ns()), "time.time_ns", "now"),
        (lambda: str(random.random()), "random.random", "random"),
        (lambda: str(random.randrange(2**60)), "random.randrange", "random"),
        (lambda: secrets.token_hex(8), "secrets.token_hex", "random"),
        (lambda: os.urandom(8).hex(), "os.urandom", "random"),
    ],
)
async def test_clocks_and_chance_are_found(
    read: Callable[[], str], name: str, advice: str
) -> None:
    @agent("impure")
    async def impure(ctx: TaskExecutionContext, city: str) -> str:
        return await weather(read())

    async with TestMesh(impure, always_replay=True) as mesh:
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers) as error:
            await mesh.call(impure, "Rome")
    assert f": {name}() → ctx.{advice}()" in str(error.value)


async def test_the_values_of_the_context_are_the_same_in_both_runs() -> None:
    @agent("pure")
    async def pure(ctx: TaskExecutionContext, city: str) -> str:
        first = await weather(f"{ctx.uuid4()} {ctx.now()} {ctx.random().random()}")
        await ctx.sleep(3600)
        return await weather(f"{first} {ctx.uuid4()} {ctx.now()} {ctx.random().random()}")

    async with TestMesh(pure, always_replay=True) as mesh:
        asked = mesh.stub(weather).calls(str.upper)
        await mesh.call(pure, "Rome")
        assert len(asked.requests) == 2


async def test_another_result_and_another_step_differ() -> None:
    @agent("fickle")
    async def fickle(ctx: TaskExecutionContext, part: str) -> int:
        runs[part] += 1
        if part == "step" and runs[part] == 1:
            await ctx.step("once", book, "Rome")
        return runs[part] if part == "result" else 0

    runs.clear()
    async with TestMesh(fickle, always_replay=True) as mesh:
        with pytest.raises(ReplayDiffers, match="replay differs in the result"):
            await mesh.call(fickle, "result")
        with pytest.raises(ReplayDiffers, match="at a step: 'once' ran only in the first run"):
            await mesh.call(fickle, "step")


class Plan(BaseModel):
    city: str
    nonce: str


class Classy(StatefulAgent[str, Plan, str]):
    name = "classy"

    async def on_request(self, ctx: TaskExecutionContext, city: str) -> Paused | Done[str]:
        plan = Plan(city=city, nonce=uuid.uuid4().hex)
        return self.ask(plan, {"sky": weather(city)}, then=self.on_sky)

    async def on_sky(
        self, ctx: TaskExecutionContext, state: Plan, replies: Replies
    ) -> Paused | Done[str]:
        return self.done(replies.value("sky", weather))


async def test_the_state_of_a_class_agent_is_compared() -> None:
    async with TestMesh(Classy(), always_replay=True) as mesh:
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers, match=r"at the pause \(state\..*nonce\)"):
            await mesh.call(Classy(), "Rome")


def test_the_path_of_a_difference() -> None:
    assert find_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "input") == "input.a[1].b"
    assert find_difference({"a": 1}, {"a": 1}, "input") is None
    assert find_difference([1], [1, 2], "input") == "input"
