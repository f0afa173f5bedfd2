"""Research a trading strategy: `python examples/strategy_research/strategy_research.py`.

The research is cancelled while its model is being trained, and resumed later. Exits with 1 unless
it resumes in the cancelled epoch and produces the same weights as an uninterrupted run.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from researcher import Order, Research, completed, researcher, trainer, watchers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshpoint import Mesh, Ok
from meshpoint.local import local_mesh
from meshpoint.model.subtasks import SubtaskRecord
from meshpoint.operations import Operations

CANCELLED_IN = 4
"""The epoch; the first one is 0."""
STYLES = {
    "done": "green",
    "trained": "green",
    "reused": "cyan",
    "kept": "cyan",
    "gone on": "yellow",
}

Records = dict[str, SubtaskRecord]


@dataclass(frozen=True)
class Resumed:
    """Research cancelled in `phase`: its checkpoint then and at the end, and its result.

    `trainings`: how many tasks its trainer had of it.
    """

    phase: str | None
    trainings: int
    first: Records
    last: Records
    research: Research


class TrainingLog:
    """Notes who trained which epoch.

    The first run waits in epoch 4 until it is cancelled, so all shows are alike.
    """

    def __init__(self) -> None:
        self.run = "attempt 1"
        self.losses: dict[tuple[str, int], float] = {}
        self.began: set[tuple[str, int]] = set()
        self.epoch_reached = asyncio.Event()

    async def epoch_began(self, epoch: int) -> None:
        self.began.add((self.run, epoch))
        if (self.run, epoch) == ("attempt 1", CANCELLED_IN):
            self.epoch_reached.set()
            await asyncio.Event().wait()

    def epoch_trained(self, epoch: int, loss: float) -> None:
        self.losses[self.run, epoch] = loss


async def main() -> bool:
    """Research, cancel, resume and compare; whether it all came out as claimed."""
    logging.getLogger("meshpoint").setLevel(logging.ERROR)  # the cancel is shown below
    console, log = Console(highlight=False), TrainingLog()
    watchers.append(log)
    with TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/tasks.db"
        # The archive keeps the checkpoints of completed operations: for the table below.
        serving = local_mesh(
            researcher,
            trainer,
            db_url=database,
            namespace="research",
            checkpoint_archive=True,
            sweep_interval_seconds=0.1,
        )
        async with serving as mesh, Operations(database, namespace="research") as operations:
            resumed = await cancelled_and_resumed(mesh, operations, log, console)
            counts = Counter(completed)
            log.run = "never cancelled"
            other = await mesh.call(researcher, Order())
    print_steps(resumed, counts, console)
    print_epochs(log, console)
    return print_verdict(resumed, other, log, counts, console)


async def cancelled_and_resumed(
    mesh: Mesh, operations: Operations, log: TrainingLog, console: Console
) -> Resumed:
    """Cancel the research while its trainer works, and resume it."""
    task = await mesh.send(researcher, Order())
    await log.epoch_reached.wait()
    (running,) = await operations.find(agent=researcher.name)
    (training,) = running.children
    console.print(
        f"The researcher waits for its trainer, which is in epoch {CANCELLED_IN}: cancelled."
    )
    await task.cancel()
    await task.outcome()
    await operations.wait(training.id)  # the peer is cancelled a moment later
    first = await last_records(operations, running.id)

    log.run = "attempt 2"
    await operations.resume(running.id)
    outcome = await operations.wait(running.id)
    assert isinstance(outcome, Ok), outcome
    last = await last_records(operations, running.id)
    console.print("Resumed, and completed.")
    trainings = len(
        {child.id for child in (training, *(await operations.get(running.id)).children)}
    )
    return Resumed(running.phase, trainings, first, last, Research.model_validate(outcome.value))


async def last_records(operations: Operations, id_: str) -> Records:
    """The subtasks in an operation's last checkpoint."""
    return {record.name: record for record in (await operations.checkpoints(id_))[-1].subtasks}


def print_steps(resumed: Resumed, counts: Counter[str], console: Console) -> None:
    """Meshpoint's record of each attempt, next to the counts of the code itself."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "attempt 1", "attempt 2"):
        table.add_column(column)
    table.add_column("code completed", justify="right")
    for name in researcher.plan.subtasks:
        if name in resumed.first and resumed.first[name].completed:
            words = "done", "reused" if resumed.last[name].retry == 0 else "run again"
        else:
            words = ("cancelled", "gone on") if name == resumed.phase else ("not run", "done")
        table.add_row(name, *map(styled_status, words), str(counts[name]))
    console.print(table)


def print_epochs(log: TrainingLog, console: Console) -> None:
    """Who trained which epoch, and to which loss."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    runs = ("attempt 1", "attempt 2", "never cancelled")
    for column in ("epoch", *runs, "loss"):
        table.add_column(column, justify="right" if column in {"epoch", "loss"} else "left")
    for epoch in range(Order().epochs):
        words = [_status(log, run, epoch) for run in runs]
        table.add_row(
            str(epoch), *map(styled_status, words), f"{log.losses['never cancelled', epoch]:.6f}"
        )
    console.print(table)


def _status(log: TrainingLog, run: str, epoch: int) -> str:
    if (run, epoch) in log.losses:
        return "trained"
    return "cancelled" if (run, epoch) in log.began else "kept" if run == "attempt 2" else ""


def styled_status(word: str) -> Text:
    return Text(word, style=STYLES.get(word, "dim"))


def print_verdict(
    resumed: Resumed, other: Research, log: TrainingLog, counts: Counter[str], console: Console
) -> bool:
    """Say whether the claims hold, by the counts of the code itself."""
    test = resumed.research.backtest
    console.print(
        f"On {test.days} days that the model had not seen, it foresaw {test.hit_rate:.0%} of the "
        "moves."
    )
    console.print(
        f"Strategy {test.strategy_return:+.1%}, market {test.market_return:+.1%}: "
        f"{resumed.research.verdict}.\n"
    )
    for name, research in (("resumed", resumed.research), ("never cancelled", other)):
        console.print(
            f"weights, {name:<15}  "
            f"{' '.join(f'{weight:+.9f}' for weight in research.model.weights)}"
        )
    trained = Counter(epoch for run, epoch in log.losses if run != "never cancelled")
    resumed_epochs = {epoch for run, epoch in log.began if run == "attempt 2"}
    claims = {
        "designing was not done again": counts["designing"] == 1,
        f"training resumed at epoch {CANCELLED_IN}, not 0": resumed_epochs
        == set(range(CANCELLED_IN, Order().epochs)),
        "it was the same task of the trainer": resumed.trainings == 1,
        "each epoch was trained once": all(trained[epoch] == 1 for epoch in range(Order().epochs)),
        "the weights are the same to the last digit": resumed.research.model == other.model,
    }
    console.print()
    for claim, holds in claims.items():
        console.print(
            f"✓ {claim}" if holds else f"✗ not so: {claim}", style="" if holds else "bold red"
        )
    return all(claims.values())


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
