"""Daily closes of a market, offline, and what a strategy knows of each day before it trades."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import NamedTuple


class Day(NamedTuple):
    """One day: `features` are earlier returns, scaled to about 1, that predict `next_return`."""

    features: tuple[float, ...]
    next_return: float


def daily_returns() -> list[float]:
    """The return of each day."""
    text = (Path(__file__).parent / "data" / "prices.json").read_text(encoding="utf-8")
    closes = json.loads(text)["closes"]
    return [close / before - 1 for before, close in pairwise(closes)]


def correlation(series: list[float], lag: int) -> float:
    """Correlation of a day's return with the return `lag` days later."""
    pairs = list(zip(series, series[lag:], strict=False))
    earlier, later = mean(a for a, _ in pairs), mean(b for _, b in pairs)
    common = mean((a - earlier) * (b - later) for a, b in pairs)
    return common / (pstdev(a for a, _ in pairs) * pstdev(b for _, b in pairs))


def days(lags: list[int], scale: float) -> list[Day]:
    """Every day on which all lags are known."""
    series = daily_returns()
    return [
        Day((1.0, *(series[index - lag] / scale for lag in lags)), series[index])
        for index in range(max(lags), len(series))
    ]
