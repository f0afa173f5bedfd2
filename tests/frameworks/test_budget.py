"""Budgets hold across pauses, crashes and replicas."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import (
    BUDGETED,
    TOKENS,
    TOOLS,
    Framework,
    Journey,
    Trip,
    load_framework,
    two_pauses,
)
from test_scenario import PLAN, ROME, stubs

from meshpoint import Failed, FailureKind, Ok, Peer, QuestionUpdate
from meshpoint.frameworks import BUDGET, Approval, Budget, Price
from meshpoint.testing import TestMesh

travel = Peer("travel", Trip, str)
PRICES = {"script": Price(input=0, output=1_000_000)}
"""A token of the model's output costs 1."""


@pytest.fixture(params=BUDGETED)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


@pytest.mark.parametrize(
    ("budget", "calls", "message"),
    [
        (Budget(requests=3), 3, "budget exceeded: 3 of 3 requests used"),
        (Budget(cost=15, prices=PRICES), 3, "budget exceeded: 21 of 15 cost used"),
        (
            Budget(cost=15, prices={"gpt-*": PRICES["script"]}),
            1,
            "budget exceeded: 0 of 15 cost used: it has no price for model 'script', which the "
            "task or a peer has used",
        ),
    ],
)
async def test_a_budget_ends_the_task(
    framework: Framework, budget: Budget, calls: int, message: str
) -> None:
    journey = Journey(two_pauses, TOOLS)
    async with TestMesh(framework.build(journey, budget=budget)) as mesh:
        stubs(mesh)
        mesh.crash(after="record")
        outcome = await (await mesh.send(travel, ROME)).outcome()
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == (FailureKind.ERROR, message)
    assert len(journey.model_calls) == calls


@pytest.mark.parametrize("crash", [{"before": "checkpoint"}, {"after": "record"}, {}])
async def test_a_person_allows_more(framework: Framework, crash: dict[str, Any]) -> None:
    """The task waits in the middle of a segment, and continues with the next request."""
    journey, prompts = Journey(two_pauses, TOOLS), list[str | None]()
    budget = Budget(requests=1, when_exceeded="ask")
    async with TestMesh(framework.build(journey, budget=budget)) as mesh:
        stubs(mesh)
        if crash:
            mesh.crash(**crash, times=3)
        task = await mesh.send(travel, ROME)
        async for update in task.updates():
            if isinstance(update, QuestionUpdate) and update.prompt not in prompts:
                prompts.append(update.prompt)
                assert len(journey.model_calls) == len(prompts)
                await task.complete(BUDGET, Approval(approved=True))
        outcome = await task.outcome()
        asked = [len(mesh.stub(name).requests) for name in ("flights", "hotels", "weather")]
    assert isinstance(outcome, Ok)
    assert str(outcome.value).strip() == PLAN
    assert outcome.usage.total.output == 4 * TOKENS
    assert prompts == [f"The task has used {n} of {n} requests. Allow {n + 1}?" for n in (1, 2, 3)]
    assert journey.model_calls == [1, 2, 3, 4]
    assert journey.tool_calls == {"clock": 1, "visas": 1}
    assert asked == [1, 1, 1]


async def test_an_approval_covers_what_was_used(framework: Framework) -> None:
    """A request may use much more than was left."""
    journey = Journey(two_pauses, TOOLS)
    budget = Budget(cost=2, prices=PRICES, when_exceeded="ask")
    async with TestMesh(framework.build(journey, budget=budget)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, ROME)
        prompts = list[str | None]()
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                prompts.append(update.prompt)
                await task.complete(BUDGET, Approval(approved=len(prompts) < 2, message="enough"))
        outcome = await task.outcome()
    assert prompts == [
        "The task has used 7 of 2 cost. Allow 8?",
        "The task has used 14 of 8 cost. Allow 16?",
    ]
    assert isinstance(outcome, Failed)
    assert outcome.message == "budget exceeded: 14 of 8 cost used: enough"
    assert journey.model_calls == [1, 2]
