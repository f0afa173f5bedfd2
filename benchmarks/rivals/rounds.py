"""Rounds of contenders: start, warm up, run, and count what a task costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.rivals.contender import Contender
from benchmarks.rivals.resource_meters import Meter, cpu_seconds, sibling_servers

MANY_IN_FLIGHT = 16
"""Requests in flight."""
COSTS = {
    "cpu ms": "CPU ms",
    "server cpu ms": "servers' CPU ms",
    "tasks per cpu s": "tasks per CPU second",
    "commits": "commits",
    "notifications": "of them notifications",
    "statements": "statements",
    "wal KiB": "WAL KiB",
}
"""What `run_sample` counts for each task, with the titles of its columns."""


async def start_contender(
    stack: AsyncExitStack, name: str, command: Sequence[str], *, fan_out: int = 10
) -> Contender:
    """Start a contender and warm it up. It runs until `stack` closes."""
    contender = await Contender.start(name, command)
    stack.push_async_callback(contender.close)
    await contender.run_round(fan_out, MANY_IN_FLIGHT, 1)
    return contender


async def run_sample(
    contender: Contender,
    meter: Meter | None,
    pids: Sequence[int],
    fan_out: int,
    in_flight: int,
    seconds: float,
) -> Sample:
    """Run one round. `pids` are all contenders' processes, which are no servers."""

    async def costs() -> dict[str, float]:
        counted = await meter.read() if meter is not None else {}
        cpu = {
            "cpu ms": cpu_seconds([contender.pid]) * 1e3,
            "server cpu ms": cpu_seconds(sibling_servers(pids)) * 1e3,
        }
        return {**cpu, **counted}

    before = await costs()
    result = await contender.run_round(fan_out, in_flight, seconds)
    after, count = await costs(), len(result.latencies)
    each = {name: (after[name] - before[name]) / count for name in before}
    each["tasks per cpu s"] = 1e3 / (each["cpu ms"] + each["server cpu ms"])
    return Sample(
        count, result.seconds, {"p50": result.quantile(0.5), "p99": result.quantile(0.99), **each}
    )


async def compare(
    commands: Mapping[str, Sequence[str]],
    fan_outs: Sequence[int],
    in_flight: int,
    rounds: int,
    seconds: float,
    *,
    title: str = "N={}",
) -> dict[str, Medians]:
    """Start contenders and let them take turns. The results have the titles of the fan-outs."""
    measured = {}
    async with AsyncExitStack() as stack:
        contenders = {
            name: await start_contender(stack, name, command) for name, command in commands.items()
        }
        pids = [each.pid for each in contenders.values()]
        for fan_out in fan_outs:
            samples = {
                name: partial(run_sample, contender, None, pids, fan_out, in_flight, seconds)
                for name, contender in contenders.items()
            }
            key = title.format(fan_out)
            measured[key] = await interleaved(samples, rounds, title=key)
    return measured
