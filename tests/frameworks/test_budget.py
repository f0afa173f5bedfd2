"""Budgets hold across pauses, crashes and replicas."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import (
    FRAMEWORKS,
    TOKENS,
    TOOLS,
    Framework,
    Journey,
    Quote,
    Trip,
    load_framework,
    two_pauses,
)
from test_scenario import PLAN, ROME, stubs

from meshpoint import (
    Failed,
    FailureKind,
    Ok,
    Peer,
    QuestionUpdate,
    TaskExecutionContext,
    agent,
)
from meshpoint.frameworks import BUDGET, Approval, Budget, Price
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id
from meshpoint.operations import Operations
from meshpoint.testing import TestMesh

travel = Peer("travel", Trip, str)
PRICES = {"script": Price(input=0, output=1_000_000)}
"""A token of the model's output costs 1."""


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return load_framework(request.param)


@pytest.mark.parametrize(
    ("budget", "calls", "message"),
    [
        (Budget(requests=3), 3, "budget exceeded: requests 3 of 3"),
        (Budget(cost=15, prices=PRICES), 3, "budget exceeded: cost 21 of 15"),
        (
            Budget(cost=15, prices={"gpt-*": PRICES["script"]}),
            1,
            "the budget cannot be checked: it has no price for model 'script', which the "
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
    assert prompts == [f"Budget reached: requests {n} of {n}. Allow {n + 1}?" for n in (1, 2, 3)]
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
        "Budget reached: cost 7 of 2. Allow 8?",
        "Budget reached: cost 14 of 8. Allow 16?",
    ]
    assert isinstance(outcome, Failed)
    assert outcome.message == "budget exceeded: cost 14 of 8: enough"
    assert journey.model_calls == [1, 2]


async def test_nobody_allows_more(framework: Framework) -> None:
    journey = Journey(two_pauses, TOOLS)
    budget = Budget(requests=1, when_exceeded="ask", timeout=3600)
    async with TestMesh(framework.build(journey, budget=budget)) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, ROME)).outcome()  # the clock moves to the timeout
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith(
        "budget exceeded: requests 1 of 1: nobody has allowed more: timeout"
    )
    assert journey.model_calls == [1]


async def test_a_resumed_task_has_used_what_it_had_used(
    framework: Framework, database_url: str
) -> None:
    """It resumes at its last pause with a larger budget, and pays for no request again."""
    journey = Journey(two_pauses, TOOLS)
    task_id, namespace = TaskId(new_id()), "budgets"
    served = [quote_of("flights", 120), quote_of("hotels", 80), serve_weather]
    async with Operations(database_url, namespace=namespace) as operations:
        small = framework.build(journey, budget=Budget(requests=2))
        async with local_mesh(
            small, *served, db_url=database_url, namespace=namespace, broker_url="memory://"
        ) as mesh:
            failed = await (await mesh.send(travel, ROME, task_id=task_id)).outcome()
        assert isinstance(failed, Failed)
        await operations.resume(task_id)
        large = framework.build(journey, budget=Budget(requests=4))
        async with local_mesh(
            large, *served, db_url=database_url, namespace=namespace, broker_url="memory://"
        ):
            resumed = await operations.wait(task_id)
    assert isinstance(resumed, Ok)
    assert journey.model_calls == [1, 2, 3, 4]
    assert resumed.usage.total.output == 4 * TOKENS


def quote_of(name: str, price: int) -> Any:
    """A peer that always quotes `price`."""

    @agent(name)
    async def serve(ctx: TaskExecutionContext, trip: Trip) -> Quote:
        return Quote(price=price)

    return serve


@agent("weather")
async def serve_weather(ctx: TaskExecutionContext, city: str) -> str:
    """A peer that always promises sun."""
    return "sunny"
