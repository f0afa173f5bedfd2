"""Run many seeds, or replay one: `make simulation SEEDS=2000`, `make simulation SEED=17`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .run import simulate, simulate_without_trace


def main() -> int:
    """Return the exit code: 1 if a run broke a rule."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="replay this seed and print its trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        report = simulate(options.seed)
        print(*report.trace, f"trace {report.digest}", report, sep="\n")
        return bool(report.violations)
    return _run_seeds(range(options.first, options.first + options.seeds), options.jobs)


def _run_seeds(seeds: range, jobs: int) -> int:
    started_at, broken_seeds = time.monotonic(), 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(simulate_without_trace, seeds):
            if report.violations:
                broken_seeds += 1
                print(report, flush=True)
    print(f"{len(seeds)} seeds, {broken_seeds} broken, {time.monotonic() - started_at:.0f} s")
    return bool(broken_seeds)


if __name__ == "__main__":
    sys.exit(main())
