"""All statements of `meshpoint doctor`. They run in read-only transactions and lock no row."""

from __future__ import annotations

# Count the tasks of an agent that have not ended. Works on the tables of every release.
COUNT_TASKS = """
SELECT status, CASE WHEN generation > 0 THEN state_format END AS state_format, app_version,
       count(*) AS tasks, min(checkpointed_at) AS oldest
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status {one_of:states}
 GROUP BY status, CASE WHEN generation > 0 THEN state_format END, app_version
"""

# Count the open calls of an agent's waiting tasks, by peer. Works on the tables of every release.
COUNT_WAITS = """
SELECT c.peer_agent, count(DISTINCT t.logical_task_id) AS tasks
  FROM agent_paused_tasks AS t JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = t.logical_task_id AND c.invocation_id = t.generation
 WHERE t.agent_name = :agent AND t.status = 'waiting' AND c.status = 'pending'
 GROUP BY c.peer_agent ORDER BY c.peer_agent
"""

# Count the tasks that died, by reason. Works on the tables of every release.
COUNT_DEAD = """
SELECT dead_reason, count(*) AS tasks FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'failed' AND dead_reason IS NOT NULL
 GROUP BY dead_reason ORDER BY count(*) DESC, dead_reason LIMIT :limit
"""

# Read the owners of running tasks. Works on the tables of every release.
READ_OWNERS = """
SELECT owner, count(*) AS tasks, max(wake_at) AS until FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'running' AND owner IS NOT NULL AND wake_at > {instant}
 GROUP BY owner ORDER BY owner
"""

# Count the parked tasks of an agent, by reason.
COUNT_PARKED = """
SELECT parked_reason, tried_versions, count(*) AS tasks FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'parked'
 GROUP BY parked_reason, tried_versions ORDER BY count(*) DESC, parked_reason
"""

# Count the tasks with subtasks that have not ended.
COUNT_OPERATIONS = """
SELECT count(*) AS tasks FROM agent_paused_tasks
 WHERE agent_name = :agent AND status {one_of:states} AND checkpoint_seq IS NOT NULL
"""

READ_CLOCK = "SELECT {clock} AS now"

# On PostgreSQL: the first privilege that the role lacks, and whether the server is a standby.
READ_STANDBY = "SELECT pg_is_in_recovery() AS standby"
READ_MISSING_PRIVILEGE = """
SELECT name, privilege
  FROM unnest(CAST(:names AS text[])) AS name,
       unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
 WHERE NOT has_table_privilege(to_regclass(name), privilege)
 LIMIT 1
"""
LIMIT_TIME = "SET LOCAL statement_timeout = {milliseconds}"
"""Filled in by Python, because PostgreSQL accepts no parameter here."""
