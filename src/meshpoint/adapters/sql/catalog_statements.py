"""All statements that list and show tasks for people and for `meshpoint doctor`.

None of them locks a row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from meshpoint.adapters.sql.columns import GENERATION

summary_columns = """t.logical_task_id, t.agent_name, t.status, t.generation, t.fence, t.attempt,
       t.owner, t.wake_at, t.checkpointed_at, t.ended_at, t.dead_reason, t.rescues,
       t.requester_app_id, t.parent_task_id, t.user_id, t.effective_session_id, t.task_deadline,
       t.state_format, t.app_version, t.retry_count, t.incompatible_since, t.parked_reason,
       t.tried_versions, t.suspended_at, t.cancel_requested, j.completed_count, j.total_expected,
       j.needed, j.join_deadline, o.subject"""

summary_tables = """agent_paused_tasks AS t LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = t.logical_task_id AND j.invocation_id = t.generation
  LEFT JOIN agent_operations AS o
    ON o.operation_id = t.logical_task_id AND t.checkpoint_seq IS NOT NULL"""

_CONDITIONS: Final = {
    "agent": "t.agent_name = :agent",
    "prefix": "substr(t.agent_name, 1, length(CAST(:prefix AS text))) = CAST(:prefix AS text)",
    "status": "t.status = :status",
    "states": "t.status {one_of:states}",
    "subject": "o.subject = :subject",
    "subjects": "o.subject {one_of:subjects}",
    "requester": "t.requester_app_id = :requester",
    "user": "t.user_id = :user",
    "users": "t.user_id {one_of:users}",
    "since": "t.checkpointed_at >= :since",
    "until": "t.checkpointed_at < :until",
    "suspended": """(t.suspended_at IS NOT NULL AND NOT t.cancel_requested
   AND t.ended_at IS NULL) = :suspended""",
    "waiting_for": """t.status = 'waiting' AND EXISTS (
       SELECT 1 FROM agent_peer_sub_tasks AS c
        WHERE c.logical_task_id = t.logical_task_id
          AND c.peer_agent IN (CAST(:waiting_for AS text), '~' || CAST(:waiting_for AS text),
                               '~?' || CAST(:waiting_for AS text))
          AND c.status = 'pending')""",
    # The first condition is for the index, the second one for tasks of the same time.
    "after_at": """t.checkpointed_at <= :after_at
   AND (t.checkpointed_at, t.logical_task_id) < (:after_at, :after_id)""",
}
"""Conditions, by parameter.

PostgreSQL plans these statements without knowing their parameters, so a listing includes only the
conditions that it needs. Indexes cover the operations on a subject, the tasks of a user, and
the tasks of one agent and state. More indexes would slow down every transition of every task.
"""


def list_tasks(parameters: Collection[str]) -> str:
    """Return the statement that lists the tasks that match these parameters, newest first.

    With a subject, it starts from the operations, which are indexed by subject.
    """
    conditions, tables = _CONDITIONS, summary_tables
    if not {"subject", "subjects"}.isdisjoint(parameters):
        conditions = _CONDITIONS | {"agent": "o.agent_name = :agent"}
        tables = summary_tables.replace("LEFT JOIN agent_operations", "JOIN agent_operations")
    chosen = [text for name, text in conditions.items() if name in parameters]
    return f"""
SELECT {summary_columns}
  FROM {tables}
 WHERE {" AND ".join(chosen)}
 ORDER BY t.checkpointed_at DESC, t.logical_task_id DESC LIMIT :limit
"""


def list_tasks_of_states(parameters: Collection[str], count: int) -> str:
    """Return the statement that lists tasks of `count` states: `status_0`, `status_1`, …

    Each state has an index scan and a limit of its own. One statement reads them all, because a
    task that changes its state between two statements would be in none or in both.
    """
    each = list_tasks({*parameters, "status"})
    return " UNION ALL ".join(
        f"SELECT * FROM ({each.replace(':status', f':status_{number}')}) AS s{number}"
        for number in range(count)
    )


# Read the names of all agents, with one index lookup for each.
READ_AGENTS = """
WITH RECURSIVE agents(name) AS (
  SELECT min(agent_name) FROM agent_paused_tasks WHERE agent_name > ''
  UNION ALL
  SELECT (SELECT min(t.agent_name) FROM agent_paused_tasks AS t WHERE t.agent_name > agents.name)
    FROM agents WHERE agents.name IS NOT NULL)
SELECT name FROM agents WHERE name IS NOT NULL
"""

# Read the peers that tasks wait for.
READ_WAITS = """
SELECT c.logical_task_id, c.peer_agent
  FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} AND t.status = 'waiting' AND c.status = 'pending'
 GROUP BY c.logical_task_id, c.peer_agent
"""

# Show one task.
SHOW_TASK = f"""
SELECT {summary_columns}, t.token_usage
  FROM {summary_tables} WHERE t.logical_task_id = :task_id
"""

# Read the request of a task.
READ_REQUEST = """
SELECT agent_name, request FROM agent_paused_tasks WHERE logical_task_id = :task_id
"""

# Read the calls of one pause of a task, in call order.
READ_CALLS = """
SELECT logical_task_id, sub_task_id, agent_name, call_id, peer_agent, request, status, outcome
  FROM agent_peer_sub_tasks
 WHERE logical_task_id = :task_id AND invocation_id = :generation ORDER BY seq
"""

# List the attempts at the calls of a task. A request was sent at `dispatched_at`, or at
# `join_dispatched_at` if all requests of the pause were sent together.
SHOW_CALLS = f"""
SELECT c.logical_task_id, c.sub_task_id, c.agent_name, c.call_id, c.seq, c.peer_agent, c.status,
       c.outcome, c.retry, c.send_due_at,
       c.timeout_deadline, c.absolute_deadline, c.created_at, c.send_attempts, c.dispatched_at,
       j.send_attempts AS join_send_attempts, j.dispatched_at AS join_dispatched_at,
       {GENERATION} AS generation, c.invocation_id < -1 AS is_superseded
  FROM agent_peer_sub_tasks AS c LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id AND j.invocation_id = {GENERATION}
 WHERE c.logical_task_id = :task_id ORDER BY generation, c.seq, c.created_at
"""


# For `meshpoint doctor`: count the tasks of an agent that have not ended. Works on the tables of
# every release.
COUNT_TASKS = """
SELECT status, CASE WHEN generation > 0 THEN state_format END AS state_format, app_version,
       count(*) AS tasks, min(checkpointed_at) AS oldest
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status {one_of:states}
 GROUP BY status, CASE WHEN generation > 0 THEN state_format END, app_version
"""

# Count the open calls of an agent's waiting tasks, by peer, without waits that no peer answers.
# Works on the tables of every release.
COUNT_WAITS = """
SELECT c.peer_agent, count(DISTINCT t.logical_task_id) AS tasks
  FROM agent_paused_tasks AS t JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = t.logical_task_id AND c.invocation_id = t.generation
 WHERE t.agent_name = :agent AND t.status = 'waiting' AND c.status = 'pending'
   AND c.peer_agent NOT LIKE '~%'
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

# Count the suspended tasks of an agent.
COUNT_SUSPENDED = """
SELECT count(*) AS tasks, min(suspended_at) AS oldest FROM agent_paused_tasks
 WHERE agent_name = :agent AND status {one_of:states} AND suspended_at IS NOT NULL
   AND NOT cancel_requested
"""

# Count the tasks with subtasks that have not ended.
COUNT_OPERATIONS = """
SELECT count(*) AS tasks FROM agent_paused_tasks
 WHERE agent_name = :agent AND status {one_of:states} AND checkpoint_seq IS NOT NULL
"""

READ_CLOCK = "SELECT {clock} AS now"

# On PostgreSQL: write a few megabytes into a temporary file where the database's tables are, which
# even a read-only transaction may do. The settings make it write there instead of in memory.
TEMPORARY_FILE_SETTINGS = ("SET LOCAL work_mem = '64kB'", "SET LOCAL temp_tablespaces = ''")
WRITE_TEMPORARY_FILE = "SELECT count(*) FROM generate_series(1, 300000)"

# On PostgreSQL: the first privilege that the role lacks, and whether the server is a standby.
READ_STANDBY = "SELECT pg_is_in_recovery() AS standby"
READ_MISSING_PRIVILEGE = """
SELECT name, privilege
  FROM unnest(CAST(:names AS text[])) AS name,
       unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
 WHERE NOT has_table_privilege(to_regclass(name), privilege)
 LIMIT 1
"""
