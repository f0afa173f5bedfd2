"""Function agents: a path that differs from the recorded one never yields a result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from agent_samples import Quote, double_peer, resume_agent, shout_peer, start_and_pause

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


def diverging_agent(second_run: Callable[[TaskExecutionContext], Any]) -> FunctionAgent[int, str]:
    """An agent that calls double(1) in its first run and does something else in each later one."""
    runs: list[int] = []

    @agent("wandering")
    async def function(ctx: TaskExecutionContext, number: int) -> str:
        runs.append(1)
        if len(runs) == 1:
            await double_peer(1)
        else:
            await second_run(ctx)
        return "came to a result"

    return function


async def call_nothing(ctx: TaskExecutionContext) -> None:
    """Make no call."""


async def swallow_pause(ctx: TaskExecutionContext) -> None:
    """Make a different call and hide the failure."""
    try:
        await double_peer(2)
    except Exception:
        return


@pytest.mark.parametrize(
    ("second_run", "complaint"),
    [
        (
            lambda ctx: shout_peer("x"),
            "call 1: expected shout, recorded double",
        ),
        (
            lambda ctx: double_peer(2),
            r"call 1: double.0 has another input than recorded",
        ),
        (
            lambda ctx: ctx.gather(double_peer(1), double_peer(1)),
            "call 1: expected double and double, recorded double",
        ),
        (
            lambda ctx: ctx.gather_outcomes(double_peer(1), join=FIRST),
            r"call 1: expected join AT_LEAST\(1\), recorded join ALL",
        ),
        (
            lambda ctx: ctx.gather_outcomes(double_peer(1), join=ALL.within(timedelta(seconds=9))),
            "expected join ALL within 9.0 s, recorded join ALL",
        ),
        (call_nothing, "ended after 0 of 1 recorded calls"),
        (swallow_pause, "has another input than recorded"),
    ],
)
async def test_a_diverging_replay_is_a_mismatch_and_never_a_result(
    second_run: Any, complaint: str
) -> None:
    agent_under_test = diverging_agent(second_run)
    pause = await start_and_pause(agent_under_test)
    with pytest.raises(ReplayMismatch, match=complaint) as caught:
        await resume_agent(agent_under_test, pause)
    assert "wandering" in str(caught.value)
    assert "version=" in str(caught.value)
    assert caught.value.reason in str(caught.value)
    assert "wandering" not in caught.value.reason


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (lambda ctx: double_peer(1), lambda ctx: ctx.outcome(double_peer(1))),
        (lambda ctx: double_peer(1), lambda ctx: ctx.gather(double_peer(1))),
        (
            lambda ctx: ctx.gather(double_peer(1), shout_peer("x")),
            lambda ctx: ctx.gather_outcomes(double_peer(1), shout_peer("x")),
        ),
    ],
)
async def test_methods_that_make_the_same_calls_are_recorded_alike(
    earlier: Any, later: Any
) -> None:
    def build(make_calls: Any) -> Any:
        @agent("calm")
        async def calm(ctx: TaskExecutionContext, number: int) -> None:
            await make_calls(ctx)

        return calm

    assert await start_and_pause(build(earlier)) == await start_and_pause(build(later))


async def test_a_changed_timeout_does_not_change_a_call() -> None:
    slow_peer = Peer("double", int, Quote, timeout=timedelta(hours=1))
    agent_under_test = diverging_agent(lambda ctx: slow_peer(1))
    assert await resume_agent(agent_under_test, await start_and_pause(agent_under_test)) == Done(
        "came to a result"
    )


async def test_the_order_of_keys_does_not_change_a_call() -> None:
    orders = iter([{"a": 1, "b": 2}, {"b": 2, "a": 1}])
    count = Peer("count", dict[str, int], int)

    @agent("unordered")
    async def unordered(ctx: TaskExecutionContext, number: int) -> int:
        return await count(next(orders))

    assert await run_agent(unordered, 1, lambda call: Ok(2)) == 2


def test_a_set_in_an_input_is_the_same_in_every_process() -> None:
    code = (
        "from meshpoint import Peer; tags = Peer('tags', dict[str, set[str]], str)\n"
        "print(tags({'a': {'x', 'y', 'z', 'v', 'w'}}).input)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert seen == {b"{'a': ['v', 'w', 'x', 'y', 'z']}\n"}
