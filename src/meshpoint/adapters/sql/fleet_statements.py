"""Statements on the replicas that serve agents."""

from __future__ import annotations

# Register a replica, or register it again. Only its state and its times change then. Returns the
# database's time.
PUT_REPLICA = """
INSERT INTO agent_replicas (
  agent_name, replica_id, release, app_version, state_formats, slots, host, is_draining,
  started_at, seen_at, expires_at)
VALUES (
  :agent, :replica, :release, :app_version, :state_formats, :slots, :host, :is_draining,
  {clock}, {clock}, {clock} + :valid_for)
ON CONFLICT (agent_name, replica_id) DO UPDATE SET
  is_draining = excluded.is_draining, seen_at = excluded.seen_at, expires_at = excluded.expires_at
RETURNING seen_at
"""

# Forget replicas that were lost long ago. Another replica may be doing the same.
DELETE_LOST_REPLICAS = """
DELETE FROM agent_replicas WHERE agent_name = :agent AND replica_id IN (
  SELECT replica_id FROM agent_replicas
   WHERE agent_name = :agent AND expires_at <= {instant} - :kept {for_delete_skip_locked})
"""

# Forget a replica that has stopped.
DELETE_REPLICA = """
DELETE FROM agent_replicas WHERE agent_name = :agent AND replica_id = :replica
"""

# Read the replicas of one agent, or of all agents of a namespace.
READ_REPLICAS = """
SELECT agent_name, replica_id, release, app_version, state_formats, slots, host, is_draining,
       started_at, seen_at, expires_at <= {clock} AS is_lost
  FROM agent_replicas
 WHERE agent_name = CAST(:agent AS text)
    OR (CAST(:agent AS text) IS NULL
        AND substr(agent_name, 1, length(CAST(:prefix AS text))) = CAST(:prefix AS text))
 ORDER BY agent_name, started_at, replica_id
"""
