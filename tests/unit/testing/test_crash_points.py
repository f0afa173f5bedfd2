"""Replicas that die at a given point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.testing import CrashMissed, CrashPoint, TestMesh

warehouse = Peer("warehouse", str, str)
charged: Counter[str] = Counter()


def charge(order: str) -> str:
    charged[order] += 1
    return f"receipt of {order}"


@agent("shop")
async def shop(ctx: TaskExecutionContext, order: str) -> str:
    receipt = await ctx.step("charge", charge, order)
    return f"{receipt}, {await warehouse(order)}"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    charged.clear()


async def test_a_recorded_step_survives_the_crash() -> None:
    async with TestMesh(shop) as mesh:
        asked = mesh.stub(warehouse).returns("shelf 7")
        mesh.crash(before="checkpoint")
        assert await mesh.call(shop, "18") == "receipt of 18, shelf 7"
    assert charged["18"] == 1
    assert asked.requests == ["18"]


# `shop` runs no subtask and gets no signal. Signals have such a test next to the client's.
@pytest.mark.parametrize("point", sorted(set(get_args(CrashPoint)) - {"subtask", "signal"}))
@pytest.mark.parametrize("when", ["before", "after"])
async def test_another_replica_takes_over(when: str, point: Any) -> None:
    async with TestMesh(shop) as mesh:
        asked = mesh.stub(warehouse).returns("shelf 7")
        mesh.crash(**{when: point})
        assert await mesh.call(shop, "18") == "receipt of 18, shelf 7"
    assert asked.requests == ["18"]
    runs_twice = (when, point) in {("after", "step"), ("before", "record")}
    assert charged["18"] == 1 + runs_twice


async def test_nothing_is_written_on_the_way_out() -> None:
    async with TestMesh(shop, auto_advance=False) as mesh:
        asked = mesh.stub(warehouse)
        mesh.crash(after="checkpoint")
        await mesh.send(shop, "18")
        await mesh.advance(0)
        assert asked.requests == [], "the dead replica has sent the calls"
        await mesh.advance(60)
        assert asked.requests == ["18"]


async def test_working_memory_survives_the_crash() -> None:
    @agent("noting")
    async def noting(ctx: TaskExecutionContext, order: str) -> str:
        if not ctx.replaying:
            await ctx.memory.set("order", order)
        shelf = await warehouse(order)
        return f"{await ctx.memory.get('order')!r} at {shelf}"

    async with TestMesh(noting) as mesh:
        mesh.stub(warehouse).returns("shelf 7")
        mesh.crash(after="checkpoint")
        assert await mesh.call(noting, "18") == "b'18' at shelf 7"


async def test_it_can_die_several_times() -> None:
    async with TestMesh(shop) as mesh:
        asked = mesh.stub(warehouse).returns("shelf 7")
        mesh.crash(before="end", times=3)
        assert await mesh.call(shop, "18") == "receipt of 18, shelf 7"
        assert asked.requests == ["18"]


async def test_a_typo_is_refused() -> None:
    async with TestMesh(shop) as mesh:
        typo: Any = "chekpoint"
        with pytest.raises(ValueError, match=r"'chekpoint': there is no such point; .*checkpoint"):
            mesh.crash(before=typo)
        with pytest.raises(ValueError, match="either before= or after="):
            mesh.crash()


async def test_a_crash_that_does_not_happen_fails_the_test() -> None:
    mesh = await TestMesh(shop).__aenter__()
    mesh.stub(warehouse).returns("shelf 7")
    mesh.crash(before="subtask")
    await mesh.call(shop, "18")
    with pytest.raises(CrashMissed, match="before='subtask'"):
        await mesh.__aexit__(None, None, None)
