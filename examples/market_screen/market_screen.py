"""Screen a market: `python examples/market_screen/market_screen.py`.

An agent buys 200 pages, keeps them in its working memory and waits for a committee. Meanwhile its
replica is killed, and another one continues. Exits with 1 unless the restored working memory is
identical, byte by byte, and no page was bought twice.

With `--redis redis://…`, the memory is stored there and also expires. Exits with 2 if
there is no Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from api import BILL
from replicas import Replica
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from screener import Proposal, Screen, Screened, screener

from meshpoint import Failed, FailureKind, Ok, TaskExecutionContext, TaskHandle, agent
from meshpoint.local import local_mesh
from meshpoint.model.ids import TaskId, new_id

TIMEOUT_SECONDS = 600.0
"""Seconds for the whole run."""
REDIS_TIMEOUT_SECONDS = 2.0
"""Seconds that Redis has to answer a PING."""


@dataclass
class Committee:
    """Approves every proposal, once it may answer."""

    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    proposals: list[Proposal] = field(default_factory=list)


@dataclass(frozen=True)
class ScreeningReport:
    """The memory before and after, and the pages that each replica bought."""

    before: Proposal
    after: Screened
    bought: tuple[int, int]
    different: int


async def main(redis_url: str | None) -> int:
    """Screen, kill, resume and compare. Returns the exit code."""
    if redis_url is not None and (problem := await problem_of_redis(redis_url)):
        print(f"error: --redis: {problem}", file=sys.stderr)
        return 2
    logging.getLogger("meshpoint").setLevel(logging.ERROR)
    console, order = Console(highlight=False), Screen()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                report = await screened(order, Path(folder), redis_url, console)
        except TimeoutError:
            report = Failed(
                FailureKind.TIMEOUT, f"not done after {TIMEOUT_SECONDS:g} s; is Redis unavailable?"
            )
    if isinstance(report, Failed):
        console.print(f"✗ The screener failed: {report.message}", style="bold red")
        return 1
    print_table(report, console)
    return 0 if print_verdict(order, report, redis_url, console) else 1


async def screened(
    order: Screen, folder: Path, redis_url: str | None, console: Console
) -> ScreeningReport | Failed:
    """Let replica A screen and wait, kill it, and let replica B resume."""
    committee, namespace = Committee(), f"screen-{new_id()}"
    url, bill = f"sqlite:///{folder}/mesh.db", folder / "bill"
    variables = {"MESH_NAMESPACE": namespace, "MESH_URL": url, BILL: str(bill)}
    if redis_url is not None:
        variables["MESHPOINT_AGENT__MEMORY_URL"] = redis_url

    @agent("committee")
    async def approve(ctx: TaskExecutionContext, proposal: Proposal) -> list[str]:
        committee.proposals.append(proposal)
        committee.was_asked.set()
        await committee.may_answer.wait()
        return proposal.tickers

    async with local_mesh(approve, broker_url=url, db_url=url, namespace=namespace) as mesh:
        async with Replica.start(variables) as first:
            console.print(
                f"Replica A screens {order.companies} companies: each page is bought, and kept in "
                "ctx.memory."
            )
            task = await mesh.send(screener, order)
            if (early := await wait_for_either(committee.was_asked, task)) is not None:
                return failure_of(early)
            if redis_url is not None:
                await wait_for_snapshot(redis_url, namespace, TaskId(task.id))
            await first.kill()
        console.print("It asks the committee and pauses. SIGKILL to A: its process is gone.")
        if redis_url is not None:
            keys = await expire(redis_url, namespace, TaskId(task.id))
            console.print(f"The memory in Redis expires too: {keys} keys are gone.")
        async with Replica.start(variables) as second:
            console.print("Replica B starts, gets the answer, and resumes the task.")
            committee.may_answer.set()
            outcome = await task.outcome()
    if isinstance(outcome, Failed):
        return outcome
    lines = [line.split() for line in bill.read_text(encoding="utf-8").splitlines()]
    by = Counter(int(pid) for pid, _ in lines)
    return ScreeningReport(
        before=committee.proposals[0],
        after=outcome.value,
        bought=(by[first.pid], by[second.pid]),
        different=len({ticker for _, ticker in lines}),
    )


def failure_of(outcome: Ok[Screened] | Failed) -> Failed:
    """A screening that is over before it waited for anybody."""
    return (
        outcome
        if isinstance(outcome, Failed)
        else Failed(FailureKind.ERROR, "it did not wait for the committee")
    )


async def wait_for_either(
    asked: asyncio.Event, task: TaskHandle[Screened]
) -> Ok[Screened] | Failed | None:
    """Wait until the committee is asked. Returns the outcome if the screener ends before that."""
    asking = asyncio.ensure_future(asked.wait())
    ending = asyncio.ensure_future(task.outcome())
    await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if ending.done():
        return ending.result()
    ending.cancel()
    return None


# ── with Redis ───────────────────────────────────────────────────────────────────────────────────


async def problem_of_redis(url: str) -> str | None:
    """Why there is no Redis to use, and what to do; None: it answers.

    Never holds the URL: it may have a password.
    """
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    try:
        redis = Redis.from_url(url)
        redis.connection_pool.make_connection()  # refuses unknown options; connects nowhere
    except (RedisError, ValueError, TypeError):
        return "is no URL of a Redis; write redis://127.0.0.1:6379/0"
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_SECONDS), redis:
            await redis.ping()
    except TimeoutError:
        cause = f"no answer within {REDIS_TIMEOUT_SECONDS:g} s"
    except (
        RedisError,
        OSError,
        ValueError,
    ) as error:  # ValueError: something that is no Redis answers
        cause = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    else:
        return None
    return f"{cause}; start a Redis there, or name another one"


async def wait_for_snapshot(url: str, namespace: str, task_id: TaskId) -> None:
    """Return when the snapshot of the pause is in Redis: it gets there right after the commit."""
    from redis.asyncio import Redis

    async with Redis.from_url(url) as redis:
        while not await redis.exists(f"{namespace}:l1_snapshot_meta:{{screener:{task_id}}}"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def expire(url: str, namespace: str, task_id: TaskId) -> int:
    """Expire the whole live memory, as Redis may, and return the number of expired keys."""
    from redis.asyncio import Redis

    pattern = f"{namespace}:L1:{{screener:{task_id}}}:*"
    async with Redis.from_url(url) as redis:
        keys = [key async for key in redis.scan_iter(pattern)]
        for key in keys:
            await redis.pexpire(key, 1)
        while await redis.exists(*keys):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return len(keys)


def print_table(report: ScreeningReport, console: Console) -> None:
    before, after, (first, second) = report.before, report.after, report.bought
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in ("before: replica A", "after: replica B"):
        table.add_column(column, justify="right")
    table.add_row("pages bought", str(first), str(second))
    table.add_row("keys in the memory", str(before.keys), str(after.keys))
    table.add_row("digest of all they hold", before.memory[:12], after.memory[:12])
    table.add_row("its counter of runs", str(before.begun), str(after.begun))
    table.add_row("the memory was found in", "", after.found_in)
    console.print(table)


def print_verdict(
    order: Screen, report: ScreeningReport, redis_url: str | None, console: Console
) -> bool:
    """Say which claims hold; whether all do."""
    before, after = report.before, report.after
    source = "sql" if redis_url is None else "snapshot"
    claims = {
        "The memory is what it was, byte by byte.": before.memory == after.memory
        and before.keys == after.keys,
        f"It was verified, and came from {source}.": (after.found_in, after.verified)
        == (source, True),
        "No page was bought twice.": report.bought == (order.companies, 0)
        and report.different == order.companies,
        "What the code writes again when it runs again is written once.": (
            before.begun,
            after.begun,
        )
        == (1, 1),
        f"The committee approved: {', '.join(after.approved)}.": after.approved == before.tickers,
    }
    for claim, holds in claims.items():
        console.print(
            f"{'✓' if holds else '✗'} {claim}", style=None if holds else "bold red", soft_wrap=True
        )
    return all(claims.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Screen a market, and lose a replica on the way.")
    parser.add_argument("--redis", metavar="URL", help="let the memory live there, and expire")
    sys.exit(asyncio.run(main(parser.parse_args().redis)))
