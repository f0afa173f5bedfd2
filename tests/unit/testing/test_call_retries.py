"""Retries of peer calls in virtual time: whole meshes, with stubs and real callees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from meshpoint import (
    AgentFailed,
    Context,
    Failed,
    Ok,
    Peer,
    PeerFailed,
    RetryPolicy,
    StatefulAgent,
    agent,
)
from meshpoint.errors import AgentMisbehaved, ConfigurationError
from meshpoint.model.calls import Call
from meshpoint.testing import MeshIdle, TestMesh

POLICY = RetryPolicy(max_attempts=4, initial_interval=2, max_interval=60, jitter=False)
prices = Peer("prices", str, int, timeout=20, retry=POLICY)


@agent("buyer")
async def buyer(ctx: Context, item: str) -> str:
    match await ctx.outcome(prices(item)):
        case Ok(value=price):
            return f"{price} EUR"
        case Failed(kind=kind, message=message):
            raise AgentFailed(f"{kind}: {message}")


@dataclass
class Times:
    """When requests arrived, in seconds since the first."""

    mesh: TestMesh
    seen: list[float]

    def add(self) -> None:
        self.seen.append(self.mesh._clock.monotonic())

    def waits(self) -> list[float]:
        return [
            round(later - earlier)
            for earlier, later in zip(self.seen, self.seen[1:], strict=False)
        ]


@pytest.mark.parametrize("always_replay", [False, True])
async def test_two_failures_and_a_result(always_replay: bool) -> None:
    async with TestMesh(buyer, always_replay=always_replay) as mesh:
        asked = mesh.stub(prices).fails("error", times=2).returns(7)
        assert await mesh.call(buyer, "tea") == "7 EUR"
        assert asked.requests == ["tea"] * 3


async def test_the_waits_grow() -> None:
    async with TestMesh(buyer) as mesh:
        times = Times(mesh, [])

        def fail(item: str) -> int:
            times.add()
            raise AgentFailed("busy")

        mesh.stub(prices).calls(fail)
        task = await mesh.send(buyer, "tea")
        outcome = await task.outcome()
        assert isinstance(outcome, Failed)
        assert outcome.message == "error: busy"
        assert times.waits() == [2, 4, 8]


async def test_a_stub_that_never_answers_is_retried() -> None:
    async with TestMesh(buyer) as mesh:
        asked = mesh.stub(prices)
        task = await mesh.send(buyer, "tea")
        await mesh.advance(timedelta(seconds=21))
        assert asked.requests == ["tea"]
        await mesh.advance(timedelta(seconds=2))
        assert asked.requests == ["tea"] * 2
        asked.answer(7)
        assert await task.result() == "7 EUR"


async def test_the_result_of_a_late_first_attempt_wins() -> None:
    async with TestMesh(buyer) as mesh:
        asked = mesh.stub(prices)
        task = await mesh.send(buyer, "tea")
        await mesh.advance(timedelta(seconds=1))
        [(first, request)] = asked._open.items()
        del asked._open[first]  # it gets no cancel
        await mesh.advance(timedelta(seconds=22))
        assert asked.requests == ["tea"] * 2
        asked._publish(request.message, Ok(1))
        assert await task.result() == "1 EUR"


@agent("prices")
async def serve(ctx: Context, item: str) -> int:
    asked.append(item)
    if item == "final":
        raise AgentFailed("no such item", retryable=False)
    if item == "later" and len(asked) < 2:
        raise AgentFailed("rate limited", retry_after=timedelta(minutes=5))
    if item == "odd" and len(asked) < 2:
        raise AgentFailed("broken", retry_after=-1)
    return len(asked)


asked: list[str] = []


@pytest.fixture(autouse=True)
def forget_asked() -> None:
    asked.clear()


async def test_a_final_failure_is_not_retried() -> None:
    async with TestMesh(buyer, serve) as mesh:
        outcome = await (await mesh.send(buyer, "final")).outcome()
        assert isinstance(outcome, Failed)
        assert outcome.message == "error: no such item"
        assert asked == ["final"]


async def test_the_callee_asks_for_a_longer_wait() -> None:
    async with TestMesh(buyer, serve) as mesh:
        task = await mesh.send(buyer, "later")
        await mesh.advance(timedelta(minutes=4, seconds=50))
        assert asked == ["later"]
        assert await task.result() == "2 EUR"


async def test_an_invalid_wait_is_named_and_ignored() -> None:
    async with TestMesh(buyer, serve) as mesh:
        assert await mesh.call(buyer, "odd") == "2 EUR"

    error = AgentFailed("broken", retry_after=-1)
    assert str(error) == "broken"
    once = prices.with_options(retry=None)

    @agent("asker")
    async def asker(ctx: Context, item: str) -> int:
        return await once(item)

    asked.clear()
    async with TestMesh(asker, serve) as mesh:
        outcome = await (await mesh.send(asker, "odd")).outcome()
        assert isinstance(outcome, Failed)
        assert "broken (retry_after is -1; it must not be negative)" in outcome.message


async def test_several_calls_are_retried_independently() -> None:
    other = Peer("other", str, int, retry=replace(POLICY, initial_interval=30))

    @agent("pair")
    async def pair(ctx: Context, item: str) -> list[int]:
        return list(await ctx.gather(prices(item), other(item), prices("b")))

    async with TestMesh(pair) as mesh:
        mesh.stub(prices).fails("error", times=3).returns(1)
        mesh.stub(other).fails("error", times=1).returns(2)
        assert await mesh.call(pair, "a") == [1, 2, 1]


async def test_the_first_result_leaves_a_waiting_attempt() -> None:
    other = Peer("other", str, int)

    @agent("race")
    async def race(ctx: Context, item: str) -> int:
        return await ctx.first(prices(item), other(item))

    async with TestMesh(race) as mesh:
        asked_prices = mesh.stub(prices).fails("error")
        slow = mesh.stub(other)
        task = await mesh.send(race, "a")
        await mesh.advance(timedelta(seconds=1))
        slow.answer(3)
        assert await task.result() == 3
        await mesh.advance(timedelta(hours=1))
        assert len(asked_prices.requests) == 1


async def test_a_task_deadline_ends_the_waits() -> None:
    async with TestMesh(buyer) as mesh:
        asked_prices = mesh.stub(prices).fails("error", "busy")
        outcome = await (await mesh.send(buyer, "a", timeout=5)).outcome()
        assert isinstance(outcome, Failed)
        assert outcome.message == "error: busy"  # 2 s, then 4 s would be too late
        assert len(asked_prices.requests) == 2


async def test_a_stateful_agent_retries() -> None:
    class Shop(StatefulAgent[str, dict[str, int], int]):
        name = "shop"

        async def on_request(self, ctx: Context, request: str) -> Any:
            return self.ask({}, {"p": prices(request)}, then=self.priced)

        async def priced(self, ctx: Context, state: dict[str, int], replies: Any) -> Any:
            return self.done(replies.value("p", prices))

    async with TestMesh(Shop()) as mesh:
        mesh.stub(prices).fails("timeout", times=3).returns(9)
        assert await mesh.call(Peer("shop", str, int), "a") == 9


async def test_a_crash_during_the_wait_loses_no_attempt() -> None:
    async with TestMesh(buyer) as mesh:
        asked_prices = mesh.stub(prices).fails("error", times=2).returns(7)
        mesh.crash(after="response", times=2)
        task = await mesh.send(buyer, "tea")
        assert await task.result() == "7 EUR"
        assert len(asked_prices.requests) == 3


async def test_an_idle_mesh_still_names_what_it_waits_for() -> None:
    waiting = prices.with_options(timeout=None, retry=POLICY)

    @agent("patient")
    async def patient(ctx: Context, item: str) -> int:
        return await waiting(item)

    async with TestMesh(patient) as mesh:
        mesh.stub(prices).fails("error", times=1)
        task = await mesh.send(patient, "a")
        with pytest.raises(MeshIdle, match="prices"):
            await task.result()


async def test_an_unhandled_failure_has_the_last_attempts_message() -> None:
    @agent("plain")
    async def plain(ctx: Context, item: str) -> int:
        try:
            return await prices(item)
        except PeerFailed as error:
            raise AgentFailed(f"gave up: {error.outcome.message}") from error

    async with TestMesh(plain) as mesh:
        mesh.stub(prices).fails("error", "first", times=3).fails("error", "last")
        outcome = await (await mesh.send(plain, "a")).outcome()
        assert isinstance(outcome, Failed)
        assert outcome.message == "gave up: last"


def test_cancelled_calls_cannot_be_retried() -> None:
    policy = RetryPolicy(retry_on=["cancelled"])
    text = "retry_on has 'cancelled'; leave it out: a cancelled call is never retried"
    with pytest.raises(ConfigurationError, match=text):
        Peer("prices", str, int, retry=policy)
    with pytest.raises(ConfigurationError, match=text):
        prices.with_options(retry=policy)
    with pytest.raises(AgentMisbehaved, match=text):
        Call("a", "prices", "tea", retry=policy)


def test_only_a_policy_is_one() -> None:
    policy: Any = 3
    text = "retry must be a RetryPolicy, not int"
    with pytest.raises(ConfigurationError, match=text):
        Peer("prices", str, int, retry=policy)
    with pytest.raises(AgentMisbehaved, match=text):
        Call("a", "prices", "tea", retry=policy)


def test_options_keep_the_policy() -> None:
    assert prices.with_options(timeout=5).retry == POLICY
    assert prices.with_options(retry=None).retry is None
    assert prices("tea").as_call("a").retry == POLICY
    assert prices("tea").with_artifacts().as_call("a").retry == POLICY
