"""All statements on tasks, calls and joins.

They are in one file so that a change to a column or to the lock order can be checked against all
of them. Statements on operations and their checkpoints are in `operation_statements`. Fragments in
braces differ between databases: see `dialect`.

A transaction locks a task before it changes the task, its calls or its joins, and locks tasks in
order of id. So transactions cannot deadlock, and calls and joins need no locks of their own. Three
writes skip the task's lock and never wait: the sender's lease on a call or join, the record in a
join that its requests were sent, and the extension of an idle deadline.

LOCK statements wait for rows up to `lock_timeout`; after a timeout, the transaction is repeated
with the variants that skip locked rows. PICK statements always skip them. The data for a decision
is read in a later statement than the lock, since the snapshot of a statement that waited for a
lock is older than the lock.
"""

from __future__ import annotations

from meshpoint.adapters.sql import columns
from meshpoint.adapters.sql.columns import APPENDED, GENERATION, assigned, comma_separated, emptied

_REQUESTER, _REQUESTER_VALUES = (
    comma_separated(columns.REQUESTER),
    comma_separated(columns.REQUESTER, ":"),
)
_CONTEXT, _CONTEXT_VALUES = comma_separated(columns.CONTEXT), comma_separated(columns.CONTEXT, ":")
_REPLY = comma_separated(columns.REPLY)
_SUSPENSION = "status, cancel_requested, suspended_at"  # what `is_suspended` reads
_ACQUIRED = (
    "logical_task_id, agent_name, generation, fence, attempt, rescues, checkpoint_seq, "
    f"{_SUSPENSION}"
)
_ENDABLE = f"{_ACQUIRED}, {_REQUESTER}, state_format, retry_count, request_digest"

# Lock tasks by id. Also returns the time after the last lock, in a row of NULLs if no task exists.
LOCK_TASKS = f"""
WITH locked AS MATERIALIZED (
  SELECT logical_task_id, agent_name, status, generation, fence, run_id, owner, attempt,
         cancel_requested, suspended_at, state_format, {_REQUESTER}, ended_at,
         incompatible_since, tried_versions, checkpoint_seq, retry_count, log_seq,
         further_reply_to
    FROM agent_paused_tasks WHERE logical_task_id {{one_of:ids}}
   ORDER BY logical_task_id {{for_update}})
SELECT locked.*, {{clock}} AS now
  FROM (SELECT count(*) AS n FROM locked) AS counted LEFT JOIN locked ON counted.n > 0
"""

# The same, skipping tasks that other sessions hold. `existing` counts those too.
LOCK_TASKS_SKIP_LOCKED = LOCK_TASKS.replace("{for_update}", "{skip_locked}").replace(
    "AS now",
    """AS now,
       (SELECT count(*) FROM agent_paused_tasks WHERE logical_task_id {one_of:ids}) AS existing""",
)

# Find which tasks exist, without a lock.
READ_EXISTING_IDS = """
SELECT logical_task_id FROM agent_paused_tasks WHERE logical_task_id {one_of:ids}
"""

# Find which runs own tasks, without a lock.
READ_OWNERS = """
SELECT logical_task_id, status, fence FROM agent_paused_tasks WHERE logical_task_id {one_of:ids}
"""

# Limit lock waits for the rest of this transaction.
SET_LOCK_TIMEOUT = "SELECT set_config('lock_timeout', :limit, true)"

# Lock the calls, joins, checkpoints, subtask records, operations, log entries and mailboxes of
# locked tasks. Returns the tasks with a row that another session holds.
LOCK_CHILD_ROWS = """
WITH calls AS MATERIALIZED (
  SELECT logical_task_id, sub_task_id FROM agent_peer_sub_tasks
   WHERE logical_task_id {one_of:ids} {for_delete_skip_locked}),
joins AS MATERIALIZED (
  SELECT logical_task_id, invocation_id FROM agent_parallel_invocations
   WHERE logical_task_id {one_of:ids} {for_delete_skip_locked}),
kept AS MATERIALIZED (
  SELECT analysis_id, agent_type, seq FROM agent_checkpoints
   WHERE analysis_id {one_of:ids} {for_delete_skip_locked}),
records AS MATERIALIZED (
  SELECT analysis_id, agent_type, name, seq FROM agent_subtask_records
   WHERE analysis_id {one_of:ids} {for_delete_skip_locked}),
operations AS MATERIALIZED (
  SELECT operation_id FROM agent_operations
   WHERE operation_id {one_of:ids} {for_delete_skip_locked}),
entries AS MATERIALIZED (
  SELECT logical_task_id, seq FROM agent_task_log
   WHERE logical_task_id {one_of:ids} {for_delete_skip_locked}),
signals AS MATERIALIZED (
  SELECT logical_task_id, seq FROM agent_task_signals
   WHERE logical_task_id {one_of:ids} {for_delete_skip_locked}),
questions AS MATERIALIZED (
  SELECT logical_task_id, sub_task_id FROM agent_task_questions
   WHERE logical_task_id {one_of:ids} {for_delete_skip_locked}),
task_values AS MATERIALIZED (
  SELECT logical_task_id, key FROM agent_task_values
   WHERE logical_task_id {one_of:ids} {for_delete_skip_locked})
SELECT c.logical_task_id AS task_id FROM agent_peer_sub_tasks AS c
 WHERE c.logical_task_id {one_of:ids}
   AND (c.logical_task_id, c.sub_task_id) NOT IN (SELECT * FROM calls)
UNION
SELECT j.logical_task_id FROM agent_parallel_invocations AS j
 WHERE j.logical_task_id {one_of:ids}
   AND (j.logical_task_id, j.invocation_id) NOT IN (SELECT * FROM joins)
UNION
SELECT k.analysis_id FROM agent_checkpoints AS k
 WHERE k.analysis_id {one_of:ids}
   AND (k.analysis_id, k.agent_type, k.seq) NOT IN (SELECT * FROM kept)
UNION
SELECT r.analysis_id FROM agent_subtask_records AS r
 WHERE r.analysis_id {one_of:ids}
   AND (r.analysis_id, r.agent_type, r.name, r.seq) NOT IN (SELECT * FROM records)
UNION
SELECT l.logical_task_id FROM agent_task_log AS l
 WHERE l.logical_task_id {one_of:ids}
   AND (l.logical_task_id, l.seq) NOT IN (SELECT * FROM entries)
UNION
SELECT s.logical_task_id FROM agent_task_signals AS s
 WHERE s.logical_task_id {one_of:ids}
   AND (s.logical_task_id, s.seq) NOT IN (SELECT * FROM signals)
UNION
SELECT q.logical_task_id FROM agent_task_questions AS q
 WHERE q.logical_task_id {one_of:ids}
   AND (q.logical_task_id, q.sub_task_id) NOT IN (SELECT * FROM questions)
UNION
SELECT v.logical_task_id FROM agent_task_values AS v
 WHERE v.logical_task_id {one_of:ids}
   AND (v.logical_task_id, v.key) NOT IN (SELECT * FROM task_values)
UNION
SELECT o.operation_id FROM agent_operations AS o
 WHERE o.operation_id {one_of:ids} AND o.operation_id NOT IN (SELECT * FROM operations)
"""

# Look up tasks by id, without a lock; ended tasks include their reply.
LOOKUP = f"""
SELECT {_REPLY}, request_digest, resume_token, {{instant}} AS now
  FROM agent_paused_tasks WHERE logical_task_id {{one_of:ids}}
"""

# Read whole tasks to resume them, with the size of their pause's outcomes.
READ_TASKS = """
SELECT t.*, (SELECT coalesce(sum(length(c.outcome)), 0) FROM agent_peer_sub_tasks AS c
              WHERE c.logical_task_id = t.logical_task_id
                AND c.invocation_id = t.generation) AS outcome_bytes
  FROM agent_paused_tasks AS t WHERE t.logical_task_id {one_of:ids}
"""

# Read the logs of tasks up to the last entry in the task's row, unless they are too large. In no
# order, because SQLite would copy all entries to sort them.
READ_LOGS = """
SELECT l.logical_task_id, l.seq, l.entry, CASE WHEN l.seq = t.log_seq THEN l.run_id END AS run_id
  FROM agent_paused_tasks AS t
  JOIN agent_task_log AS l ON l.logical_task_id = t.logical_task_id AND l.seq <= t.log_seq
 WHERE t.logical_task_id {one_of:ids} AND l.logical_task_id {one_of:ids}
   AND (SELECT sum(length(s.entry)) FROM agent_task_log AS s
         WHERE s.logical_task_id = t.logical_task_id AND s.seq <= t.log_seq) <= :max_bytes
"""

# Read the entries of a task's log from one on, unless they are too large.
READ_LOG_END = """
SELECT seq, entry, CASE WHEN seq IN (:first, :last) THEN run_id END AS run_id
  FROM agent_task_log AS l
 WHERE logical_task_id = :task_id AND seq >= :first AND seq <= :last
   AND (SELECT sum(length(s.entry)) FROM agent_task_log AS s
         WHERE s.logical_task_id = :task_id AND s.seq >= :first AND s.seq <= :last) <= :max_bytes
 ORDER BY seq
"""

# Read the sizes of a task's log entries, oldest first.
READ_LOG_SIZES = """
SELECT seq, length(entry) AS bytes FROM agent_task_log
 WHERE logical_task_id = :task_id AND seq <= :last ORDER BY seq
"""

# Read some of these entries.
READ_LOG = """
SELECT seq, entry FROM agent_task_log
 WHERE logical_task_id = :task_id AND seq >= :first AND seq <= :last ORDER BY seq
"""

# Find tasks with log entries after the last one in their row, which another run must have written.
READ_UNKNOWN_ENTRIES = """
SELECT t.logical_task_id FROM agent_paused_tasks AS t
 WHERE t.logical_task_id {one_of:ids}
   AND (SELECT max(l.seq) FROM agent_task_log AS l
         WHERE l.logical_task_id = t.logical_task_id) > t.log_seq
"""

# Append one entry to the log of a task.
INSERT_LOG_ENTRY = """
INSERT INTO agent_task_log (logical_task_id, seq, run_id, entry)
VALUES (:task_id, :seq, :run_id, :entry)
"""

# Count entries that a running task's run has appended. The format of a state without a log says
# from now on that it has one. Progress resets the attempt, as in `UPDATE_SAVED`.
UPDATE_APPENDED = f"""
UPDATE agent_paused_tasks SET
  log_seq = log_seq + :new_entries, {APPENDED}
WHERE logical_task_id = :task_id
"""

# Read the run that wrote one log entry.
READ_ENTRY_RUN = """
SELECT run_id FROM agent_task_log WHERE logical_task_id = :task_id AND seq = :seq
"""

# Delete the logs of tasks.
DELETE_LOGS = """
DELETE FROM agent_task_log WHERE logical_task_id {one_of:ids}
"""

# Insert a task before its first segment, as running or as ready.
INSERT_TASK = f"""
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, owner, attempt, wake_at, request,
  {_REQUESTER}, keep_alive_at, checkpointed_at, checkpoint_seq,
  resume_token, request_digest, state_format)
VALUES (
  :task_id, :agent, :status, 0, 1, :run_id, :owner, :attempt, :wake_at, :request,
  {_REQUESTER_VALUES}, :keep_alive_at, :now, :checkpoint_seq, :order,
  :digest, :state_format)
"""

# Insert a task that has no row, with its first checkpoint.
INSERT_PAUSED = f"""
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, request,
  request_digest, {_REQUESTER}, keep_alive_at, checkpointed_at, log_seq,
  {_CONTEXT})
VALUES (
  :task_id, :agent, :status, :generation, 1, :run_id, 0, :wake_at, :request, :digest,
  {_REQUESTER_VALUES}, :keep_alive_at, :now, :new_entries,
  {_CONTEXT_VALUES})
"""

_STATELESS = assigned(name for name in columns.CONTEXT if name != "state")

# Write the checkpoint of a task that has a row, which already contains its requester and request.
UPDATE_PAUSED = f"""
UPDATE agent_paused_tasks SET
  status = :status, generation = :generation, run_id = :run_id, owner = NULL, attempt = 0,
  rescues = 0, wake_at = :wake_at, keep_alive_at = :now + idle_timeout / :keep_alives,
  checkpointed_at = :now, dead_reason = NULL, {emptied(columns.PARKING)},
  log_seq = log_seq + :new_entries,
  state = CASE WHEN :keeps_state THEN state ELSE :state END, {_STATELESS}
WHERE logical_task_id = :task_id
"""

# Assign a task to a run, or make it ready for any replica.
UPDATE_OWNER = """
UPDATE agent_paused_tasks SET
  status = :status, fence = :fence, run_id = :run_id, owner = :owner, attempt = :attempt,
  wake_at = :wake_at
WHERE logical_task_id = :task_id
"""

# Assign a task with an expired lease to a run, make it ready, or park it again. Each counts as a
# rescue.
UPDATE_RESCUED = """
UPDATE agent_paused_tasks SET
  status = :status, fence = :fence, run_id = :run_id, owner = :owner, wake_at = :wake_at,
  attempt = :attempt, rescues = rescues + 1
WHERE logical_task_id = :task_id
"""

# Set when the sweeper checks a waiting task next.
UPDATE_WAKE_AT = """
UPDATE agent_paused_tasks SET wake_at = :wake_at WHERE logical_task_id = :task_id
"""

# Release a running task: make it ready, or park it.
UPDATE_RELEASED = """
UPDATE agent_paused_tasks SET
  status = :status, run_id = :run_id, owner = NULL, wake_at = :wake_at, attempt = :attempt,
  incompatible_since = :incompatible_since, tried_versions = :tried_versions,
  parked_reason = coalesce(:parked_reason, parked_reason),
  dead_reason = coalesce(:death, dead_reason)
WHERE logical_task_id = :task_id
"""

_MAY_BE_KEPT = {*columns.KEPT_PAUSE, "security_context"}

# Turn a task into a tombstone: wipe its context and state, and make its reply due. An operation
# that can be resumed keeps the tokens of its attempts, and its last pause.
UPDATE_ENDED = f"""
UPDATE agent_paused_tasks SET
  status = :status, run_id = :run_id, owner = NULL, wake_at = :wake_at, keep_alive_at = NULL,
  reply = :reply, reply_sent = false, reply_attempts = 1, dead_reason = :dead_reason,
  request = CASE WHEN :keep_request THEN request END,
  ended_at = :now, expires_at = :expires_at, checkpoint_seq = :checkpoint_seq,
  {emptied(name for name in columns.WIPED_AT_END if name not in _MAY_BE_KEPT)},
  suspended_at = NULL,
  security_context = CASE WHEN :keep_security_context THEN security_context END,
  {
    ", ".join(
        f"{name} = CASE WHEN :keep_pause THEN {name} END"
        for name in columns.KEPT_PAUSE
        if name != "token_usage"
    )
},
  token_usage = CASE WHEN :keep_usage THEN coalesce(:usage, token_usage) END
WHERE logical_task_id = :task_id
"""

# Insert a tombstone for a task whose cancel arrived before its request. It names the sender of the
# cancel instead of a requester; NULL applies to every request.
INSERT_EARLY_CANCEL = """
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, reply,
  reply_sent, requester_app_id, checkpointed_at, ended_at, expires_at)
VALUES (:task_id, :agent, 'cancelled', 0, 0, :run_id, 0, :expires_at, :reply, true,
  :canceller, :now, :now, :expires_at)
"""

# Add the sender of another cancel to such a tombstone.
UPDATE_CANCELLERS = """
UPDATE agent_paused_tasks SET requester_app_id = :cancellers
WHERE logical_task_id = :task_id AND status = 'cancelled' AND fence = 0 AND reply_to IS NULL
"""

# Store the reply of a task without a row, because its requester's queue did not accept it.
INSERT_STORED_REPLY = f"""
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, reply,
  reply_sent, reply_attempts, {_REQUESTER}, checkpointed_at, ended_at, expires_at,
  request_digest)
VALUES (:task_id, :agent, :status, 0, 0, :run_id, 0, :wake_at, :reply, false, 1,
  {_REQUESTER_VALUES}, :now, :now, :expires_at,
  :digest)
"""

# Make the reply of an ended task due again after a repeated request. A reply that is still due to
# the same address keeps its due time.
UPDATE_REPLY_DUE = """
UPDATE agent_paused_tasks SET
  reply_sent = false, reply_attempts = 1, wake_at = :wake_at, reply_to = :reply_to,
  requester_app_id = :requester_app_id, parent_task_id = :parent_task_id
WHERE logical_task_id = :task_id AND ended_at IS NOT NULL
  AND (reply_sent OR coalesce(reply_to, '') <> CAST(:reply_to AS text))
"""

# Replace the addresses that get the reply of a task.
UPDATE_REPLY_ADDRESSES = """
UPDATE agent_paused_tasks SET reply_to = :reply_to, further_reply_to = :further_reply_to
WHERE logical_task_id = :task_id AND ended_at IS NULL
"""

# Ask the owners of running tasks to cancel them.
SET_CANCEL_REQUESTED = """
UPDATE agent_paused_tasks SET cancel_requested = true, suspended_at = NULL
WHERE logical_task_id {one_of:ids}
"""

# Keep replicas from acquiring a task. A repetition keeps the first time.
UPDATE_SUSPENDED = """
UPDATE agent_paused_tasks SET
  suspended_at = coalesce(suspended_at, :now),
  wake_at = CASE WHEN status = 'ready' THEN :far_future ELSE wake_at END
WHERE logical_task_id = :task_id
"""

# Let replicas acquire it again, at once if it is ready.
UPDATE_UNSUSPENDED = """
UPDATE agent_paused_tasks SET
  suspended_at = NULL, wake_at = CASE WHEN status = 'ready' THEN :now ELSE wake_at END
WHERE logical_task_id = :task_id
"""

# End the suspensions of tasks that an earlier release has resumed.
CLEAR_SUSPENSIONS = """
UPDATE agent_paused_tasks SET suspended_at = NULL WHERE logical_task_id {one_of:ids}
"""

# Extend the leases of running tasks.
UPDATE_LEASES = """
UPDATE agent_paused_tasks SET wake_at = :wake_at WHERE logical_task_id {one_of:ids}
"""

# Conditions for due rows. Without its first pause, or only to be cancelled, a task has no state to
# read.
_IS_READABLE = "(generation = 0 OR cancel_requested OR state_format {one_of:formats})"
_READABLE = f"AND {_IS_READABLE}"
_DUE_TASKS = """FROM agent_paused_tasks
 WHERE agent_name = :agent AND wake_at <= {instant} AND status"""
# The far `wake_at` of suspended tasks hides them, unless an earlier release has changed it.
_NOT_SUSPENDED = "AND (suspended_at IS NULL OR cancel_requested)"
# A new attempt that an earlier release began ends the suspension, but its row still has it.
_IS_NEW_ATTEMPT = "(generation = 0 AND attempt = 0 AND retry_count > 0)"
_READY = f"""{_DUE_TASKS} = 'ready' {_READABLE}
   AND (suspended_at IS NULL OR cancel_requested OR {_IS_NEW_ATTEMPT})"""
_CAN_BE_RESCUED = f"({_IS_READABLE} OR (:fails_lost AND checkpoint_seq IS NOT NULL))"
_LOST = f"{_DUE_TASKS} = 'running' AND {_CAN_BE_RESCUED}"
_LOST_UNREAD = f"""FROM agent_paused_tasks
 WHERE agent_name = :agent AND wake_at <= {{instant}} - :lease AND status = 'running'
   AND NOT {_CAN_BE_RESCUED}"""
_EXPIRED = f"{_DUE_TASKS} = 'waiting'"
_PARKED_TOO_LONG = f"{_DUE_TASKS} = 'parked'"
_READY_TOO_LATE = """FROM agent_paused_tasks
 WHERE agent_name = :agent AND task_deadline <= {instant} AND status = 'ready'"""
_ENDED = f"{_DUE_TASKS} IN ('completed', 'failed', 'cancelled')"
_UNSENT_REPLIES = f"{_ENDED} AND NOT reply_sent"
_KEEP_ALIVES = """FROM agent_paused_tasks
 WHERE agent_name = :agent AND keep_alive_at <= {instant}
   AND status IN ('waiting', 'ready', 'parked', 'running')"""
_UNSENT = "WHERE agent_name = :agent AND send_due_at <= {instant}"
_UNSENT_CALLS = f"FROM agent_peer_sub_tasks AS c {_UNSENT}"
_UNSENT_JOINS = f"FROM agent_parallel_invocations {_UNSENT}"


def _count(due: str, order: str = "wake_at") -> str:
    return f"(SELECT count(*) FROM (SELECT 1 {due} ORDER BY {order} LIMIT :limit) AS due)"


# Count due work, each kind up to a limit, without locks.
COUNT_DUE = f"""
SELECT {_count(_READY)} AS ready, {_count(_LOST)} AS lapsed,
       {_count(_LOST_UNREAD)} AS lost_unread, {_count(_EXPIRED)} AS expired,
       {_count(_KEEP_ALIVES, "keep_alive_at")} AS keep_alives,
       {_count(_PARKED_TOO_LONG)} + {_count(_READY_TOO_LATE, "task_deadline")} AS overdue,
       CASE WHEN EXISTS (SELECT 1 FROM agent_paused_tasks
                          WHERE agent_name = :agent AND status = 'parked')
            THEN 1 ELSE 0 END AS parked,
       {_count(_UNSENT_REPLIES)} + {_count(_UNSENT_CALLS, "send_due_at")}
       + {_count(_UNSENT_JOINS, "send_due_at")} AS unsent
"""

# Postpone a due task with a damaged row.
POSTPONE_TASK = """
UPDATE agent_paused_tasks SET wake_at = {instant} + :delay
 WHERE logical_task_id = :task_id AND wake_at <= {instant}
"""

# Postpone its keep-alives.
POSTPONE_KEEP_ALIVE = """
UPDATE agent_paused_tasks SET keep_alive_at = {instant} + :delay
 WHERE logical_task_id = :task_id AND keep_alive_at <= {instant}
"""

# Postpone its reply, its calls, and its joins.
POSTPONE_UNSENT = (
    f"{POSTPONE_TASK.rstrip()} AND status IN ('completed', 'failed', 'cancelled')",
    *(
        f"""
UPDATE {table} SET send_due_at = {{instant}} + :delay
 WHERE logical_task_id = :task_id AND send_due_at <= {{instant}}
"""
        for table in ("agent_peer_sub_tasks", "agent_parallel_invocations")
    ),
)

# Pick waiting tasks that may have passed a deadline.
PICK_EXPIRED = f"""
SELECT logical_task_id, agent_name, generation, fence, run_id, attempt, state_format,
       task_deadline, {_SUSPENSION}, {{instant}} AS now
  {_EXPIRED} ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Pick ready tasks that a replica can resume. Suspects only if the replica has room for one; the
# caller limits their number.
PICK_READY = f"""
SELECT {_ACQUIRED}, {{instant}} AS now
  {_READY} AND (rescues < :suspect_from OR :suspects > 0)
 ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Pick parked tasks that no replica with this version has tried. `:tried` is the version as an item
# of `tried_versions`.
PICK_PARKED = f"""
SELECT {_ACQUIRED}, {{instant}} AS now
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'parked' {_READABLE} {_NOT_SUSPENDED}
   AND (tried_versions IS NULL OR replace(tried_versions, :tried, '') = tried_versions)
   AND (rescues < :suspect_from OR :suspects > 0)
 ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Pick parked tasks past their deadline or `parked_limit`, to end them. `wake_at` alone does not
# show them all: the previous release does not set it when it parks a task or changes its deadline.
PICK_PARKED_TOO_LONG = f"""
SELECT {_ENDABLE}, coalesce(parked_reason, dead_reason) AS parked_reason, {{instant}} AS now
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'parked'
   AND (wake_at <= {{instant}} OR task_deadline <= {{instant}}
        OR coalesce(incompatible_since, checkpointed_at) <= {{instant}} - :parked_limit)
 ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Pick ready tasks past their deadline, to end them.
PICK_READY_TOO_LATE = f"""
SELECT {_ENDABLE}, NULL AS parked_reason, {{instant}} AS now
  {_READY_TOO_LATE} ORDER BY task_deadline LIMIT :limit {{skip_locked}}
"""

# Forget the requester of a running task that cannot be read, but not who it is.
UPDATE_UNANSWERABLE = """
UPDATE agent_paused_tasks SET reply_to = NULL, task_deadline = NULL, idle_timeout = NULL
WHERE logical_task_id = :task_id
"""

# Count ready tasks that have been due for a while, by the formats that a replica cannot read.
COUNT_UNREAD = """
SELECT state_format, count(*) AS tasks FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'ready' AND wake_at <= {instant} - :age
   AND generation > 0 AND NOT (state_format {one_of:formats})
 GROUP BY state_format
"""

# Make a parked task ready for any version, as if it had never been tried or suspended.
UPDATE_UNPARKED = f"""
UPDATE agent_paused_tasks SET
  status = 'ready', wake_at = :now, suspended_at = NULL, {emptied(columns.PARKING)}
WHERE logical_task_id = :task_id
"""

# Pick running tasks with an expired lease that a replica can resume, or only needs to end.
PICK_LOST = f"""
SELECT {_ACQUIRED}, incompatible_since, task_deadline, {{instant}} AS now
  {_LOST} ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Pick running tasks whose lease expired at least one lease ago, and that a replica cannot rescue.
PICK_LOST_UNREAD = f"""
SELECT {_ACQUIRED}, incompatible_since, task_deadline, {{instant}} AS now
  {_LOST_UNREAD} ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Pick tasks that are due to send a keep-alive to their requester.
PICK_KEEP_ALIVES = f"""
SELECT logical_task_id, {_REQUESTER}, {{instant}} AS now
  {_KEEP_ALIVES} ORDER BY keep_alive_at LIMIT :limit {{skip_locked}}
"""

# Set when the next keep-alive is due.
UPDATE_KEEP_ALIVE = """
UPDATE agent_paused_tasks SET keep_alive_at = :keep_alive_at WHERE logical_task_id = :task_id
"""

# Pick expired tombstones with nothing left to send.
PICK_PURGEABLE = """
SELECT logical_task_id, checkpoint_seq FROM agent_paused_tasks AS t
 WHERE agent_name = :agent AND status IN ('completed', 'failed', 'cancelled')
   AND wake_at <= {instant} AND expires_at <= {instant} AND reply_sent
   AND NOT EXISTS (SELECT 1 FROM agent_peer_sub_tasks AS c
                    WHERE c.logical_task_id = t.logical_task_id AND c.status = 'cancelling')
 ORDER BY wake_at LIMIT :limit {for_delete_skip_locked}
"""

# Delete tasks. Their calls and joins are deleted separately, since no foreign key ties them.
DELETE_TASKS = """
DELETE FROM agent_paused_tasks WHERE logical_task_id {one_of:ids}
"""

# Insert one call of a pause.
INSERT_CALL = f"""
INSERT INTO agent_peer_sub_tasks (
  {comma_separated(columns.NEW_CALL)}, retry)
VALUES (
  :task_id, :sub_task_id, :agent, :generation, :seq, :call_id, :peer, :headers, :request,
  :status, :outcome, :send_attempts, :idle_timeout, :timeout_deadline, :absolute_deadline, :now,
  :retry)
"""

# Insert the next attempt at a call, with its own due time. It has not been sent.
INSERT_ATTEMPT = """
INSERT INTO agent_peer_sub_tasks (
  logical_task_id, sub_task_id, agent_name, invocation_id, seq, call_id, peer_agent,
  correlation_data, request, status, send_due_at, send_attempts, idle_timeout, timeout_deadline,
  absolute_deadline, created_at, retry)
SELECT logical_task_id, :next_id, agent_name, invocation_id, seq, call_id, peer_agent,
       :headers, :request, 'pending', :due_at, 0, idle_timeout, :timeout_deadline,
       :absolute_deadline, :now, :retry
  FROM agent_peer_sub_tasks WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Move an attempt at a call out of its generation, or back into it, with its outcome. An attempt
# that was never leased to a sender needs no cancel. Leases do not lock the task, so only this
# statement can check that.
UPDATE_ATTEMPT = """
UPDATE agent_peer_sub_tasks SET
  invocation_id = -2 - invocation_id, outcome = :outcome, claim_id = :claim_id,
  status = CASE WHEN CAST(:status AS varchar) = 'cancelling' AND send_attempts = 0 THEN 'done'
                ELSE CAST(:status AS varchar) END,
  send_due_at = CASE WHEN send_attempts > 0 THEN CAST(:send_due_at AS double precision) END,
  send_attempts = CASE WHEN send_attempts = 0
                         OR CAST(:send_due_at AS double precision) IS NULL THEN send_attempts
                       ELSE 1 END
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Read attempts at calls by key, with what the next attempt repeats.
READ_ATTEMPTS = """
SELECT c.logical_task_id, c.sub_task_id, c.agent_name, c.peer_agent, c.correlation_data,
       c.request, c.idle_timeout, c.retry, t.task_deadline, t.checkpoint_seq, j.join_deadline
  FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
  JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
  JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id AND j.invocation_id = c.invocation_id
"""

# Read the open attempt at a call of the last pause.
READ_OPEN_ATTEMPT = """
SELECT c.sub_task_id
  FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id = :task_id AND c.call_id = :call_id AND c.status = 'pending'
"""

# Read calls by key, with the counters of their join.
READ_CALLS = f"""
SELECT c.logical_task_id, c.sub_task_id, c.invocation_id, c.call_id, c.peer_agent, c.status,
       c.claim_id, c.retry, j.total_expected, j.completed_count, j.succeeded_count, j.needed
  FROM {{pairs}} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
  LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id
   AND j.invocation_id = {GENERATION}
"""

# Read questions by key, with the requesters of their tasks.
READ_QUESTIONS = """
SELECT c.logical_task_id, c.sub_task_id, c.agent_name, c.peer_agent, c.request, c.outcome,
       t.requester_app_id
  FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
  JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
"""

# Read the outcomes of calls by key.
READ_CALL_OUTCOMES = """
SELECT c.logical_task_id, c.sub_task_id, c.agent_name, c.invocation_id, c.peer_agent, c.outcome
  FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
"""

# Read whole calls by key, including their requests.
READ_REQUESTS = """
SELECT c.*, {instant} AS now FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
 WHERE c.status = 'pending'
"""

# Read the calls without an outcome of tasks, in call order.
READ_PENDING = """
SELECT logical_task_id, sub_task_id, agent_name, peer_agent, timeout_deadline, absolute_deadline,
       idle_timeout, dispatched_at, send_due_at, send_attempts, unroutable_since, retry
  FROM agent_peer_sub_tasks
 WHERE logical_task_id {one_of:ids} AND status = 'pending' ORDER BY logical_task_id, seq
"""

# Record an outcome from a message.
UPDATE_CALL_OUTCOME = """
UPDATE agent_peer_sub_tasks SET
  status = 'done', outcome = :outcome, claim_id = :claim_id, send_due_at = NULL
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Replace the outcome of a closed call by one with the tokens of its peer.
UPDATE_CALL_USAGE = """
UPDATE agent_peer_sub_tasks SET outcome = :outcome
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Close a call past its deadline, and make a cancel to its peer due, unless its request was never
# leased to a sender.
UPDATE_TIMED_OUT = """
UPDATE agent_peer_sub_tasks SET
  status = CASE WHEN send_attempts = 0 THEN 'done' ELSE 'cancelling' END,
  outcome = :outcome,
  send_due_at = CASE WHEN send_attempts > 0 THEN CAST(:send_due_at AS double precision) END,
  send_attempts = CASE WHEN send_attempts > 0 THEN 1 ELSE 0 END
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Close the pending calls of tasks, and make cancels to their peers due. Waits, and attempts that
# were never due, have none.
CLOSE_PENDING = """
UPDATE agent_peer_sub_tasks SET
  status = CASE WHEN send_attempts = 0 THEN 'done' ELSE 'cancelling' END,
  outcome = :outcome,
  send_due_at = CASE WHEN send_attempts > 0 THEN CAST(:send_due_at AS double precision) END,
  send_attempts = CASE WHEN send_attempts > 0 THEN 1 ELSE 0 END
WHERE logical_task_id {one_of:ids} AND status = 'pending'
RETURNING logical_task_id, sub_task_id, agent_name, peer_agent, seq, status
"""

# Read the calls of a pause with an unsent cancel, in call order.
READ_CANCELLING = """
SELECT c.logical_task_id, c.sub_task_id, c.agent_name, c.peer_agent, c.status
  FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} AND c.status = 'cancelling'
 ORDER BY c.logical_task_id, c.seq
"""

# Read the outcomes of tasks, in call order.
READ_OUTCOMES = """
SELECT c.logical_task_id, c.sub_task_id, c.call_id, c.peer_agent, c.outcome
  FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} ORDER BY c.logical_task_id, c.seq
"""

# Read the sizes of one pause's outcomes, in call order.
READ_OUTCOME_SIZES = """
SELECT sub_task_id, call_id, peer_agent, coalesce(length(outcome), 0) AS bytes
  FROM agent_peer_sub_tasks
 WHERE logical_task_id = :task_id AND invocation_id = :generation ORDER BY seq
"""

# Read some of these outcomes.
READ_OUTCOMES_BY_ID = """
SELECT sub_task_id, outcome FROM agent_peer_sub_tasks
 WHERE logical_task_id = :task_id AND sub_task_id {one_of:ids}
"""

# Read the pending calls of tasks that are not recorded as sent themselves, in call order, with
# the outbox columns of their join. The caller selects the due ones: a condition on due times would
# make PostgreSQL read the whole index of unsent rows.
READ_DISPATCHES = """
SELECT c.*, j.send_due_at AS join_due_at, j.send_attempts AS attempts, {instant} AS now
  FROM agent_peer_sub_tasks AS c JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id AND j.invocation_id = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} AND c.status = 'pending' AND c.dispatched_at IS NULL
 ORDER BY c.logical_task_id, c.seq
"""

# Delete the done calls of tasks. Calls with an unsent cancel stay, but not waits, which have none.
DELETE_DONE_CALLS = """
DELETE FROM agent_peer_sub_tasks
 WHERE logical_task_id {one_of:ids} AND (status = 'done' OR peer_agent LIKE '~%')
"""

# Delete all calls of tasks, before the tasks are deleted.
DELETE_CALLS = """
DELETE FROM agent_peer_sub_tasks WHERE logical_task_id {one_of:ids}
"""

# Read calls and their tasks' requesters, without a lock, for a status update.
READ_PROGRESS = """
SELECT c.logical_task_id, c.sub_task_id, c.peer_agent, c.idle_timeout AS call_idle_timeout,
       c.timeout_deadline, c.absolute_deadline, t.reply_to, t.requester_app_id, t.parent_task_id,
       t.task_deadline, t.idle_timeout, t.result_ttl, t.further_reply_to, {instant} AS now
  FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
  JOIN agent_paused_tasks AS t ON t.logical_task_id = c.logical_task_id
 WHERE c.status = 'pending'
"""

# Extend an idle deadline, unless the call is closed, locked, or has a later deadline. Does not
# lock the task: a session that holds it must not make a call time out while its peer is working.
EXTEND_IDLE_DEADLINE = """
UPDATE agent_peer_sub_tasks SET timeout_deadline = :timeout_deadline
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
  AND EXISTS (SELECT 1 FROM agent_peer_sub_tasks AS c
               WHERE c.logical_task_id = :task_id AND c.sub_task_id = :sub_task_id
                 AND c.status = 'pending' AND c.timeout_deadline < :timeout_deadline {skip_locked})
"""

# Insert the join of a pause.
INSERT_JOIN = f"""
INSERT INTO agent_parallel_invocations (
  {comma_separated(columns.NEW_JOIN)})
VALUES (
  :task_id, :generation, :total, :completed, :succeeded, :needed, :join_deadline,
  :agent, :send_due_at, :send_attempts)
"""

# Read the joins of tasks; the lock on the task covers them.
READ_JOINS = """
SELECT j.* FROM agent_parallel_invocations AS j JOIN agent_paused_tasks AS t
    ON t.logical_task_id = j.logical_task_id AND t.generation = j.invocation_id
 WHERE j.logical_task_id {one_of:ids}
"""

# Count outcomes. A met join has nothing left to send.
UPDATE_JOIN = """
UPDATE agent_parallel_invocations SET
  completed_count = :completed, succeeded_count = :succeeded,
  send_due_at = CASE WHEN NOT :met THEN send_due_at END
WHERE logical_task_id = :task_id AND invocation_id = :generation
"""

# Read the calls of the pauses that operations keep when they end, in call order.
READ_KEPT_CALLS = """
SELECT c.* FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} ORDER BY c.logical_task_id, c.seq
"""

# Read the tokens that tasks had used at their last pause.
READ_PAUSE_USAGE = """
SELECT logical_task_id, agent_name, token_usage FROM agent_paused_tasks
 WHERE logical_task_id {one_of:ids}
"""

# Replace the tokens that a task has used.
UPDATE_USAGE = """
UPDATE agent_paused_tasks SET token_usage = :token_usage WHERE logical_task_id = :task_id
"""

# Replace the request of a call.
UPDATE_REQUEST = """
UPDATE agent_peer_sub_tasks SET request = :request
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Take the joins of ended tasks out of the outbox.
UPDATE_JOINS_ENDED = """
UPDATE agent_parallel_invocations SET send_due_at = NULL WHERE logical_task_id {one_of:ids}
"""

# Read the last pause that an ended operation has kept.
READ_LAST_PAUSE = """
SELECT t.*, j.needed, j.join_deadline, j.total_expected, o.children
  FROM agent_paused_tasks AS t JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = t.logical_task_id AND j.invocation_id = t.generation
  JOIN agent_operations AS o ON o.operation_id = t.logical_task_id
 WHERE t.logical_task_id = :task_id AND t.status IN ('failed', 'cancelled')
   AND t.state IS NOT NULL AND t.generation > 0
"""

# Delete the joins of tasks that pause again, end, are revived, or are deleted.
DELETE_JOINS = """
DELETE FROM agent_parallel_invocations WHERE logical_task_id {one_of:ids}
"""

# Pick calls whose cancel is due, and later attempts whose request is due. A request past its
# deadline is left out: its attempt is about to expire.
PICK_UNSENT_CALLS = f"""
SELECT c.*, c.send_attempts AS attempts, {{instant}} AS now
  {_UNSENT_CALLS}
   AND (status = 'cancelling' OR status = 'pending' AND timeout_deadline > {{instant}})
 ORDER BY send_due_at LIMIT :limit {{skip_locked}}
"""

# Lease a call to the sender of its cancel or its request.
LEASE_CALL = """
UPDATE agent_peer_sub_tasks SET send_due_at = :due_at, send_attempts = :attempts
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Pick joins with due requests: at most as many requests as the join has calls without an outcome.
PICK_UNSENT_JOINS = f"""
SELECT logical_task_id, invocation_id, send_attempts,
       total_expected - completed_count AS unanswered, {{instant}} AS now
  {_UNSENT_JOINS} ORDER BY send_due_at LIMIT :limit {{skip_locked}}
"""

# Lease the requests of a pause to their sender. With `:due_at` NULL, nothing is left to send.
LEASE_JOIN = """
UPDATE agent_parallel_invocations SET send_due_at = :due_at, send_attempts = :attempts
WHERE logical_task_id = :task_id AND invocation_id = :generation
"""

# Pick ended tasks whose reply is due.
PICK_UNSENT_REPLIES = f"""
SELECT {_REPLY}, {{instant}} AS now
  {_UNSENT_REPLIES} ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Lease a reply to its sender.
LEASE_REPLY = """
UPDATE agent_paused_tasks SET wake_at = :due_at, reply_attempts = :attempts
WHERE logical_task_id = :task_id
"""

# Let COMMIT return before the data is on disk. A crash may lose the records, which only causes
# resends.
SET_ASYNC_COMMIT = "SET LOCAL synchronous_commit TO OFF"

# Mark all requests of a pause as sent.
CONFIRM_JOIN_DISPATCHED = """
UPDATE agent_parallel_invocations SET dispatched_at = {clock}, send_due_at = NULL
WHERE logical_task_id = :task_id AND invocation_id = :generation
"""

# Mark one request as sent, unless its call has been closed in the meantime.
CONFIRM_CALL_DISPATCHED = """
UPDATE agent_peer_sub_tasks SET dispatched_at = {clock}, send_due_at = NULL
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'pending'
"""

# Start the time limit after which an unsent request is undeliverable.
UPDATE_UNROUTABLE = """
UPDATE agent_peer_sub_tasks SET unroutable_since = :now
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'pending'
  AND dispatched_at IS NULL
"""

# Make requests due earlier: a join's, or a later attempt's.
ADVANCE_JOIN = """
UPDATE agent_parallel_invocations SET send_due_at = :due_at
WHERE logical_task_id = :task_id AND invocation_id = :generation AND send_due_at > :due_at
"""
ADVANCE_CALL = """
UPDATE agent_peer_sub_tasks SET send_due_at = :due_at
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'pending'
  AND send_due_at > :due_at
"""

# Mark a cancel as sent if the task still needs the call's outcome, because it is in the same
# generation, or an earlier attempt at one, and has not ended, or has kept its last pause.
CONFIRM_CANCEL_SENT = f"""
UPDATE agent_peer_sub_tasks AS c SET status = 'done', send_due_at = NULL
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'cancelling'
  AND {GENERATION} = (SELECT generation FROM agent_paused_tasks AS t
                        WHERE t.logical_task_id = :task_id
                          AND (t.ended_at IS NULL OR t.state IS NOT NULL))
"""

# Delete a call whose cancel was sent and whose outcome is no longer needed.
DELETE_CANCELLED_CALL = """
DELETE FROM agent_peer_sub_tasks
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'cancelling'
"""

# Mark a reply as sent if the task has not ended again since and the address is the same. The row
# stays as a tombstone. If there are further addresses, the reply is due to the first of them.
CONFIRM_REPLY_SENT = """
UPDATE agent_paused_tasks SET
  reply_sent = (further_reply_to IS NULL),
  wake_at = CASE WHEN further_reply_to IS NULL THEN expires_at ELSE ended_at END,
  reply_attempts = CASE WHEN further_reply_to IS NULL THEN reply_attempts ELSE 1 END,
  reply_to = coalesce({first_line:further_reply_to}, reply_to),
  further_reply_to = {other_lines:further_reply_to}
WHERE logical_task_id = :task_id AND fence = :fence AND coalesce(reply_to, '') = :reply_to
  AND ended_at IS NOT NULL AND NOT reply_sent
"""
