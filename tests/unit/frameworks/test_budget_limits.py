"""The limits of a budget."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint import Ok, TaskExecutionContext
from meshpoint.errors import BudgetExceeded, ConfigurationError
from meshpoint.frameworks import Budget, Price
from meshpoint.frameworks.budget import check_budget, count_request, use_budget
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import TaskId
from meshpoint.model.snapshot import apply_diff, diff, snapshot
from meshpoint.model.usage import Tokens, TokenUsage


def usage_of(**models: Tokens) -> TokenUsage:
    ctx = TaskExecutionContext(TaskId("t"))
    for model, tokens in models.items():
        count_request(ctx, model, tokens)
    return ctx.token_usage


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "it has no limit"),
        ({"requests": 0}, "requests is 0"),
        ({"cost": float("nan"), "prices": {"*": Price(1, 1)}}, "cost is nan"),
        ({"tokens": 1, "when_exceeded": "stop"}, "when_exceeded is 'stop'"),
        ({"cost": 1}, "cost needs prices"),
    ],
)
def test_a_budget_that_cannot_work_is_refused(options: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Budget(**options)


def test_the_cost_is_the_sum_over_the_models() -> None:
    prices = {
        "small": Price(input=1, output=2),
        "*": Price(input=10, output=20, cached=1),
    }
    million = 1_000_000
    usage = usage_of(
        small=Tokens(input=million, output=million, cached=million // 2),  # 1 + 2
        large=Tokens(input=2 * million, output=0, cached=million),  # 10 + 1
    )
    exceeded = Budget(cost=14, prices=prices).find_exceeded(usage, 1)
    assert exceeded is not None
    assert (exceeded.used, exceeded.needed, exceeded.allowed) == (14, 2, 28)
    assert Budget(cost=14.01, prices=prices).find_exceeded(usage, 1) is None
    assert Budget(cost=14, prices=prices).find_exceeded(usage, 2) is None


def test_a_function_may_give_the_prices() -> None:
    usage = usage_of(small=Tokens(output=3))
    budget = Budget(
        cost=3, prices=lambda model, tokens: tokens.output if model == "small" else None
    )
    assert budget.find_exceeded(usage, 1) is not None
    with pytest.raises(BudgetExceeded, match="no price for model 'other'"):
        budget.find_exceeded(usage_of(other=Tokens()), 1)


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{price} is no price"):
        Price(input=1, output=price)
    budget = Budget(cost=3, prices=lambda model, tokens: price)
    with pytest.raises(BudgetExceeded, match=f"returned {price} for model 'a'"):
        budget.find_exceeded(usage_of(a=Tokens()), 1)


def test_a_peer_cannot_lower_the_cost() -> None:
    usage = usage_of(a=Tokens(output=1_000_000))
    usage.merge(usage_of(a=Tokens(cached=2**50)), source="peer")
    prices = {"a": Price(input=1, output=2, cached=0)}
    exceeded = Budget(cost=2, prices=prices).find_exceeded(usage, 1)
    assert exceeded is not None
    assert exceeded.used == 2


def test_genai_prices_give_the_prices() -> None:
    """The function in the guide."""
    genai_prices = pytest.importorskip("genai_prices")

    def price(model: str, tokens: Tokens) -> Any:
        usage = genai_prices.Usage(
            input_tokens=tokens.input,
            output_tokens=tokens.output,
            cache_read_tokens=tokens.cached,
        )
        return genai_prices.calc_price(usage, model_ref=model).total_price

    usage = usage_of(**{"gpt-4o": Tokens(input=1_000_000)})
    exceeded = Budget(cost=0.01, prices=price).find_exceeded(usage, 1)
    assert exceeded is not None
    assert exceeded.used > 0.1


def test_the_limit_that_needs_most_is_asked_about() -> None:
    usage = usage_of(a=Tokens(output=35))
    exceeded = Budget(requests=1, tokens=10).find_exceeded(usage, 1)
    assert exceeded is not None
    assert exceeded.prompt == "Budget reached: tokens 35 of 10. Allow 40?"


def _run(budget: Budget, *, replace: bool) -> None:
    """A framework that swallows the error of its model, or replaces it."""
    ctx = TaskExecutionContext(TaskId("t"))
    count_request(ctx, "a", Tokens())
    with use_budget(budget, ctx, 1):
        try:
            check_budget()
        except Exception as error:
            if replace:
                raise ValueError("the framework's own") from error


@pytest.mark.parametrize(
    ("budget", "replace"),
    [
        (Budget(requests=1), False),
        (Budget(requests=1), True),
        (Budget(requests=1, when_exceeded="ask"), True),
    ],
)
def test_a_framework_cannot_hide_the_error(budget: Budget, replace: bool) -> None:
    with pytest.raises(BudgetExceeded, match="requests 1 of 1"):
        _run(budget, replace=replace)


def test_requests_are_added_like_tokens() -> None:
    ctx, other = TaskExecutionContext(TaskId("t")), TaskExecutionContext(TaskId("t"))
    count_request(ctx, "a", Tokens(output=1))
    before = snapshot(ctx)
    count_request(ctx, "a", Tokens(output=1))
    count_request(other, "b", Tokens(output=1))
    apply_diff(other, diff(before, snapshot(ctx)))
    assert other.token_usage.requests == 2
    restored = TaskExecutionContext.from_checkpoint_dict(other.to_checkpoint_dict())
    assert restored.token_usage.requests == 2
    restored.token_usage.add(other.token_usage)
    assert restored.token_usage.requests == 4
    restored.token_usage.merge(other.token_usage, source="peer")
    assert restored.token_usage.requests == 4


def test_the_previous_release_reads_what_other_agents_write() -> None:
    """It knows no requests."""
    ctx = TaskExecutionContext(TaskId("t"))
    ctx.token_usage.record(Tokens(output=1), model="a")
    assert "requests" not in ctx.token_usage.model_dump(mode="json")
    count_request(ctx, "a", Tokens(output=1))
    assert ctx.token_usage.model_dump(mode="json")["requests"] == 1
    assert b"requests" not in encode_reply(ctx.task_id, None, Ok(1, usage=ctx.token_usage))
