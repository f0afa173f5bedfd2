"""Budgets: how many requests to models, tokens and how much money a task may use.

What a task has used is in its `ctx.token_usage`, which steps record and pauses store. So a request
counts once, in any replica, and also after a crash.

What an adapter must do:

- call `count_request` in the step of each request to a model, once it has the response;
- call `check_budget` before that step, outside it;
- if that raises `BudgetReached`, stop the framework, and return a `Turn` with all messages so
  far, ready for the next request, and without calls. Keep the messages when the error is raised,
  because a framework may drop them. `FrameworkAgent` asks the person. If approved, it calls `run`
  with these messages and without answers: send the request then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from fnmatch import fnmatchcase
from math import floor, inf, nan
from typing import Literal, TypeAlias

from meshpoint.errors import AgentFailed, BudgetExceeded, ConfigurationError, MeshpointError
from meshpoint.frameworks.approval import Approval
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.questions import Question
from meshpoint.model.recorded_work import current_step
from meshpoint.model.retry_policy import Duration
from meshpoint.model.usage import Tokens, TokenUsage

_KEY = "Budget"

BUDGET = Question("budget", Approval)
"""Asked when a task has used its budget, with `when_exceeded="ask"`."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, in a currency of your choice.

    Attributes:
        input: Of the input that is not cached.
        output: Of the output.
        cached: Of the input from the provider's cache. Default: as `input`.
    """

    input: float
    output: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for price in (self.input, self.output, self.cached):
            if price is not None and not 0 <= price < inf:
                raise ConfigurationError("Price", f"{price} is no price", "write 0 or more")

    def __call__(self, model: str, tokens: Tokens) -> float:
        """The cost of `tokens`."""
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, tokens.input - tokens.cached)  # a peer may report any numbers
        cost = fresh * self.input + tokens.cached * cached + tokens.output * self.output
        return cost / 1_000_000


PriceFunction: TypeAlias = Callable[[str, Tokens], float | Decimal | None]
"""From a model and all its tokens in a task to their cost; `None` if unknown."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a task may use, across pauses and replicas.

        Budget(requests=30, cost=2.0, prices={"gpt-*": Price(input=1.25, output=10.0)})

    It is checked before each request to a model, so the last request may use more tokens than are
    left. Tokens and cost include what agents in tools have used, as far as they are counted, and
    the peers that have answered. Requests are the task's own.

    Attributes:
        requests: Maximum requests to models.
        tokens: Maximum input and output tokens.
        cost: Maximum cost, in the currency of `prices`.
        prices: The price by the name of the model in its responses, or by a pattern such as
            "gpt-*"; the first that matches counts. Or a function.
        when_exceeded: "fail" ends the task with `BudgetExceeded`; "ask" asks the question `BUDGET`
            first. Each approval adds the budget once more, or as often as the task has used it.
        timeout: How long the question stays open. `None` for as long as the task.
        allow: Who may answer it, as for `ctx.wait_for`.
    """

    requests: int | None = None
    tokens: int | None = None
    cost: float | None = None
    prices: Mapping[str, Price] | PriceFunction = field(default_factory=dict)
    when_exceeded: Literal["fail", "ask"] = "fail"
    timeout: Duration | None = None
    allow: Sequence[str] = ()

    def __post_init__(self) -> None:
        limits = {"requests": self.requests, "tokens": self.tokens, "cost": self.cost}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise ConfigurationError(_KEY, "it has no limit", "write requests=30")
        if wrong := next((name for name, limit in given.items() if not limit > 0), None):
            raise ConfigurationError(_KEY, f"{wrong} is {given[wrong]}", "write a positive number")
        if self.when_exceeded not in ("fail", "ask"):
            problem = f"when_exceeded is {self.when_exceeded!r}"
            raise ConfigurationError(_KEY, problem, 'write "fail" or "ask"')
        if self.cost is not None and not self.prices:
            fix = 'write prices={"gpt-*": Price(input=1.25, output=10.0)}'
            raise ConfigurationError(_KEY, "cost needs prices", fix)

    def find_exceeded(self, usage: TokenUsage, times: int) -> Exceeded | None:
        """The first limit, `times` as high, that `usage` has reached.

        Raises:
            BudgetExceeded: A model has no price, or its price is negative or not finite.
        """
        total = usage.total
        used = [
            ("requests", usage.requests, self.requests),
            ("tokens", total.input + total.output, self.tokens),
            ("cost", 0.0 if self.cost is None else self._cost(usage), self.cost),
        ]
        reached = [
            Exceeded(name, count, limit, times, floor(count / limit) + 1)
            for name, count, limit in used
            if limit is not None and count >= limit * times
        ]
        return max(reached, key=lambda each: each.needed, default=None)

    def _cost(self, usage: TokenUsage) -> float:
        return sum(self._cost_of(model, tokens) for model, tokens in usage.by_model.items())

    def _cost_of(self, model: str, tokens: Tokens) -> float:
        prices: Mapping[str, PriceFunction] = (
            {"*": self.prices} if callable(self.prices) else self.prices
        )
        price = next((each for name, each in prices.items() if fnmatchcase(model, name)), None)
        cost = None if price is None else price(model, tokens)
        if cost is None:
            note = f"it has no price for model {model!r}, which the task or a peer has used"
            raise BudgetExceeded("cost", nan, self.cost or 0, note)
        if not 0 <= cost < inf:  # a negative cost, or NaN, would lift the limit
            note = f"its price function has returned {cost} for model {model!r}"
            raise BudgetExceeded("cost", nan, self.cost or 0, note)
        return float(cost)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that a task has reached. `needed` times the limit would be enough to continue."""

    what: str
    used: float
    limit: float
    times: int
    needed: int

    def error(self, note: str = "") -> BudgetExceeded:
        """The failure of the task."""
        return BudgetExceeded(self.what, self.used, self.limit * self.times, note)

    @property
    def prompt(self) -> str:
        """The question to a person."""
        used, limit, more = (
            f"{each:,.10g}" for each in (self.used, self.limit * self.times, self.allowed)
        )
        return f"Budget reached: {self.what} {used} of {limit}. Allow {more}?"

    @property
    def allowed(self) -> float:
        """The limit after an approval."""
        return self.limit * self.needed


class BudgetReached(MeshpointError):
    """Stops a framework before a request to a model, because a person must allow it."""


class SegmentBudget:
    """The budget of a task during one segment.

    Attributes:
        times: How often the limits count.
        reached: The limit that a person must raise, if any.
        error: The error that ended the task's use of models, if any.
    """

    def __init__(self, budget: Budget, ctx: TaskExecutionContext, times: int) -> None:
        self.budget, self._ctx, self.times = budget, ctx, times
        self.reached: Exceeded | None = None
        self.error: BudgetExceeded | None = None

    @property
    def failure(self) -> BudgetExceeded | None:
        """The failure of the task if the framework does not stop for the budget.

        A new object each time, because it may be raised from the error that `check` has raised.
        """
        if self.reached is not None:
            return self.reached.error()
        error = self.error
        return error and BudgetExceeded(error.what, error.used, error.limit, error.note)

    def check(self) -> None:
        """See `check_budget`."""
        try:
            exceeded = self.budget.find_exceeded(self._ctx.token_usage, self.times)
        except BudgetExceeded as error:
            self.error = error
            raise
        if exceeded is None:
            return
        if self.budget.when_exceeded == "fail":
            self.error = exceeded.error()
            raise self.error
        if current_step() is None:  # a step cannot wait: the next request outside it will
            self.reached = exceeded
            raise BudgetReached(exceeded.prompt)

    def raise_limit(self, times: int) -> None:
        """Continue with limits `times` as high, because a person has allowed it."""
        self.times, self.reached = times, None

    def refuse(self, error: BudgetExceeded) -> None:
        """End the task's use of models, because no one has allowed more."""
        self.reached, self.error = None, error


_segment_budget: ContextVar[SegmentBudget | None] = ContextVar("meshpoint_budget", default=None)


@contextmanager
def use_budget(
    budget: Budget | None, ctx: TaskExecutionContext, times: int
) -> Iterator[SegmentBudget | None]:
    """Check `budget`, `times` as high, in the block.

    Raises:
        BudgetExceeded: Also if the framework has swallowed it, or replaced it with its own error.
    """
    segment = None if budget is None else SegmentBudget(budget, ctx, times)
    token = _segment_budget.set(segment)
    try:
        yield segment
    except Exception as error:
        if segment is None or isinstance(error, BudgetExceeded) or _must_win(error):
            raise
        if (failure := segment.failure) is not None:
            raise failure from error
        raise
    else:
        if segment is not None and segment.error is not None:
            raise segment.error
    finally:
        _segment_budget.reset(token)


def _must_win(error: Exception) -> bool:
    """Whether the error says that the task cannot continue here, which is no failure."""
    return isinstance(error, MeshpointError) and not isinstance(error, AgentFailed | BudgetReached)


def check_budget() -> None:
    """Check that the running task may send another request to a model.

    Raises:
        BudgetExceeded: It may not. The task fails, even if the framework swallows the error.
        BudgetReached: A person must allow it; see the module.
    """
    if (segment := _segment_budget.get()) is not None:
        segment.check()


def reached_budget() -> tuple[SegmentBudget, Exceeded] | None:
    """The budget and the limit that a person must raise, if `check_budget` has found one."""
    segment = _segment_budget.get()
    if segment is None or segment.reached is None:
        return None
    return segment, segment.reached


def count_request(
    ctx: TaskExecutionContext, model: str, tokens: Tokens, *, source: str = "agent"
) -> None:
    """Count a request to a model. Call it in the step of the request.

    Args:
        ctx: The context of the task.
        model: The name of the model in the response.
        tokens: What the request has used.
        source: The agent itself, or the name of a tool or another agent in the same task.
    """
    ctx.token_usage.record(tokens, model=model, source=source)
    ctx.token_usage.requests += 1
