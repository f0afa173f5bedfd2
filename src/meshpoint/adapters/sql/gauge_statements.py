"""The statements of `meshpoint metrics`: each finds its rows by an index, and reads up to a limit.

None of them locks a row.
"""

from __future__ import annotations

from meshpoint.model.tasks import TaskState
from meshpoint.model.waits import QUESTION_PREFIX

_MINE = "FROM agent_paused_tasks WHERE agent_name = :agent AND"


def _count(rows: str, limit: str = ":most") -> str:
    return f"(SELECT count(*) FROM (SELECT 1 {rows} LIMIT {limit}) AS counted)"


_STATES = ",\n       ".join(
    f"{_count(f'''{_MINE} status = '{state}' ''', ':most_ended' if state.is_final else ':most')}"
    f" AS {state}"
    for state in TaskState
)

# Describe the tasks of an agent. Requests of a pause count as old as the pause, because each
# attempt to send them postpones `send_due_at`.
READ_TASK_GAUGES = f"""
SELECT {_STATES},
       {_count(f"{_MINE} suspended_at IS NOT NULL AND ended_at IS NULL AND NOT cancel_requested")}
         AS suspended,
       {_count(f"{_MINE} dead_reason IS NOT NULL AND status = 'failed'")} AS dead,
       (SELECT {{instant}} - min(wake_at) {_MINE} status = 'ready' AND wake_at <= {{instant}})
         AS ready_age,
       (SELECT {{instant}} - min(checkpointed_at)
          FROM (SELECT checkpointed_at {_MINE} status = 'waiting' LIMIT :most) AS waiting)
         AS waiting_age,
       (SELECT {{instant}} - min(t.checkpointed_at)
          FROM (SELECT logical_task_id FROM agent_parallel_invocations
                 WHERE agent_name = :agent AND send_due_at IS NOT NULL
                 ORDER BY send_due_at LIMIT :sample) AS unsent
          JOIN agent_paused_tasks AS t ON t.logical_task_id = unsent.logical_task_id)
         AS requests_age,
       (SELECT {{instant}} - min(send_due_at) FROM agent_peer_sub_tasks
         WHERE agent_name = :agent AND send_due_at <= {{instant}}) AS calls_age,
       (SELECT {{instant}} - min(ended_at)
          FROM (SELECT ended_at, reply_sent {_MINE} status IN ('completed', 'failed', 'cancelled')
                   AND wake_at <= {{instant}}
                 ORDER BY wake_at LIMIT :sample) AS due
         WHERE NOT reply_sent) AS replies_age,
       (SELECT count(*)
          FROM (SELECT c.invocation_id, t.generation, t.status
                  FROM agent_peer_sub_tasks AS c
                  JOIN agent_paused_tasks AS t ON t.logical_task_id = c.logical_task_id
                 WHERE c.agent_name = :agent AND c.status = 'pending'
                   AND c.peer_agent LIKE '{QUESTION_PREFIX}%' LIMIT :most) AS asked
         WHERE invocation_id = generation AND status = 'waiting') AS questions
"""

# Count ready tasks that have been due for `age` seconds, by format.
COUNT_UNACQUIRED = f"""
SELECT state_format, count(*) AS tasks
  FROM (SELECT state_format {_MINE} status = 'ready' AND wake_at <= {{instant}} - :age
           AND generation > 0 AND NOT cancel_requested
         ORDER BY wake_at LIMIT :sample) AS due
 GROUP BY state_format
"""

READ_SIZE = "SELECT pg_database_size(current_database()) AS bytes"
READ_SIZE_SQLITE = """
SELECT page_count * page_size AS bytes FROM pragma_page_count(), pragma_page_size()
"""

# Describe the other sessions, as far as the role may see them. Replicas wait for a lock only for a
# second at a time, so a wait counts from the beginning of the transaction that has the lock.
READ_SESSIONS = """
SELECT CAST(EXTRACT(EPOCH FROM max(clock_timestamp() - xact_start) FILTER (
         WHERE backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)) AS double precision)
         AS snapshot_age,
       CAST(EXTRACT(EPOCH FROM max(clock_timestamp() - query_start) FILTER (
         WHERE state = 'active')) AS double precision) AS query_age,
       CAST(EXTRACT(EPOCH FROM (
         SELECT max(clock_timestamp() - LEAST(waiting.query_start, holder.xact_start))
           FROM pg_stat_activity AS waiting
          CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS blocking(pid)
           LEFT JOIN pg_stat_activity AS holder ON holder.pid = blocking.pid
          WHERE waiting.datname = current_database() AND waiting.wait_event_type = 'Lock'))
         AS double precision) AS lock_wait
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND backend_type = 'client backend'
"""
