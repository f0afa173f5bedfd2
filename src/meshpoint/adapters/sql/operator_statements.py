"""All statements that only operators use. None of them locks a row.

Tasks are listed in the order of `wake_at`, because the replicas' own index has it: another index
would slow down every transition of every task.
"""

from __future__ import annotations

from meshpoint.adapters.sql.catalog_statements import summary_columns, summary_tables

_IN_NAMESPACE = "substr(t.agent_name, 1, length(CAST(:prefix AS text))) = CAST(:prefix AS text)"
_AFTER = """
   AND t.wake_at >= :after_at AND (t.wake_at, t.logical_task_id) > (:after_at, :after_id)"""
_BEFORE = """
   AND t.wake_at <= :after_at AND (t.wake_at, t.logical_task_id) < (:after_at, :after_id)"""

# Read waiting tasks, the next due first, and whether each is a root: whether its parent has no
# open call for it in this database.
_WAITING = """
SELECT t.logical_task_id, t.wake_at, NOT EXISTS (
    SELECT 1 FROM agent_paused_tasks AS p JOIN agent_peer_sub_tasks AS c
        ON c.logical_task_id = p.logical_task_id AND c.sub_task_id = t.logical_task_id
     WHERE p.logical_task_id = t.parent_task_id AND p.status = 'waiting'
       AND c.status = 'pending' AND c.invocation_id = p.generation) AS is_root
  FROM agent_paused_tasks AS t
 WHERE t.agent_name = :agent AND t.status = 'waiting'{after}
 ORDER BY t.wake_at, t.logical_task_id LIMIT :limit
"""
READ_WAITING = _WAITING.format(after="")
READ_WAITING_AFTER = _WAITING.format(after=_AFTER)

# Read tasks with the calls that they wait for, the tasks of those calls, and so on.
READ_TREES = """
WITH RECURSIVE tree(
  parent_id, task_id, call_id, peer, since, deadline, depth, seq, status, generation) AS (
  SELECT CAST(NULL AS varchar) COLLATE {bytewise}, t.logical_task_id, CAST('' AS varchar),
         CAST('' AS varchar), CAST(NULL AS double precision), CAST(NULL AS double precision), 0,
         0, t.status, t.generation
    FROM agent_paused_tasks AS t
   WHERE t.logical_task_id {one_of:ids} AND {in_namespace}
  UNION ALL
  SELECT tree.task_id, c.sub_task_id, c.call_id, c.peer_agent, c.created_at, c.timeout_deadline,
         tree.depth + 1, c.seq, t.status, t.generation
    FROM tree
    JOIN agent_peer_sub_tasks AS c
      ON c.logical_task_id = tree.task_id AND c.invocation_id = tree.generation
    LEFT JOIN agent_paused_tasks AS t
      ON t.logical_task_id = c.sub_task_id AND {in_namespace}
   WHERE tree.status = 'waiting' AND c.status = 'pending' AND tree.depth < :max_depth)
SELECT tree.*, t.agent_name, t.checkpointed_at, t.task_deadline, t.suspended_at, t.ended_at,
       t.cancel_requested, j.completed_count, j.total_expected, j.needed, j.join_deadline
  FROM tree
  LEFT JOIN agent_paused_tasks AS t ON t.logical_task_id = tree.task_id AND {in_namespace}
  LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = tree.task_id AND j.invocation_id = tree.generation
 LIMIT :limit
""".replace("{in_namespace}", _IN_NAMESPACE)

_DUE = f"""
SELECT {summary_columns} FROM {summary_tables}
 WHERE t.agent_name = :agent AND t.status = :status{{after}}
 ORDER BY t.wake_at {{direction}}, t.logical_task_id {{direction}} LIMIT :limit
"""
# List tasks of an agent in a state, the next due first.
LIST_DUE = _DUE.format(after="", direction="ASC")
LIST_DUE_AFTER = _DUE.format(after=_AFTER, direction="ASC")
# List ended tasks of an agent, the last to be deleted first.
LIST_ENDED = _DUE.format(after="", direction="DESC")
LIST_ENDED_AFTER = _DUE.format(after=_BEFORE, direction="DESC")

# Read the questions without an answer that follow a given one, in the order of their tasks.
READ_UNANSWERED = """
SELECT logical_task_id, sub_task_id FROM agent_task_questions
 WHERE answer IS NULL AND (logical_task_id, sub_task_id) > (:after_task, :after_question)
 ORDER BY logical_task_id, sub_task_id LIMIT :limit
"""

# Read which questions their tasks wait for. A join with the statement above would be planned as if
# that had no limit.
READ_WAITING_FOR = f"""
SELECT c.logical_task_id, c.sub_task_id, t.agent_name, c.created_at, c.timeout_deadline
  FROM {{pairs}}
  JOIN agent_paused_tasks AS t ON t.logical_task_id = pair.task_id
  JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
 WHERE {_IN_NAMESPACE} AND t.status = 'waiting' AND c.status = 'pending'
   AND c.invocation_id = t.generation
"""

# Count the first tasks of an agent in a state, by format and version.
SAMPLE_TASKS = """
SELECT state_format, app_version, count(*) AS tasks, min(checkpointed_at) AS oldest
  FROM (SELECT CASE WHEN generation > 0 THEN state_format END AS state_format, app_version,
               checkpointed_at
          FROM agent_paused_tasks WHERE agent_name = :agent AND status = :status
         ORDER BY wake_at LIMIT :limit) AS sample
 GROUP BY state_format, app_version ORDER BY count(*) DESC, app_version, state_format
"""

# Record an action that is about to begin.
RECORD_ACTION = """
INSERT INTO agent_operator_actions (
  namespace, action_id, actor, action, target, details, started_at)
VALUES (:namespace, :action_id, :actor, :action, :target, :details, {clock})
"""

# Record the result of an action, once.
COMPLETE_ACTION = """
UPDATE agent_operator_actions SET ended_at = {clock}, succeeded = :succeeded, result = :result
 WHERE namespace = :namespace AND action_id = :action_id AND ended_at IS NULL
"""

_ACTIONS = """
SELECT action_id, actor, action, target, details, started_at, ended_at, succeeded, result
  FROM agent_operator_actions WHERE namespace = :namespace{conditions}
 ORDER BY action_id DESC LIMIT :limit
"""
# List actions, newest first. `before` is above every id on the first page.
LIST_ACTIONS = _ACTIONS.replace("{conditions}", " AND action_id < :before")
LIST_ACTIONS_ON = _ACTIONS.replace("{conditions}", " AND target = :target AND action_id < :before")
SHOW_ACTION = _ACTIONS.replace("{conditions}", " AND action_id = :action_id")
