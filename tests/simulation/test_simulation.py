"""The whole worker under every fault at once; `make simulation SEEDS=2000` runs more seeds."""

from __future__ import annotations

import os

import pytest

from .run import simulate

_FIRST = int(os.environ.get("SIMULATION_FIRST", "0"))
_SEEDS = range(_FIRST, _FIRST + int(os.environ.get("SIMULATION_SEEDS", "25")))


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_request_has_exactly_one_outcome(seed: int) -> None:
    report = simulate(seed)
    assert not report.violations, str(report)


@pytest.mark.parametrize("seed", [2, 3])  # one loop of each kind
def test_the_same_seed_produces_the_same_run(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.trace == second.trace
    assert len(first.trace) > 100


def test_different_seeds_produce_different_runs() -> None:
    assert len({simulate(seed).digest for seed in range(6)}) == 6
