"""Histories exported by earlier releases stay readable forever. Add files here; change none."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from meshpoint import (
    Context,
    Done,
    Paused,
    Peer,
    Question,
    Replies,
    StatefulAgent,
    agent,
)
from meshpoint.testing import replay_history

FOLDER = Path(__file__).parent / "histories"
flights = Peer("flights", str, int)
weather = Peer("weather", str, str)
approval = Question("approval", bool)


def book(city: str) -> str:
    raise AssertionError(f"{city} is booked again")


@agent("travel")
async def travel(ctx: Context, city: str) -> str:
    """Everything that a function can record."""
    started, key = ctx.now(), ctx.uuid4()
    booked = await ctx.step("book", book, city)
    price, text = await ctx.gather(flights(city), weather(f"{city} {key}"))
    await ctx.sleep(timedelta(hours=1))
    report = await ctx.subtask("report", book, city)
    await ctx.memory.set("price", str(price))
    if not await ctx.wait_for(approval, prompt=f"Pay {price}?"):
        return "nothing"
    paid = (await ctx.memory.get("price") or b"").decode()
    return f"{booked} {report} {await weather(f'{paid} {text} {started.isoformat()}')}"


class Planner(StatefulAgent[str, str, str]):
    name = "planner"

    async def on_request(self, ctx: Context, request: str) -> Paused | Done[str]:
        return self.ask(request, {"price": flights(request)}, then=self.on_price)

    async def on_price(self, ctx: Context, state: str, replies: Replies) -> Paused | Done[str]:
        price = replies.value("price", flights)
        return self.ask(state, {"sky": weather(f"{state} {price}")}, then=self.on_sky)

    async def on_sky(self, ctx: Context, state: str, replies: Replies) -> Paused | Done[str]:
        return self.done(state)


@pytest.mark.parametrize(
    ("file", "passed", "stopped_at"),
    [
        ("travel_waiting.json", 4, "its last pause, which waits for 'weather'"),
        ("travel_ready.json", 3, "a new call to 'weather'"),
        ("planner_ready.json", 0, "a new call to 'weather'"),
    ],
)
async def test_the_file_replays(file: str, passed: int, stopped_at: str) -> None:
    code = Planner() if file.startswith("planner") else travel
    replayed = await replay_history(code, FOLDER / file)
    assert (replayed.passed, replayed.stopped_at) == (passed, stopped_at)


def test_every_file_is_replayed() -> None:
    assert len(list(FOLDER.glob("*.json"))) == 3
