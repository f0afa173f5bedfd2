"""All statements on operations and their checkpoints. See `statements` for those on tasks.

A transaction locks the task before it changes the task's operation or checkpoints.
"""

from __future__ import annotations

from meshpoint.adapters.sql import columns
from meshpoint.adapters.sql.columns import assigned, comma_separated, emptied, replaced

_CHECKPOINT, _READ = comma_separated(columns.CHECKPOINT), comma_separated(columns.CHECKPOINT_READ)
_RECORD = comma_separated(columns.RECORD)
_VALUES = ", ".join(
    (
        *(":task_id", ":agent", ":seq"),
        *(f":{name}" for name in columns.CHECKPOINT_PLAIN),
        *(f"{{jsonb:{name}}}" for name in columns.CHECKPOINT_JSON),
        *(f":{name}" for name in columns.CHECKPOINT_SNAPSHOT),
    )
)

# The newest versions of the records that the checkpoint `c` has, if it does not have them itself.
_NEWEST_RECORDS = """(
    SELECT r.name, r.record, r.result FROM agent_subtask_records AS r
     WHERE r.analysis_id = c.analysis_id AND r.agent_type = c.agent_type
       AND r.seq >= {records_from} AND r.seq <= c.seq
       AND NOT EXISTS (SELECT 1 FROM agent_subtask_records AS newer
                        WHERE newer.analysis_id = r.analysis_id
                          AND newer.agent_type = r.agent_type AND newer.name = r.name
                          AND newer.seq > r.seq AND newer.seq <= c.seq)
     ORDER BY r.place) AS newest"""
_RECORDS = {
    "subtasks": f"(SELECT coalesce({{record_list}}, '[]') FROM {_NEWEST_RECORDS})",
    "interim_results": f"(SELECT coalesce({{result_object}}, '{{{{}}}}') FROM {_NEWEST_RECORDS} "
    "WHERE result IS NOT NULL)",
}
# The columns of the checkpoint `c`, with its records.
_COMPLETE = ", ".join(
    f"""
  CASE WHEN {{records_from}} IS NULL THEN CAST(c.{name} AS text) ELSE {_RECORDS[name]}
  END AS {name}"""
    if name in _RECORDS
    else f"c.{name}"
    for name in columns.CHECKPOINT_READ
)
_ARCHIVED = {
    name: f"""
  CASE WHEN {{records_from}} IS NULL THEN c.{name} ELSE {{as_jsonb:{records}}} END"""
    for name, records in _RECORDS.items()
}

_REVIVED_CONTEXT = [
    name for name in columns.CONTEXT if name not in {"state_format", "token_usage"}
]

# Replaces a row that an earlier task with the same id left behind.
ON_CONFLICT_REPLACE = (
    f"ON CONFLICT ({comma_separated(columns.CHECKPOINT_KEY)}) DO UPDATE SET "
    f"{replaced(columns.CHECKPOINT_VALUES)}"
)

ON_CONFLICT_REPLACE_RECORD = (
    f"ON CONFLICT ({comma_separated(columns.RECORD_KEY)}) DO UPDATE SET "
    f"{replaced(columns.RECORD_VALUES)}"
)

# Store a key for a mesh, unless it has one.
INSERT_SECRET = """
INSERT INTO agent_mesh_secrets (namespace, copy_key) VALUES (:namespace, :key)
ON CONFLICT (namespace) DO NOTHING
"""

# Read the key of a mesh.
READ_SECRET = """
SELECT copy_key FROM agent_mesh_secrets WHERE namespace = :namespace
"""

# Insert an operation, or replace the row that an earlier task with the same id left behind.
INSERT_OPERATION = f"""
INSERT INTO agent_operations (
  {comma_separated(columns.NEW_OPERATION)})
VALUES (:task_id, :agent, :type, :subject, :parameters, '[]', :exclusive, :preserve, :now)
ON CONFLICT (operation_id) DO UPDATE SET
  {replaced(columns.NEW_OPERATION[1:])}
"""

# Make a running task an operation.
UPDATE_TRACKED = """
UPDATE agent_paused_tasks SET checkpoint_seq = 0 WHERE logical_task_id = :task_id
"""


def appended_children(stored: str, added: str) -> str:
    """SQL for a list of children with others appended. Both are the text of a JSON list."""
    return (
        f"substr({stored}, 1, length({stored}) - 1)"
        f" || CASE WHEN {stored} = '[]' THEN '' ELSE ',' END || substr({added}, 2)"
    )


# Append children to an operation's list.
ADD_CHILDREN = f"""
UPDATE agent_operations SET children = {appended_children("children", "CAST(:children AS text)")}
 WHERE operation_id = :task_id
"""

# Read an operation's list of children.
READ_CHILDREN = """
SELECT agent_name, children FROM agent_operations WHERE operation_id = :task_id
"""

# Empty an operation's list of children.
CLEAR_CHILDREN = """
UPDATE agent_operations SET children = '[]' WHERE operation_id = :task_id
"""

# Read which of these operations are exempt from deletion.
READ_PRESERVED = """
SELECT operation_id FROM agent_operations WHERE operation_id {one_of:ids} AND preserve
"""

# Exempt an operation from deletion, or end the exemption.
UPDATE_PRESERVE = """
UPDATE agent_operations SET preserve = :preserve WHERE operation_id = :task_id
"""

# Set when an ended task may be deleted. If its reply is sent, the task is due at that time.
UPDATE_EXPIRY = """
UPDATE agent_paused_tasks
   SET expires_at = :expires_at, wake_at = CASE WHEN reply_sent THEN :expires_at ELSE wake_at END
 WHERE logical_task_id = :task_id
"""

# Delete operations whose tasks are deleted.
DELETE_OPERATIONS = """
DELETE FROM agent_operations WHERE operation_id {one_of:ids}
"""

# Record the newest checkpoint of a running task. Progress resets its attempt to 1, and lowers its
# rescues to 2, from which on a task is a suspect.
UPDATE_SAVED = """
UPDATE agent_paused_tasks SET
  checkpoint_seq = :seq, attempt = CASE WHEN :progressed THEN 1 ELSE attempt END,
  rescues = CASE WHEN :progressed AND rescues > 2 THEN 2 ELSE rescues END
 WHERE logical_task_id = :task_id
"""

# Write a checkpoint.
INSERT_CHECKPOINT = f"""
INSERT INTO agent_checkpoints ({_CHECKPOINT}) VALUES ({_VALUES}) {ON_CONFLICT_REPLACE}
"""

# The columns of a copied checkpoint with another value.
_COPIED = {
    "seq": "seq + 1",
    "checkpoint_time": "CAST(:now AS double precision)",
    "created_at": "CAST(:now AS double precision)",
    "failure_reason": "CAST(:reason AS text)",
    "retry_count": "CAST(:retry_count AS integer)",
    "subtasks": "{jsonb:subtasks}",
    "error_details": "{jsonb:error_details}",
    "l1_snapshot": "NULL",
}

# Read the records of a checkpoint, whether its own row has them, and the tokens that its task had
# used by its last pause.
READ_RECORDS = f"""
SELECT (SELECT t.token_usage FROM agent_paused_tasks AS t
         WHERE t.logical_task_id = c.analysis_id) AS token_usage,
       {{records_from}} IS NULL AS in_row,
       CASE WHEN {{records_from}} IS NULL THEN CAST(c.subtasks AS text)
       ELSE {_RECORDS["subtasks"]} END AS subtasks
  FROM agent_checkpoints AS c
 WHERE c.analysis_id = :task_id AND c.agent_type = :agent AND c.seq = :seq
"""

# Write a version of a record.
INSERT_RECORD = f"""
INSERT INTO agent_subtask_records ({_RECORD})
VALUES (:task_id, :agent, :name, :seq, :place, :record, :result)
{ON_CONFLICT_REPLACE_RECORD}
"""

# Write a version of a record that has the same deliverable as the one before.
COPY_RECORD = f"""
INSERT INTO agent_subtask_records ({_RECORD})
SELECT analysis_id, agent_type, name, CAST(:seq AS integer), place, CAST(:record AS text), result
  FROM agent_subtask_records
 WHERE analysis_id = :task_id AND agent_type = :agent AND name = :name AND seq < :seq
 ORDER BY seq DESC LIMIT 1
{ON_CONFLICT_REPLACE_RECORD}
"""

# Delete the versions from a checkpoint on. An earlier task with the same id left them behind.
DELETE_LATER_RECORDS = """
DELETE FROM agent_subtask_records
 WHERE analysis_id = :task_id AND agent_type = :agent AND seq >= :seq
"""

# Delete all records of operations.
DELETE_RECORDS = """
DELETE FROM agent_subtask_records WHERE analysis_id {one_of:ids}
"""

# Copy an operation's last checkpoint to a new row with the reason for the end and other records,
# without the working memory.
COPY_LAST_CHECKPOINT = f"""
INSERT INTO agent_checkpoints ({_CHECKPOINT})
SELECT {", ".join(_COPIED.get(name, name) for name in columns.CHECKPOINT)}
  FROM agent_checkpoints WHERE analysis_id = :task_id AND agent_type = :agent AND seq = :seq
{ON_CONFLICT_REPLACE}
"""

# Remove the working memory from the checkpoints of an operation that are older than this one,
# which has its own.
DROP_OLDER_SNAPSHOTS = """
UPDATE agent_checkpoints SET l1_snapshot = NULL
 WHERE analysis_id = :task_id AND agent_type = :agent AND seq < :seq AND l1_snapshot IS NOT NULL
"""

# Delete the checkpoints of an operation up to this one, except the row with its working memory and
# the last row of each attempt.
PRUNE_CHECKPOINTS = """
DELETE FROM agent_checkpoints AS c
 WHERE c.analysis_id = :task_id AND c.agent_type = :agent AND c.seq <= :last
   AND c.l1_snapshot IS NULL
   AND EXISTS (SELECT 1 FROM agent_checkpoints AS later
                WHERE later.analysis_id = c.analysis_id AND later.agent_type = c.agent_type
                  AND later.seq > c.seq AND later.retry_count = c.retry_count)
"""

# Copy the checkpoints of operations to the archive, with their records.
ARCHIVE_CHECKPOINTS = f"""
INSERT INTO agent_checkpoints_archive ({_CHECKPOINT}, archived_at)
SELECT {", ".join(_ARCHIVED.get(name, f"c.{name}") for name in columns.CHECKPOINT)},
       CAST(:now AS double precision)
  FROM agent_checkpoints AS c WHERE c.analysis_id {{one_of:ids}}
{ON_CONFLICT_REPLACE}, archived_at = excluded.archived_at
"""

# Delete all checkpoints of operations.
DELETE_CHECKPOINTS = """
DELETE FROM agent_checkpoints WHERE analysis_id {one_of:ids}
"""

# Read the last checkpoint of an operation.
READ_LATEST = f"""
SELECT {_COMPLETE}
  FROM agent_paused_tasks AS t JOIN agent_checkpoints AS c
    ON c.analysis_id = t.logical_task_id AND c.agent_type = t.agent_name
   AND c.seq = t.checkpoint_seq
 WHERE t.logical_task_id = :task_id
"""

# Read the checkpoints of an operation, oldest first.
READ_HISTORY = f"""
SELECT {_COMPLETE}
  FROM agent_paused_tasks AS t JOIN agent_checkpoints AS c
    ON c.analysis_id = t.logical_task_id AND c.agent_type = t.agent_name
   AND c.seq <= t.checkpoint_seq
 WHERE t.logical_task_id = :task_id ORDER BY c.seq
"""

# Read the archived checkpoints of an operation, oldest first.
READ_ARCHIVE = f"""
SELECT {_READ} FROM agent_checkpoints_archive WHERE analysis_id = :task_id ORDER BY seq
"""

# Read the newest working memory among an operation's checkpoints.
READ_SNAPSHOT = """
SELECT c.analysis_id, c.agent_type, c.seq, c.l1_snapshot_hash, c.l1_snapshot
  FROM agent_paused_tasks AS t JOIN agent_checkpoints AS c
    ON c.analysis_id = t.logical_task_id AND c.agent_type = t.agent_name
   AND c.seq <= t.checkpoint_seq
 WHERE t.logical_task_id = :task_id AND c.l1_snapshot IS NOT NULL ORDER BY c.seq DESC LIMIT 1
"""

# Read the other columns that decide whether a locked task can be revived.
READ_REVIVABLE = """
SELECT t.wake_at, t.resume_token, t.reply_sent, t.request IS NOT NULL AS has_request,
       t.request_digest, t.agent_name, t.logical_task_id, o.exclusive
  FROM agent_paused_tasks AS t LEFT JOIN agent_operations AS o
    ON o.operation_id = t.logical_task_id AND t.checkpoint_seq IS NOT NULL
 WHERE t.logical_task_id = :task_id
"""

# Let only one transaction at a time revive an operation of this agent. PostgreSQL only. Held until
# the transaction ends, and acquired after the task's lock, so that transactions cannot deadlock.
LOCK_AGENT = """
SELECT pg_advisory_xact_lock(hashtextextended(CAST(:agent AS text), 0))
"""

# Find another operation of an agent that has not ended.
READ_OTHER_ACTIVE = """
SELECT logical_task_id FROM agent_paused_tasks
 WHERE agent_name = :agent AND status IN ('running', 'waiting', 'ready', 'parked')
   AND checkpoint_seq IS NOT NULL AND logical_task_id <> :task_id
 LIMIT 1
"""

# Make a task ready again, in the state of a new task except for its fence, request and checkpoint,
# the tokens of the attempts that have ended, and the state format, which names the version that
# began it.
UPDATE_REVIVED = f"""
UPDATE agent_paused_tasks SET
  status = 'ready', generation = 0, fence = fence + 1, run_id = :token,
  resume_token = coalesce(:order, resume_token), owner = NULL, attempt = 0, rescues = 0,
  retry_count = retry_count + 1, wake_at = :now, cancel_requested = false, suspended_at = NULL,
  {emptied((*columns.PARKING, *_REVIVED_CONTEXT))},
  token_usage = CASE WHEN ended_at IS NOT NULL THEN token_usage END,
  request = coalesce(:request, request),
  request_digest = CASE WHEN :replaced THEN :digest ELSE request_digest END,
  reply = NULL, reply_sent = false, reply_attempts = 0, {assigned(columns.REQUESTER)},
  keep_alive_at = :keep_alive_at, dead_reason = NULL, ended_at = NULL, expires_at = NULL
WHERE logical_task_id = :task_id
"""

# Delete the calls of a revived task, except those with an unsent cancel.
DELETE_CALLS_NOT_CANCELLING = """
DELETE FROM agent_peer_sub_tasks WHERE logical_task_id = :task_id AND status <> 'cancelling'
"""

# Detach the remaining calls from any pause: only their cancels are left to send.
DETACH_CALLS = """
UPDATE agent_peer_sub_tasks SET invocation_id = -1 WHERE logical_task_id = :task_id
"""

# Let a task that has not ended reply to another requester.
UPDATE_ADOPTED = f"""
UPDATE agent_paused_tasks SET
  resume_token = coalesce(:order, resume_token), {assigned(columns.REQUESTER)},
  keep_alive_at = :keep_alive_at, request_digest = coalesce(request_digest, :digest),
  wake_at = coalesce(:parked_until, wake_at)
WHERE logical_task_id = :task_id
"""

_SUMMARY = """o.*, t.status, t.owner, t.wake_at, t.ended_at, t.retry_count, t.dead_reason,
       t.parked_reason, t.token_usage, c.seq,
       c.checkpoint_time, c.progress_pct, c.current_subtask, c.pending_subtasks, c.failure_reason
  FROM agent_operations AS o JOIN agent_paused_tasks AS t
    ON t.logical_task_id = o.operation_id AND t.checkpoint_seq IS NOT NULL
  LEFT JOIN agent_checkpoints AS c
    ON c.analysis_id = o.operation_id AND c.agent_type = t.agent_name
   AND c.seq = t.checkpoint_seq"""

# Show one operation.
SHOW_OPERATION = f"""
SELECT {_SUMMARY} WHERE o.operation_id = :task_id
"""

# List operations of one agent, newest first.
LIST_AGENT_OPERATIONS = f"""
SELECT {_SUMMARY} WHERE o.agent_name = :agent AND t.status {{one_of:statuses}}
 ORDER BY o.created_at DESC, o.operation_id DESC LIMIT :limit
"""

# List operations of a whole namespace, newest first.
LIST_OPERATIONS = f"""
SELECT {_SUMMARY}
 WHERE substr(o.agent_name, 1, length(CAST(:prefix AS text))) = CAST(:prefix AS text)
   AND t.status {{one_of:statuses}}
 ORDER BY o.created_at DESC, o.operation_id DESC LIMIT :limit
"""
