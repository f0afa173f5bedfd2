"""The register of the keys that may have sealed values of each agent."""

from __future__ import annotations

from collections.abc import Collection

from meshpoint.adapters.sql.database import Transaction
from meshpoint.errors import ConfigurationError

_INSERT = """
INSERT INTO agent_mesh_keys (agent_name, key_id, used_at) VALUES (:agent, :key_id, {clock})
ON CONFLICT (agent_name, key_id) DO NOTHING
"""
READ = "SELECT key_id FROM agent_mesh_keys WHERE agent_name = :agent ORDER BY used_at, key_id"
_DELETE = "DELETE FROM agent_mesh_keys WHERE agent_name = :agent AND key_id {one_of:key_ids}"


async def check(tx: Transaction, agent: str) -> None:
    """Register the key that seals the values of `agent`, a qualified name.

    Raises:
        ConfigurationError: The ring lacks a registered key.
    """
    sealer = tx.options.codec.sealer
    known = () if sealer is None else sealer.key_ids
    if missing := [key_id for key_id in await read(tx, agent) if key_id not in known]:
        name = agent.removeprefix(tx.options.names.prefix)
        problem = f"has no key {', '.join(missing)}, which sealed values of agent {name!r}"
        fix = "add the key; if nothing is sealed with it any more, run: meshpoint db reseal CONFIG"
        raise ConfigurationError("agent.encryption_keys", problem, fix)
    await record(tx, agent)


async def record(tx: Transaction, agent: str) -> None:
    """Register the key that seals the values of `agent`, unless it is registered.

    Replicas repeat this while they run: `db reseal` may have removed a key that one still uses.
    """
    sealer = tx.options.codec.sealer
    if sealer is not None and (key_id := sealer.key_id(agent)) is not None:
        await tx.execute(_INSERT, agent=agent, key_id=key_id)


async def read(tx: Transaction, agent: str) -> list[str]:
    """The registered keys of an agent."""
    return [row.key_id for row in await tx.fetch(READ, agent=agent)]


async def remove(tx: Transaction, agent: str, key_ids: Collection[str]) -> None:
    """Remove keys from the register."""
    if key_ids:
        await tx.execute(_DELETE, agent=agent, key_ids=sorted(key_ids))
