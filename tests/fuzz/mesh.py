"""The mesh under fuzz: its agents and their configuration."""

from __future__ import annotations

from typing import Any

from chaos.replica_pool import FAST_OPTIONS

DURABLE = {
    "root": "chaos.agents:root",
    "leaf": "chaos.agents:leaf",
    "asker": "fuzz.agents:asker",
    "sleeper": "fuzz.agents:sleeper",
    "solo": "fuzz.agents:solo",
    "diary": "fuzz.agents:diary",
    "clerk": "fuzz.agents:clerk",
}
IN_PROCESS = {
    "light": "fuzz.agents:light",
    "spark": "fuzz.agents:spark",
    "doubter": "fuzz.agents:doubter",
    "dozer": "fuzz.agents:dozer",
    "teller": "fuzz.agents:teller",
}
SWITCHED_OFF = "dozer"
"""An in-process agent that has a database, but `stateless_checkpointing` is off."""
AGENTS = (*DURABLE, *IN_PROCESS)
CREDULOUS = ("asker", "doubter")
"""Agents that call the lying peer.

Their calls time out soon; on a busy machine an honest call may take long.
"""
HONEST = ("root", "light")
"""Agents that the honest requester calls."""
LOGIN = "guest"
"""Login of the honest agents and of the honest requester."""
OPERATOR = "operator"
"""Login that may cancel and resume any task."""
MAX_BODY_BYTES = 200_000
"""Message size limit in bytes."""


def make_configuration(
    namespace: str, publish_timeout: float, broker_url: str, db_url: str
) -> dict[str, Any]:
    """Configuration of a replica.

    On a broker that verifies logins, agents and requester are tied to theirs.
    """
    verification = broker_url.startswith("amqp:")
    logins = dict.fromkeys((*AGENTS, "ledger"), LOGIN) if verification else {}
    fast_options = {
        name: value
        for name, value in FAST_OPTIONS.items()
        if name not in {"session_service", "stateless_checkpointing"}
    }
    shared_options = {
        **fast_options,
        "peer_timeout_seconds": 10,
        "sweep_interval_seconds": 0.5,
        "max_attempts": 5,
        "peer_logins": logins,
        "operator_logins": [OPERATOR] if verification else [],
    }
    durable_options = {
        "stateless_checkpointing": True,
        "session_service": "sql",
        "session_db_url": db_url,
    }
    agents: list[dict[str, Any]] = [
        {"name": name, "entrypoint": path, **shared_options, **durable_options}
        for name, path in DURABLE.items()
    ]
    switched_off = durable_options | {"stateless_checkpointing": False}
    for name, path in IN_PROCESS.items():
        options = shared_options | (switched_off if name == SWITCHED_OFF else {})
        agents.append({"name": name, "entrypoint": path, **options})
    for agent in agents:
        agent["peer_timeout_seconds"] = 10 if agent["name"] in CREDULOUS else 3600
    mesh = {
        "namespace": namespace,
        "broker_url": broker_url,
        "max_message_bytes": MAX_BODY_BYTES,
        "publish_timeout_seconds": publish_timeout,
        "queue_lease_seconds": 5,
    }
    return {"mesh": mesh, "agents": agents}
