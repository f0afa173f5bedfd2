"""The whole worker under every fault at once; `make simulation SEEDS=2000` runs more seeds."""

from __future__ import annotations

import os
from functools import cache

import pytest

from .run import Report, simulate

_FIRST = int(os.environ.get("SIMULATION_FIRST", "0"))
_SEEDS = range(_FIRST, _FIRST + int(os.environ.get("SIMULATION_SEEDS", "25")))


@cache
def report_on(seed: int) -> Report:
    return simulate(seed)


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_request_has_exactly_one_outcome(seed: int) -> None:
    report = report_on(seed)
    assert not report.violations, str(report)


@pytest.mark.parametrize("seed", [2, 3])  # one loop of each kind
def test_the_same_seed_produces_the_same_run(seed: int) -> None:
    first, second = report_on(seed), simulate(seed)
    assert first.trace == second.trace
    assert len(first.trace) > 100


def test_different_seeds_produce_different_runs() -> None:
    assert len({report_on(seed).digest for seed in range(6)}) == 6
