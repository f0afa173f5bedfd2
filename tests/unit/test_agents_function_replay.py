"""Function agents: a path that differs from the recorded one never yields a result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from agent_samples import Quote, double, paused, resumed, shout

from meshpoint import (
    ALL,
    FIRST,
    Done,
    FunctionAgent,
    Ok,
    Peer,
    ReplayMismatch,
    TaskExecutionContext,
    agent,
)
from meshpoint.testing.conformance.agent import run_agent


def wandering(second_run: Callable[[TaskExecutionContext], Any]) -> FunctionAgent[int, str]:
    """An agent that calls double(1) in its first run and does something else in each later one."""
    runs: list[int] = []

    @agent("wandering")
    async def function(ctx: TaskExecutionContext, number: int) -> str:
        runs.append(1)
        if len(runs) == 1:
            await ctx.call(double(1))
        else:
            await second_run(ctx)
        return "came to a result"

    return function


async def nothing(ctx: TaskExecutionContext) -> None:
    """Make no call."""


async def swallowing(ctx: TaskExecutionContext) -> None:
    """Make a different call and hide the failure."""
    try:
        await ctx.call(double(2))
    except Exception:
        return


@pytest.mark.parametrize(
    ("second_run", "complaint"),
    [
        (lambda ctx: ctx.call(shout("x")), "call 1 differs: it called double before and now calls shout"),
        (
            lambda ctx: ctx.call(double(2)),
            r"the call to double \(double.0\) has another input than before",
        ),
        (lambda ctx: ctx.gather(double(1), double(1)), "it called double before and now calls double, double"),
        (lambda ctx: ctx.gather(double(1), join=FIRST), r"it had join ALL before and now has join AT_LEAST\(1\)"),
        (lambda ctx: ctx.gather(double(1), join=ALL.within(timedelta(seconds=9))), "now has join ALL within 9.0 s"),
        (nothing, "ended after 0 of 1 recorded calls"),
        (swallowing, "has another input than before"),
    ],
)
async def test_another_path_is_a_mismatch_and_never_a_result(second_run: Any, complaint: str) -> None:
    tested = wandering(second_run)
    pause = await paused(tested)
    with pytest.raises(ReplayMismatch, match=complaint) as caught:
        await resumed(tested, pause)
    assert "wandering" in str(caught.value)
    assert "version=" in str(caught.value)


async def test_the_same_call_with_another_timeout_is_the_same_call() -> None:
    patient = Peer("double", int, Quote, timeout=timedelta(hours=1))
    tested = wandering(lambda ctx: ctx.call(patient(1)))
    assert await resumed(tested, await paused(tested)) == Done("came to a result")


async def test_the_order_of_keys_does_not_make_another_call() -> None:
    orders = iter([{"a": 1, "b": 2}, {"b": 2, "a": 1}])
    count = Peer("count", dict[str, int], int)

    @agent("unordered")
    async def unordered(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.call(count(next(orders)))

    assert await run_agent(unordered, 1, lambda call: Ok(2)) == 2


def test_a_set_in_an_input_is_the_same_in_every_process() -> None:
    code = (
        "from meshpoint import Peer; tags = Peer('tags', dict[str, set[str]], str)\n"
        "print(tags({'a': {'x', 'y', 'z', 'v', 'w'}}).input)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert seen == {b"{'a': ['v', 'w', 'x', 'y', 'z']}\n"}
