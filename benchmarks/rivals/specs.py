"""All contenders: how to start them, and what their servers guarantee."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import BenchmarkServers
from benchmarks.rivals.resource_meters import Meter, PostgresMeter, RedisMeter
from meshpoint.adapters.sql import migrations
from servers import RedisServer

MESHPOINT, IN_MEMORY, SQLITE = "Meshpoint", "Meshpoint, not durable", "Meshpoint on SQLite"
POSTGRESQL = "Meshpoint on PostgreSQL alone"
SEED, SEED_THREADS = "seed's design", "seed's design, in threads"
DBOS, LANGGRAPH, CELERY, DRAMATIQ = "DBOS", "LangGraph", "Celery", "dramatiq"

RIVALS_PYTHON = Path(sys.prefix) / "rivals" / "bin" / "python"
"""A separate environment, because the rivals' dependencies conflict with Meshpoint's and each
other's.
"""
_VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({n: version(n) for n in sys.argv[1:]}))
"""
_RIVAL_PACKAGES = (
    "dbos",
    "langgraph",
    "langgraph-checkpoint-postgres",
    "celery",
    "dramatiq",
    "redis",
)

GUARANTEES = {
    MESHPOINT: (
        "PostgreSQL with synchronous_commit; RabbitMQ: quorum queues, persistent, confirmed; "
        "the root's requests acked when their checkpoint is committed, its peer's, which never "
        "pauses, when they are answered"
    ),
    IN_MEMORY: (
        "stateless_checkpointing: false, the bare mesh: a request stays un-acked until its task "
        "ends"
    ),
    POSTGRESQL: (
        "one database for tasks and messages, with synchronous_commit; RabbitMQ is not used"
    ),
    SQLITE: (
        "one file for tasks and messages, WAL with synchronous FULL; "
        "RabbitMQ and PostgreSQL are not used"
    ),
    SEED: (
        "PostgreSQL and RabbitMQ as above; transactions on the event loop, as its text has it; "
        "a task is lost when its process dies between two of them"
    ),
    SEED_THREADS: "the same, but for transactions in eight threads next to the event loop",
    DBOS: (
        "PostgreSQL with synchronous_commit; "
        "child workflows in one process, no transport, no second agent"
    ),
    LANGGRAPH: (
        "PostgreSQL with synchronous_commit, durability exit (written at the pause and at the "
        "end); one resume for all answers, in one process, no transport, no second agent: the "
        "answers are there at once"
    ),
    CELERY: (
        "Redis with appendfsync everysec: what is written may be lost for a second; "
        "prefork 2, acks late"
    ),
    DRAMATIQ: (
        "Redis with appendfsync everysec: what is written may be lost for a second; two processes "
        "with eight threads each, which poll every 10 ms; acked when an actor returns; the root's "
        "state is a Redis key"
    ),
}


class _OtherRedis(RedisServer):
    """A second server, so that no contender's commands are counted for another."""


@dataclass(frozen=True, slots=True)
class ContenderSpec:
    """How to start a contender, and the meter of its servers' work."""

    name: str
    command: Sequence[str]
    meter: Meter | None = None


async def contender_specs(
    stage: BenchmarkServers, folder: Path, layout: Sequence[str] = ()
) -> list[ContenderSpec]:
    """All contenders available on this machine. `layout` has options for Meshpoint's processes."""
    amqp = (await stage.rabbit()).url
    meshpoint, alone, seed, threads = (
        await stage.database(),
        await stage.database(),
        await stage.empty_database(),
        await stage.empty_database(),
    )
    file = f"sqlite:///{folder}/meshpoint.db"
    await asyncio.to_thread(migrations.upgrade, file)
    specs = [
        ContenderSpec(
            MESHPOINT,
            command_here("mesh", amqp, meshpoint, *layout),
            await _postgres_meter(stage, meshpoint),
        ),
        ContenderSpec(
            POSTGRESQL,
            command_here("mesh", alone, alone, *layout),
            await _postgres_meter(stage, alone),
        ),
        ContenderSpec(IN_MEMORY, command_here("mesh", amqp, *layout)),
        ContenderSpec(SQLITE, command_here("mesh", file, file, *layout)),
        ContenderSpec(
            SEED, command_here("seed_rival", amqp, seed), await _postgres_meter(stage, seed)
        ),
        ContenderSpec(
            SEED_THREADS,
            command_here("seed_rival", amqp, threads, "--threads", "8"),
            await _postgres_meter(stage, threads),
        ),
    ]
    return [*specs, *await _rival_specs(stage)] if RIVALS_PYTHON.exists() else specs


async def _rival_specs(stage: BenchmarkServers) -> list[ContenderSpec]:
    dbos, langgraph = await stage.empty_database(), await stage.empty_database()
    redis = (await stage.server(RedisServer)).url
    other_redis = (await stage.server(_OtherRedis)).url
    return [
        ContenderSpec(
            DBOS, _command_in_rivals_python("dbos_rival", dbos), await _postgres_meter(stage, dbos)
        ),
        ContenderSpec(
            LANGGRAPH,
            _command_in_rivals_python("langgraph_rival", langgraph),
            await _postgres_meter(stage, langgraph),
        ),
        ContenderSpec(
            CELERY, _command_in_rivals_python("celery_rival", redis), await RedisMeter.open(redis)
        ),
        ContenderSpec(
            DRAMATIQ,
            _command_in_rivals_python("dramatiq_rival", other_redis),
            await RedisMeter.open(other_redis),
        ),
    ]


async def versions(packages: Sequence[str] = _RIVAL_PACKAGES) -> dict[str, str]:
    """The versions of the rivals' packages."""
    if not RIVALS_PYTHON.exists():
        return {"rivals": "not installed; `make bench` installs them"}
    command = [str(RIVALS_PYTHON), "-c", _VERSIONS, *packages]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    installed: dict[str, str] = json.loads(output)
    return installed


def layout_commands(amqp: str, database: str) -> dict[str, list[str]]:
    """Commands for the two ways to distribute Meshpoint's agents over processes."""
    return {
        "a process for each agent": command_here("mesh", amqp, database),
        "one process": command_here("mesh", amqp, database, "--together"),
    }


def command_here(module: str, *arguments: str) -> list[str]:
    """A command in this environment."""
    return [sys.executable, "-m", f"benchmarks.rivals.{module}", *arguments]


def _command_in_rivals_python(module: str, *arguments: str) -> list[str]:
    return [str(RIVALS_PYTHON), "-m", f"benchmarks.rivals.{module}", *arguments]


async def _postgres_meter(stage: BenchmarkServers, database: str) -> Meter:
    return await PostgresMeter.open((await stage.postgres()).url, database)
