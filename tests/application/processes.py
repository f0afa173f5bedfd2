"""The processes of the application: replicas of all agents, and HTTP services."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import Any, Literal

import yaml

from chaos import replica
from chaos.replica import ReplicaSpec
from chaos.replica_pool import FAST_OPTIONS, ReplicaPool
from servers.process import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "incident_analyst"
Backend = Literal["sqlite", "servers"]
_TIMINGS = {
    name: value
    for name, value in FAST_OPTIONS.items()
    if name not in {"session_service", "stateless_checkpointing"}  # `database_url` implies them
}


def make_configuration(
    backend: Backend, namespace: str, redis_url: str | None, broker_url: str, db_url: str
) -> dict[str, Any]:
    """The example's own configuration, with other addresses and short timings."""
    text = (EXAMPLE / f"{backend}.yaml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text)
    config["mesh"] |= {
        "namespace": namespace,
        "broker_url": broker_url,
        "database_url": db_url,
        "publish_timeout_seconds": 60,  # the broker of a busy machine may respond late
    }
    for agent in config["agents"]:
        agent.update(_TIMINGS)
        if "memory_url" in agent:
            agent["memory_url"] = redis_url
    return config


def replica_pool(
    folder: Path, make: Any, urls: tuple[str, str], variables: Mapping[str, str], seed: int
) -> ReplicaPool:
    """Three replicas of all agents. `variables` are set in their environment."""
    folder.mkdir()
    target = partial(_serve_agents, dict(variables))
    return ReplicaPool(folder, make, *urls, seed=seed, size=3, target=target)


def service_pool(
    folder: Path, make: Any, urls: tuple[str, str], variables: Mapping[str, str], seed: int
) -> tuple[ReplicaPool, list[str]]:
    """Two HTTP services, and their addresses. A replaced process has the same address."""
    folder.mkdir()
    ports = [free_port(), free_port()]

    def make_for_one(broker_url: str, db_url: str) -> dict[str, Any]:
        """A service reports once that it is serving, as a replica of one agent does."""
        config: dict[str, Any] = make(broker_url, db_url)
        return config | {"agents": config["agents"][:1]}

    target = partial(_serve_http, dict(variables), ports)
    pool = ReplicaPool(folder, make_for_one, *urls, seed=seed, size=len(ports), target=target)
    return pool, [f"http://127.0.0.1:{port}" for port in ports]


def _serve_agents(variables: dict[str, str], spec: ReplicaSpec, supervisor: Connection) -> None:
    os.environ.update(variables)
    sys.path.insert(0, str(EXAMPLE))
    replica.main(spec, supervisor)


def _serve_http(
    variables: dict[str, str], ports: list[int], spec: ReplicaSpec, supervisor: Connection
) -> None:
    """Like `uvicorn service:app`, and report when it serves."""
    log = os.open(spec.folder / f"{spec.name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, sys.stderr.fileno())
    os.dup2(log, sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the supervisor
    os.environ.update(variables, INCIDENT_CONFIG=str(spec.config))
    sys.path.insert(0, str(EXAMPLE))

    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket] | None = None) -> None:
            # the pipe carries no data this way: readable means that the supervisor is gone
            asyncio.get_running_loop().add_reader(supervisor.fileno(), os._exit, 1)
            await super().startup(sockets)
            supervisor.send_bytes(b"service")

    port = ports[int(spec.name.partition("-")[0])]
    config = uvicorn.Config("service:app", port=port, timeout_graceful_shutdown=2)
    Server(config).run()
