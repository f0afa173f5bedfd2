"""Analyse one stock: `python examples/stock_analysis/stock_analysis.py`.

Three agents work concurrently. The second subtask of one agent hits a rate limit and fails; the
agent then resumes from there. Exits with 1 unless each subtask was computed once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import effects
from analysts import (
    Analysis,
    Compared,
    FinancialReport,
    StrategyReport,
    Valuation,
    company_data,
    financial_analyst,
    strategy_analyst,
    valuation_agent,
)
from pydantic import JsonValue
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sources import deal_service

from meshpoint import Failed, FunctionAgent, Mesh, Ok
from meshpoint.local import local_mesh
from meshpoint.model.subtasks import SubtaskRecord
from meshpoint.operations import Operations

ANALYSTS: tuple[FunctionAgent[Analysis, Any], ...] = (
    financial_analyst,
    strategy_analyst,
    valuation_agent,
)
STYLES = {
    "done": "green",
    "reused": "cyan",
    "failed": "red",
    "run again": "yellow",
    "not run": "dim",
}

Records = dict[str, SubtaskRecord]


@dataclass
class AnalystResult:
    """An analyst's operation: its result, and its last checkpoint after each attempt."""

    agent: str
    outcome: Ok[JsonValue] | Failed
    attempts: list[Records]


async def main(ticker: str) -> bool:
    """Analyse, and show it; whether every subtask was computed once."""
    logging.getLogger("meshpoint").setLevel(logging.ERROR)  # the failure is shown below
    console = Console(highlight=False)
    began, completed = Counter[str](), Counter[str]()
    effects.listeners.append(
        lambda subtask, what: (began if what == "began" else completed).update([subtask])
    )
    with TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/tasks.db"
        # The archive keeps the checkpoints of completed operations: for the table below.
        serving = local_mesh(
            *ANALYSTS,
            company_data,
            db_url=database,
            namespace="stocks",
            checkpoint_archive=True,
            sweep_interval_seconds=0.1,
        )
        async with serving as mesh, Operations(database, namespace="stocks") as operations:
            results = await analyse(ticker, mesh, operations, console)
    if unfinished := [result.agent for result in results if isinstance(result.outcome, Failed)]:
        console.print(f"✗ There is no result of {', '.join(unfinished)}.", style="bold red")
        return False
    print_results(results, console)
    print_steps(results, began, completed, console)
    return print_verdict(began, completed, console)


async def analyse(
    ticker: str, mesh: Mesh, operations: Operations, console: Console
) -> list[AnalystResult]:
    """Let the analysts work concurrently, then resume the failed ones."""
    order = Analysis(ticker=ticker)
    console.print(f"{ticker}: {len(ANALYSTS)} analysts are at work.")
    tasks = [await mesh.send(analyst.name, order) for analyst in ANALYSTS]
    outcomes = await asyncio.gather(*[task.outcome() for task in tasks])
    results = []
    for task, outcome in zip(tasks, outcomes, strict=True):
        result = AnalystResult(task.agent, outcome, [await last_records(operations, task.id)])
        results.append(result)
        if isinstance(result.outcome, Failed):
            operation = await operations.get(task.id)
            console.print(
                f"{result.agent} failed in {operation.phase}, with {operation.progress_pct:.0f}% "
                "done:"
            )
            console.print(f"  {result.outcome.message}")
            deal_service.reset_quota()
            await operations.resume(task.id)
            console.print("An hour later it is resumed.")
            result.outcome = await operations.wait(task.id)
            result.attempts.append(await last_records(operations, task.id))
    return results


async def last_records(operations: Operations, id_: str) -> Records:
    """The subtasks in an operation's last checkpoint."""
    return {record.name: record for record in (await operations.checkpoints(id_))[-1].subtasks}


def print_results(results: list[AnalystResult], console: Console) -> None:
    values = {
        result.agent: result.outcome.value for result in results if isinstance(result.outcome, Ok)
    }
    finance = FinancialReport.model_validate(values[financial_analyst.name])
    strategy = StrategyReport.model_validate(values[strategy_analyst.name])
    valuation = Valuation.model_validate(values[valuation_agent.name])
    margin, returns = (
        finance.comparison["operating_margin"],
        finance.comparison["return_on_capital"],
    )
    value_destroying = [deal.target for deal in strategy.deals if deal.destroyed_value]
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_row("business", f"margin {_ranked(margin)}; return on capital {_ranked(returns)}")
    facts.add_row("red flags", "\n".join(finance.red_flags) or "none")
    facts.add_row(
        "management",
        f"{strategy.score} of 100 points; "
        f"bad acquisitions: {', '.join(value_destroying) or 'none'}",
    )
    scenarios = f"{valuation.lowest:.2f} to {valuation.highest:.2f} in the scenarios"
    facts.add_row(
        "value", f"{valuation.value:.2f} a share, {scenarios}; the price is {valuation.price:.2f}"
    )
    console.print()
    console.print(facts)


def _ranked(compared: Compared) -> str:
    return f"{compared.value:.1%}, rank {compared.rank} of {compared.of}"


def print_steps(
    results: list[AnalystResult], began: Counter[str], completed: Counter[str], console: Console
) -> None:
    """Meshpoint's record of each attempt, next to the record of the code itself."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("subtask", "attempt 1", "attempt 2"):
        table.add_column(column, no_wrap=True)
    for column in ("code began", "completed"):
        table.add_column(column, justify="right")
    for result, analyst in zip(results, ANALYSTS, strict=True):
        table.add_row(Text(result.agent, style="bold"))
        for name in analyst.plan.subtasks:
            statuses = [
                Text(status, style=STYLES.get(status, ""))
                for status in attempt_statuses(result, name)
            ]
            table.add_row(f"  {name}", *statuses, str(began[name]), str(completed[name]))
    console.print(table)


def attempt_statuses(result: AnalystResult, name: str) -> tuple[str, str]:
    """What became of a subtask in the first attempt, and in the second."""
    before = result.attempts[0].get(name)
    first = "not run" if before is None else "done" if before.completed else "failed"
    if len(result.attempts) == 1:
        return first, ""
    if result.attempts[1][name].retry == 0:
        return first, "reused"
    return first, "done" if before is None else "run again"


def print_verdict(began: Counter[str], completed: Counter[str], console: Console) -> bool:
    """Say whether the claim holds, by the counts of the code itself."""
    console.print(
        f"The deal service answered {deal_service.answered} requests and refused "
        f"{deal_service.refused}."
    )
    console.print("peer_comparison began twice: it paused for its peers in between.\n")
    subtasks = [name for analyst in ANALYSTS for name in analyst.plan.subtasks]
    computed_twice = {"peer_comparison", "ma_review"}  # the one paused, the other failed
    holds = all(
        completed[name] == 1 and began[name] == 1 + (name in computed_twice) for name in subtasks
    )
    if holds:
        console.print("✓ Each subtask was computed once, historical_roi too.")
    else:
        console.print("✗ Something was computed twice, or not at all.", style="bold red")
    return holds


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main("HLDN")) else 1)
