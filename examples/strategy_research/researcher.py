"""A researcher designs a trading strategy, has a peer train its model, and tests the result."""

from __future__ import annotations

from collections import Counter
from math import exp, log
from statistics import mean, pstdev
from typing import Protocol

from market import Day, correlation, daily_returns, days
from pydantic import BaseModel

from meshpoint import Peer, TaskExecutionContext, agent


class Order(BaseModel):
    """What to research: strategies that use `features` of the last `horizon` days."""

    features: int = 3
    horizon: int = 8
    epochs: int = 10


class Design(BaseModel):
    lags: list[int]
    scale: float
    days_to_train: int
    epochs: int
    learning_rate: float


class Model(BaseModel):
    """A logistic regression: its bias, a weight per lag, and its mean training loss."""

    epoch: int
    weights: list[float]
    loss: float


class Backtest(BaseModel):
    """On days that the model has not seen. Returns are fractions over all of them."""

    days: int
    days_invested: int
    hit_rate: float
    strategy_return: float
    market_return: float


class Research(BaseModel):
    design: Design
    model: Model
    backtest: Backtest
    verdict: str


class TrainingWatcher(Protocol):
    """Looks on while a model is trained, and may make an epoch wait."""

    async def epoch_began(self, epoch: int) -> None: ...

    def epoch_trained(self, epoch: int, loss: float) -> None: ...


completed: Counter[str] = Counter()
"""Completed runs of each step's code, counted by the code itself rather than by Meshpoint."""
watchers: list[TrainingWatcher] = []


# ── the trainer: a peer, whose tasks are operations of their own ─────────────────────────────────


@agent("trainer", subtasks=["fit"])
async def trainer(ctx: TaskExecutionContext, design: Design) -> Model:
    return await ctx.subtask("fit", fit, ctx, design)


async def fit(ctx: TaskExecutionContext, design: Design) -> Model:
    """Gradient descent, an epoch at a time.

    Each is saved, and a later attempt resumes after the last one.
    """
    training_days = days(design.lags, design.scale)[: design.days_to_train]
    stored = ctx.saved_progress or {
        "epoch": 0,
        "weights": [0.0] * (1 + len(design.lags)),
        "loss": log(2),
    }
    model = Model.model_validate(stored)
    for epoch in range(model.epoch, design.epochs):
        for watcher in watchers:
            await watcher.epoch_began(epoch)
        weights = one_epoch(model.weights, training_days, design.learning_rate)
        model = Model(epoch=epoch + 1, weights=weights, loss=loss(weights, training_days))
        await ctx.save_progress(model.model_dump())
        for watcher in watchers:
            watcher.epoch_trained(epoch, model.loss)
    completed["fit"] += 1
    return model


def one_epoch(weights: list[float], training_days: list[Day], learning_rate: float) -> list[float]:
    """Every day once, in their order."""
    for day in training_days:
        error = chance_of_rise(weights, day) - (day.next_return > 0)
        weights = [
            w - learning_rate * error * x for w, x in zip(weights, day.features, strict=True)
        ]
    return weights


def chance_of_rise(weights: list[float], day: Day) -> float:
    return 1 / (1 + exp(-sum(w * x for w, x in zip(weights, day.features, strict=True))))


def loss(weights: list[float], training_days: list[Day]) -> float:
    return -mean(
        log(p if day.next_return > 0 else 1 - p)
        for day in training_days
        for p in [chance_of_rise(weights, day)]
    )


# ── the researcher ───────────────────────────────────────────────────────────────────────────────

train = Peer("trainer", Design, Model)


@agent(
    "researcher", subtasks=["designing", "training", "backtesting", "assessing"], exclusive=True
)
async def researcher(ctx: TaskExecutionContext, order: Order) -> Research:
    design = await ctx.subtask("designing", design_strategy, order)
    model = await ctx.subtask("training", train_model, ctx, design)
    backtest = await ctx.subtask("backtesting", backtest_on_unseen_days, design, model)
    verdict = await ctx.subtask("assessing", assess, design, model, backtest)
    return Research(design=design, model=model, backtest=backtest, verdict=verdict)


async def design_strategy(order: Order) -> Design:
    """Pick the lags that predict the next day best, on two thirds of the days."""
    series = daily_returns()
    past = series[: len(series) * 2 // 3]
    best = sorted(range(1, order.horizon + 1), key=lambda lag: -abs(correlation(past, lag)))[
        : order.features
    ]
    completed["designing"] += 1
    return Design(
        lags=sorted(best),
        scale=pstdev(past),
        days_to_train=len(past) - max(best),
        epochs=order.epochs,
        learning_rate=0.02,
    )


async def train_model(ctx: TaskExecutionContext, design: Design) -> Model:
    """While the trainer works, the research is a row in the database."""
    model = await train(design)
    completed["training"] += 1
    return model


async def backtest_on_unseen_days(design: Design, model: Model) -> Backtest:
    """Be invested on the days for which the model foresees a rise."""
    unseen = days(design.lags, design.scale)[design.days_to_train :]
    rises = [chance_of_rise(model.weights, day) > 0.5 for day in unseen]
    strategy = market = 1.0
    for day, invested in zip(unseen, rises, strict=True):
        market *= 1 + day.next_return
        strategy *= 1 + day.next_return * invested
    completed["backtesting"] += 1
    return Backtest(
        days=len(unseen),
        days_invested=sum(rises),
        hit_rate=mean(
            (day.next_return > 0) == rise for day, rise in zip(unseen, rises, strict=True)
        ),
        strategy_return=strategy - 1,
        market_return=market - 1,
    )


async def assess(design: Design, model: Model, backtest: Backtest) -> str:
    is_better = backtest.strategy_return > backtest.market_return and backtest.hit_rate > 0.5
    completed["assessing"] += 1
    return "worth a closer look" if is_better and model.loss < log(2) else "not worth pursuing"
