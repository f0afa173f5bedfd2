"""Plan a trip: `python examples/travel_assistant/travel_assistant.py pydantic_ai`.

The assistant asks two peers, and then a person. While it waits for the person, its replica is
killed, and another one continues. Exits with 1 if a call was repeated.

With the variable TRAVEL_MODEL, the assistant uses a model of a real provider.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from trips import LEDGER, Trip

import meshpoint
from meshpoint import Failed, Ok, Peer, TaskHandle
from meshpoint.frameworks import APPROVAL, Approval

FRAMEWORKS = {
    "pydantic_ai": "Pydantic AI",
    "langgraph": "LangGraph",
    "google_adk": "Google ADK",
    "agent_framework": "Microsoft Agent Framework",
    "strands": "Strands",
    "openai_agents": "the OpenAI Agents SDK",
}
"""The name of each framework, by the name of its adapter."""
CALLS = ("model", "flights", "hotels", "book")
AGENTS = 3

travel = Peer("travel", Trip, str)


async def main(framework: str) -> int:
    """Run the assistant, kill its first replica, and count the calls. Returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ledger = Path(folder) / "ledger"
        variables = {
            "FRAMEWORK": framework,
            "MESH_URL": f"sqlite:///{folder}/mesh.db",
            LEDGER: str(ledger),
        }
        outcome, replicas = await plan_trip(framework, variables, console)
        lines = [line.split() for line in ledger.read_text(encoding="utf-8").splitlines()]
    if isinstance(outcome, Failed):
        console.print(f"✗ The assistant failed: {outcome.message}", style="bold red")
        return 1
    console.print(f"It answers: {outcome.value.strip()}")
    counts = [Counter(call for pid, call in lines if int(pid) == each) for each in replicas]
    print_table(counts, console)
    return 0 if print_verdict(counts, console) else 1


async def plan_trip(
    framework: str, variables: Mapping[str, str], console: Console
) -> tuple[Ok[str] | Failed, list[int]]:
    """Plan a trip, with a kill. Returns the outcome, and the process id of each replica."""
    async with (
        start_replica(variables) as first,
        meshpoint.connect(variables["MESH_URL"], namespace="travel") as mesh,
    ):
        console.print(f"An assistant in {FRAMEWORKS[framework]} plans two days in Rome.")
        task = await mesh.send(travel, Trip(city="Rome"))
        if (question := await next_question(task)) is None:
            return await task.outcome(), [first.pid]
        console.print("It asks flights and hotels in one turn, and then a person:")
        console.print(question, style="cyan")
        first.kill()
        await first.wait()
        console.print("SIGKILL to replica A while it waits. Replica B starts.")
        async with start_replica(variables) as second:
            console.print("The person approves.")
            await task.complete(APPROVAL, Approval(approved=True))
            return await task.outcome(), [first.pid, second.pid]


async def next_question(task: TaskHandle[str]) -> str | None:
    """The prompt of the task's question, or `None` if it ends without one."""
    async for update in task.updates():
        if update.kind == "question":
            return update.prompt or ""
    return None


@asynccontextmanager
async def start_replica(variables: Mapping[str, str]) -> AsyncIterator[Process]:
    """A process that serves all agents. It drains when the block ends, if it still lives."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshpoint.cli", "run", "travel.yaml", "--log-json"),
        cwd=Path(__file__).parent,
        env={**os.environ, **variables},
        stderr=PIPE,
    )
    assert process.stderr is not None
    try:
        started, log = 0, b""
        while started < AGENTS:
            line = await process.stderr.readline()
            if not line:
                raise RuntimeError(f"a replica did not start:\n{log.decode(errors='replace')}")
            log += line
            if line.startswith(b"{"):
                started += json.loads(line).get("step") == "started"
        reading = asyncio.create_task(process.stderr.read())
        yield process
        if process.returncode is None:
            process.terminate()
        await reading
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def print_table(counts: list[Counter[str]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("calls")
    for replica in ("replica A", "replica B")[: len(counts)]:
        table.add_column(replica, justify="right")
    for call in CALLS:
        table.add_row(call, *(str(count[call]) for count in counts))
    console.print(table)


def print_verdict(counts: list[Counter[str]], console: Console) -> bool:
    """Say which claims hold; whether all do."""
    total = sum(counts, Counter[str]())
    claims = {
        "Each peer was asked once.": total["flights"] == total["hotels"] == 1,
        "The trip was booked once.": total["book"] == 1,
    }
    if not os.environ.get("TRAVEL_MODEL"):  # the script counts its own calls
        turns = [count["model"] for count in counts]
        claims = {"The model was called three times, once per turn.": turns == [2, 1], **claims}
    for claim, holds in claims.items():
        style = "green" if holds else "bold red"
        console.print(f"{'✓' if holds else '✗'} {claim}", style=style)
    return all(claims.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plan a trip, and lose a replica on the way.")
    parser.add_argument("framework", choices=FRAMEWORKS, nargs="?", default="pydantic_ai")
    sys.exit(asyncio.run(main(parser.parse_args().framework)))
