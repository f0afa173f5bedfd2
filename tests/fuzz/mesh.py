"""The mesh under fuzz: its agents and their configuration."""

from __future__ import annotations

from typing import Any

from chaos.crew import QUICK

DURABLE = {
    "root": "chaos.cast:root",
    "leaf": "chaos.cast:leaf",
    "asker": "fuzz.cast:asker",
    "sleeper": "fuzz.cast:sleeper",
    "solo": "fuzz.cast:solo",
    "diary": "fuzz.cast:diary",
}
IN_PROCESS = {"light": "fuzz.cast:light", "spark": "fuzz.cast:spark", "doubter": "fuzz.cast:doubter"}
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
LARGEST = 200_000
"""Message size limit in bytes."""


def configuration(namespace: str, publish_timeout: float, broker_url: str, db_url: str) -> dict[str, Any]:
    """Configuration of a replica.

    On a broker that verifies logins, agents and requester are tied to theirs.
    """
    verified = not broker_url.startswith("sqlite:")
    logins = dict.fromkeys((*AGENTS, "ledger"), LOGIN) if verified else {}
    quick = {
        name: value for name, value in QUICK.items() if name not in {"session_service", "stateless_checkpointing"}
    }
    common = {
        **quick,
        "peer_timeout_seconds": 10,
        "sweep_interval_seconds": 0.5,
        "max_attempts": 5,
        "peer_logins": logins,
        "operator_logins": [OPERATOR] if verified else [],
    }
    stored = {"stateless_checkpointing": True, "session_service": "sql", "session_db_url": db_url}
    agents: list[dict[str, Any]] = [
        {"name": name, "entrypoint": path, **common, **stored} for name, path in DURABLE.items()
    ]
    agents += [{"name": name, "entrypoint": path, **common} for name, path in IN_PROCESS.items()]
    for agent in agents:
        agent["peer_timeout_seconds"] = 10 if agent["name"] in CREDULOUS else 3600
    mesh = {
        "namespace": namespace,
        "broker_url": broker_url,
        "max_message_bytes": LARGEST,
        "publish_timeout_seconds": publish_timeout,
    }
    return {"mesh": mesh, "agents": agents}
