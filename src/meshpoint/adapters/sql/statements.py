"""All statements on tasks, calls and joins.

They are in one file so that a change to a column or to the lock order can be checked against all
of them. Statements on operations and their checkpoints are in `operation_statements`. Fragments in
braces differ between databases: see `dialect`.

A transaction locks a task before it changes the task, its calls or its joins, and locks tasks in
order of id. So transactions cannot deadlock, and calls and joins need no locks of their own. Three
writes do without the task's lock, and never wait: the sender's lease on a call or join, the sent
mark on a join, and the extension of an idle deadline.

LOCK statements wait for rows up to `lock_timeout`; after a timeout, the transaction is repeated
with the variants that skip locked rows. PICK statements always skip them. The data for a decision
is read in a later statement than the lock, since the snapshot of a statement that waited for a
lock is older than the lock.
"""

from __future__ import annotations

# Lock tasks by id. Also returns the time after the last lock, in a row of NULLs if no task exists.
LOCK_TASKS = """
WITH locked AS MATERIALIZED (
  SELECT logical_task_id, agent_name, status, generation, fence, run_id, owner, attempt, cancel_requested,
         state_format, reply_to, requester_app_id, parent_task_id, task_deadline, idle_timeout, ended_at,
         incompatible_since, checkpoint_seq, retry_count
    FROM agent_paused_tasks WHERE logical_task_id {one_of:ids} ORDER BY logical_task_id {for_update})
SELECT locked.*, {clock} AS now FROM (SELECT count(*) AS n FROM locked) AS counted LEFT JOIN locked ON counted.n > 0
"""

# The same, skipping tasks that other sessions hold.
LOCK_TASKS_SKIP_LOCKED = LOCK_TASKS.replace("{for_update}", "{skip_locked}")

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

# Lock the calls, joins, checkpoints and operations of locked tasks. Returns the tasks with a row
# that another session holds.
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
operations AS MATERIALIZED (
  SELECT operation_id FROM agent_operations WHERE operation_id {one_of:ids} {for_delete_skip_locked})
SELECT c.logical_task_id AS task_id FROM agent_peer_sub_tasks AS c
 WHERE c.logical_task_id {one_of:ids} AND (c.logical_task_id, c.sub_task_id) NOT IN (SELECT * FROM calls)
UNION
SELECT j.logical_task_id FROM agent_parallel_invocations AS j
 WHERE j.logical_task_id {one_of:ids} AND (j.logical_task_id, j.invocation_id) NOT IN (SELECT * FROM joins)
UNION
SELECT k.analysis_id FROM agent_checkpoints AS k
 WHERE k.analysis_id {one_of:ids} AND (k.analysis_id, k.agent_type, k.seq) NOT IN (SELECT * FROM kept)
UNION
SELECT o.operation_id FROM agent_operations AS o
 WHERE o.operation_id {one_of:ids} AND o.operation_id NOT IN (SELECT * FROM operations)
"""

_REPLY_COLUMNS = """logical_task_id, agent_name, status, fence, reply, reply_to, requester_app_id, parent_task_id,
       task_deadline, idle_timeout, ended_at, reply_attempts"""

# Look up tasks by id, without a lock; ended tasks include their reply.
LOOKUP = f"""
SELECT {_REPLY_COLUMNS}, request_digest, {{instant}} AS now
  FROM agent_paused_tasks WHERE logical_task_id {{one_of:ids}}
"""

# Read whole tasks to resume them, with the size of their pause's outcomes.
READ_TASKS = """
SELECT t.*, (SELECT coalesce(sum(length(c.outcome)), 0) FROM agent_peer_sub_tasks AS c
              WHERE c.logical_task_id = t.logical_task_id AND c.invocation_id = t.generation) AS outcome_bytes
  FROM agent_paused_tasks AS t WHERE t.logical_task_id {one_of:ids}
"""

# Insert a task before its first segment, as running or as ready.
INSERT_TASK = """
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, owner, attempt, wake_at, request,
  reply_to, requester_app_id, parent_task_id, task_deadline, idle_timeout, checkpointed_at, checkpoint_seq,
  resume_token, request_digest)
VALUES (
  :task_id, :agent, :status, 0, 1, :run_id, :owner, :attempt, :wake_at, :request,
  :reply_to, :requester_app_id, :parent_task_id, :task_deadline, :idle_timeout, :now, :checkpoint_seq, :order,
  :digest)
"""

# Insert a task that has no row, with its first checkpoint.
INSERT_PAUSED = """
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, request, request_digest,
  reply_to, requester_app_id, parent_task_id, task_deadline, idle_timeout, keep_alive_at, checkpointed_at,
  a2a_context, effective_session_id, user_id, current_invocation_id, produced_artifacts,
  artifact_signals_to_return, response_buffer, flags, security_context, token_usage, context_rest,
  state, state_format, app_version, framework)
VALUES (
  :task_id, :agent, :status, :generation, 1, :run_id, 0, :wake_at, :request, :digest,
  :reply_to, :requester_app_id, :parent_task_id, :task_deadline, :idle_timeout, :keep_alive_at, :now,
  :a2a_context, :effective_session_id, :user_id, :current_invocation_id, :produced_artifacts,
  :artifact_signals_to_return, :response_buffer, :flags, :security_context, :token_usage, :context_rest,
  :state, :state_format, :app_version, :framework)
"""

# Write the checkpoint of a task that has a row, which already contains its requester and request.
UPDATE_PAUSED = """
UPDATE agent_paused_tasks SET
  status = :status, generation = :generation, run_id = :run_id, owner = NULL, attempt = 0, rescues = 0,
  wake_at = :wake_at, keep_alive_at = :now + idle_timeout / :keep_alives, checkpointed_at = :now,
  incompatible_since = NULL, dead_reason = NULL,
  a2a_context = :a2a_context, effective_session_id = :effective_session_id, user_id = :user_id,
  current_invocation_id = :current_invocation_id, produced_artifacts = :produced_artifacts,
  artifact_signals_to_return = :artifact_signals_to_return, response_buffer = :response_buffer, flags = :flags,
  security_context = :security_context, token_usage = :token_usage, context_rest = :context_rest,
  state = :state, state_format = :state_format, app_version = :app_version, framework = :framework
WHERE logical_task_id = :task_id
"""

# Assign a task to a run, or make it ready for any replica.
UPDATE_OWNER = """
UPDATE agent_paused_tasks SET
  status = :status, fence = :fence, run_id = :run_id, owner = :owner, attempt = :attempt, wake_at = :wake_at
WHERE logical_task_id = :task_id
"""

# Assign a task with an expired lease to a run, or make it ready. Either counts as a rescue.
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
  incompatible_since = :incompatible_since, dead_reason = coalesce(:death, dead_reason)
WHERE logical_task_id = :task_id
"""

# Turn a task into a tombstone: wipe its context and state, and make its reply due.
UPDATE_ENDED = """
UPDATE agent_paused_tasks SET
  status = :status, run_id = :run_id, owner = NULL, wake_at = :wake_at, keep_alive_at = NULL,
  reply = :reply, reply_sent = false, reply_attempts = 1, dead_reason = :dead_reason,
  request = CASE WHEN :keep_request THEN request END,
  ended_at = :now, expires_at = :expires_at, checkpoint_seq = :checkpoint_seq,
  a2a_context = NULL, effective_session_id = NULL, user_id = NULL, current_invocation_id = NULL,
  produced_artifacts = NULL, artifact_signals_to_return = NULL, response_buffer = NULL, flags = NULL,
  security_context = NULL, token_usage = NULL, context_rest = NULL, state = NULL
WHERE logical_task_id = :task_id
"""

# Insert a tombstone for a task whose cancel arrived before its request. It names the sender of the
# cancel instead of a requester; NULL applies to every request.
INSERT_EARLY_CANCEL = """
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, reply, reply_sent,
  requester_app_id, checkpointed_at, ended_at, expires_at)
VALUES (:task_id, :agent, 'cancelled', 0, 0, :run_id, 0, :expires_at, :reply, true,
  :canceller, :now, :now, :expires_at)
"""

# Add the sender of another cancel to such a tombstone.
UPDATE_CANCELLERS = """
UPDATE agent_paused_tasks SET requester_app_id = :cancellers
WHERE logical_task_id = :task_id AND status = 'cancelled' AND fence = 0 AND reply_to IS NULL
"""

# Store the reply of a task without a row, because its requester's queue did not accept it.
INSERT_STORED_REPLY = """
INSERT INTO agent_paused_tasks (
  logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, reply, reply_sent, reply_attempts,
  reply_to, requester_app_id, parent_task_id, task_deadline, idle_timeout, checkpointed_at, ended_at, expires_at,
  request_digest)
VALUES (:task_id, :agent, :status, 0, 0, :run_id, 0, :wake_at, :reply, false, 1,
  :reply_to, :requester_app_id, :parent_task_id, :task_deadline, :idle_timeout, :now, :now, :expires_at,
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

# Ask the owners of running tasks to cancel them.
SET_CANCEL_REQUESTED = """
UPDATE agent_paused_tasks SET cancel_requested = true WHERE logical_task_id {one_of:ids}
"""

# Extend the leases of running tasks.
UPDATE_LEASES = """
UPDATE agent_paused_tasks SET wake_at = :wake_at WHERE logical_task_id {one_of:ids}
"""

# Count due work, each kind up to a limit, without locks. Each part has the condition of the PICK
# statement for its rows.
COUNT_DUE = """
SELECT
  (SELECT count(*) FROM (
     SELECT 1 FROM agent_paused_tasks
      WHERE agent_name = :agent AND status = 'ready' AND wake_at <= {instant}
        AND (generation = 0 OR state_format {one_of:formats}) ORDER BY wake_at LIMIT :limit) AS r) AS ready,
  (SELECT count(*) FROM (
     SELECT 1 FROM agent_paused_tasks
      WHERE agent_name = :agent AND status = 'running' AND wake_at <= {instant}
        AND (generation = 0 OR state_format {one_of:formats}) ORDER BY wake_at LIMIT :limit) AS l) AS lapsed,
  (SELECT count(*) FROM (
     SELECT 1 FROM agent_paused_tasks
      WHERE agent_name = :agent AND status = 'waiting' AND wake_at <= {instant}
      ORDER BY wake_at LIMIT :limit) AS e) AS expired,
  (SELECT count(*) FROM (
     SELECT 1 FROM agent_paused_tasks
      WHERE agent_name = :agent AND keep_alive_at <= {instant} AND status IN ('waiting', 'ready')
      ORDER BY keep_alive_at LIMIT :limit) AS k) AS keep_alives,
  (SELECT count(*) FROM (
     SELECT 1 FROM agent_paused_tasks
      WHERE agent_name = :agent AND status IN ('completed', 'failed', 'cancelled') AND wake_at <= {instant}
        AND NOT reply_sent ORDER BY wake_at LIMIT :limit) AS p)
  + (SELECT count(*) FROM (
     SELECT 1 FROM agent_peer_sub_tasks
      WHERE agent_name = :agent AND send_due_at <= {instant} ORDER BY send_due_at LIMIT :limit) AS c)
  + (SELECT count(*) FROM (
     SELECT 1 FROM agent_parallel_invocations
      WHERE agent_name = :agent AND send_due_at <= {instant} ORDER BY send_due_at LIMIT :limit) AS j) AS unsent
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
POSTPONE_REPLY = """
UPDATE agent_paused_tasks SET wake_at = {instant} + :delay
 WHERE logical_task_id = :task_id AND wake_at <= {instant} AND status IN ('completed', 'failed', 'cancelled')
"""
POSTPONE_CALLS = """
UPDATE agent_peer_sub_tasks SET send_due_at = {instant} + :delay
 WHERE logical_task_id = :task_id AND send_due_at <= {instant}
"""
POSTPONE_JOINS = """
UPDATE agent_parallel_invocations SET send_due_at = {instant} + :delay
 WHERE logical_task_id = :task_id AND send_due_at <= {instant}
"""

# Pick waiting tasks that may have passed a deadline.
PICK_EXPIRED = """
SELECT logical_task_id, agent_name, generation, fence, run_id, attempt, state_format, {instant} AS now
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'waiting' AND wake_at <= {instant}
 ORDER BY wake_at LIMIT :limit {skip_locked}
"""

# Pick ready tasks that a replica can resume. Suspects only if the replica has room for one; the
# caller limits their number.
PICK_READY = """
SELECT logical_task_id, agent_name, generation, fence, attempt, rescues, {instant} AS now
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'ready' AND wake_at <= {instant}
   AND (generation = 0 OR state_format {one_of:formats}) AND (rescues < :suspect_from OR :suspects > 0)
 ORDER BY wake_at LIMIT :limit {skip_locked}
"""

# Pick running tasks with an expired lease that a replica can resume.
PICK_LOST = """
SELECT logical_task_id, agent_name, generation, fence, attempt, rescues, {instant} AS now
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND status = 'running' AND wake_at <= {instant}
   AND (generation = 0 OR state_format {one_of:formats})
 ORDER BY wake_at LIMIT :limit {skip_locked}
"""

# Pick paused tasks that are due to send a keep-alive to their requester.
PICK_KEEP_ALIVES = """
SELECT logical_task_id, reply_to, requester_app_id, parent_task_id, task_deadline, idle_timeout, {instant} AS now
  FROM agent_paused_tasks
 WHERE agent_name = :agent AND keep_alive_at <= {instant} AND status IN ('waiting', 'ready')
 ORDER BY keep_alive_at LIMIT :limit {skip_locked}
"""

# Set when the next keep-alive is due.
UPDATE_KEEP_ALIVE = """
UPDATE agent_paused_tasks SET keep_alive_at = :keep_alive_at WHERE logical_task_id = :task_id
"""

# Pick expired tombstones with nothing left to send.
PICK_PURGEABLE = """
SELECT logical_task_id, checkpoint_seq FROM agent_paused_tasks AS t
 WHERE agent_name = :agent AND status IN ('completed', 'failed', 'cancelled') AND wake_at <= {instant}
   AND expires_at <= {instant} AND reply_sent
   AND NOT EXISTS (SELECT 1 FROM agent_peer_sub_tasks AS c
                    WHERE c.logical_task_id = t.logical_task_id AND c.status = 'cancelling')
 ORDER BY wake_at LIMIT :limit {for_delete_skip_locked}
"""

# Delete tasks. Their calls and joins are deleted separately, since no foreign key ties them.
DELETE_TASKS = """
DELETE FROM agent_paused_tasks WHERE logical_task_id {one_of:ids}
"""

# Insert one call of a pause.
INSERT_CALL = """
INSERT INTO agent_peer_sub_tasks (
  logical_task_id, sub_task_id, agent_name, invocation_id, seq, call_id, peer_agent, correlation_data, request,
  status, outcome, send_attempts, idle_timeout, timeout_deadline, absolute_deadline, created_at)
VALUES (
  :task_id, :sub_task_id, :agent, :generation, :seq, :call_id, :peer, :headers, :request,
  :status, :outcome, :send_attempts, :idle_timeout, :timeout_deadline, :absolute_deadline, :now)
"""

# Read calls by key, with the counters of their join.
READ_CALLS = """
SELECT c.logical_task_id, c.sub_task_id, c.invocation_id, c.peer_agent, c.status, c.claim_id,
       j.total_expected, j.completed_count, j.succeeded_count, j.needed
  FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
  LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id AND j.invocation_id = c.invocation_id
"""

# Read whole calls by key, including their requests.
READ_REQUESTS = """
SELECT c.* FROM {pairs} JOIN agent_peer_sub_tasks AS c
    ON c.logical_task_id = pair.task_id AND c.sub_task_id = pair.sub_task_id
"""

# Read the calls without an outcome of tasks, in call order.
READ_PENDING = """
SELECT logical_task_id, sub_task_id, agent_name, peer_agent, timeout_deadline FROM agent_peer_sub_tasks
 WHERE logical_task_id {one_of:ids} AND status = 'pending' ORDER BY logical_task_id, seq
"""

# Record an outcome from a message.
UPDATE_CALL_OUTCOME = """
UPDATE agent_peer_sub_tasks SET status = 'done', outcome = :outcome, claim_id = :claim_id, send_due_at = NULL
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Close a call past its deadline, and make a cancel to its peer due.
UPDATE_TIMED_OUT = """
UPDATE agent_peer_sub_tasks SET
  status = 'cancelling', outcome = :outcome, send_due_at = :send_due_at, send_attempts = 1
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Close the pending calls of tasks, and make cancels to their peers due.
CLOSE_PENDING = """
UPDATE agent_peer_sub_tasks SET
  status = 'cancelling', outcome = :outcome, send_due_at = :send_due_at, send_attempts = 1
WHERE logical_task_id {one_of:ids} AND status = 'pending'
RETURNING logical_task_id, sub_task_id, agent_name, peer_agent, seq
"""

# Read the calls of a pause with an unsent cancel, in call order.
READ_CANCELLING = """
SELECT c.logical_task_id, c.sub_task_id, c.agent_name, c.peer_agent
  FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} AND c.status = 'cancelling'
 ORDER BY c.logical_task_id, c.seq
"""

# Read the outcomes of tasks, in call order.
READ_OUTCOMES = """
SELECT c.logical_task_id, c.call_id, c.peer_agent, c.outcome
  FROM agent_peer_sub_tasks AS c JOIN agent_paused_tasks AS t
    ON t.logical_task_id = c.logical_task_id AND t.generation = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} ORDER BY c.logical_task_id, c.seq
"""

# Read the sizes of one pause's outcomes, in call order.
READ_OUTCOME_SIZES = """
SELECT sub_task_id, call_id, peer_agent, coalesce(length(outcome), 0) AS bytes FROM agent_peer_sub_tasks
 WHERE logical_task_id = :task_id AND invocation_id = :generation ORDER BY seq
"""

# Read some of these outcomes.
READ_OUTCOMES_BY_ID = """
SELECT sub_task_id, outcome FROM agent_peer_sub_tasks
 WHERE logical_task_id = :task_id AND sub_task_id {one_of:ids}
"""

# Read the pending calls of tasks that have no sent mark of their own, in call order, with the
# outbox columns of their join. The caller selects the due ones: a condition on due times would
# make PostgreSQL read the whole index of unsent rows.
READ_DISPATCHES = """
SELECT c.*, j.send_due_at AS join_due_at, j.send_attempts AS attempts
  FROM agent_peer_sub_tasks AS c JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id AND j.invocation_id = c.invocation_id
 WHERE c.logical_task_id {one_of:ids} AND c.status = 'pending' AND c.dispatched_at IS NULL
 ORDER BY c.logical_task_id, c.seq
"""

# Delete the done calls of tasks. Calls with an unsent cancel stay.
DELETE_DONE_CALLS = """
DELETE FROM agent_peer_sub_tasks WHERE logical_task_id {one_of:ids} AND status = 'done'
"""

# Delete all calls of tasks, before the tasks are deleted.
DELETE_CALLS = """
DELETE FROM agent_peer_sub_tasks WHERE logical_task_id {one_of:ids}
"""

# Read calls and their tasks' requesters, without a lock, for a status update.
READ_PROGRESS = """
SELECT c.logical_task_id, c.sub_task_id, c.peer_agent, c.idle_timeout AS call_idle_timeout, c.timeout_deadline,
       c.absolute_deadline, t.reply_to, t.requester_app_id, t.parent_task_id, t.task_deadline, t.idle_timeout,
       {instant} AS now
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
               WHERE c.logical_task_id = :task_id AND c.sub_task_id = :sub_task_id AND c.status = 'pending'
                 AND c.timeout_deadline < :timeout_deadline {skip_locked})
"""

# Insert the join of a pause.
INSERT_JOIN = """
INSERT INTO agent_parallel_invocations (
  logical_task_id, invocation_id, total_expected, completed_count, succeeded_count, needed, join_deadline,
  agent_name, send_due_at, send_attempts)
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
  completed_count = :completed, succeeded_count = :succeeded, send_due_at = CASE WHEN NOT :met THEN send_due_at END
WHERE logical_task_id = :task_id AND invocation_id = :generation
"""

# Delete the joins of tasks that pause again, end, are revived, or are deleted.
DELETE_JOINS = """
DELETE FROM agent_parallel_invocations WHERE logical_task_id {one_of:ids}
"""

# Pick calls whose cancel is due, or whose request is due if the previous release wrote them. A
# request past its deadline is left out: its call is about to expire.
PICK_UNSENT_CALLS = """
SELECT c.*, c.send_attempts AS attempts, {instant} AS now FROM agent_peer_sub_tasks AS c
 WHERE agent_name = :agent AND send_due_at <= {instant}
   AND (status = 'cancelling' OR status = 'pending' AND timeout_deadline > {instant})
 ORDER BY send_due_at LIMIT :limit {skip_locked}
"""

# Lease a call to the sender of its cancel or its request.
LEASE_CALL = """
UPDATE agent_peer_sub_tasks SET send_due_at = :due_at, send_attempts = :attempts
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Pick joins with due requests: at most as many requests as the join has calls without an outcome.
PICK_UNSENT_JOINS = """
SELECT logical_task_id, invocation_id, send_attempts, total_expected - completed_count AS unanswered,
       {instant} AS now
  FROM agent_parallel_invocations
 WHERE agent_name = :agent AND send_due_at <= {instant}
 ORDER BY send_due_at LIMIT :limit {skip_locked}
"""

# Lease the requests of a pause to their sender. With `:due_at` NULL, nothing is left to send.
LEASE_JOIN = """
UPDATE agent_parallel_invocations SET send_due_at = :due_at, send_attempts = :attempts
WHERE logical_task_id = :task_id AND invocation_id = :generation
"""

# Pick ended tasks whose reply is due.
PICK_UNSENT_REPLIES = f"""
SELECT {_REPLY_COLUMNS}, {{instant}} AS now FROM agent_paused_tasks
 WHERE agent_name = :agent AND status IN ('completed', 'failed', 'cancelled') AND wake_at <= {{instant}}
   AND NOT reply_sent
 ORDER BY wake_at LIMIT :limit {{skip_locked}}
"""

# Lease a reply to its sender.
LEASE_REPLY = """
UPDATE agent_paused_tasks SET wake_at = :due_at, reply_attempts = :attempts WHERE logical_task_id = :task_id
"""

# Let COMMIT return before the data is on disk. A crash may lose sent marks, which only causes
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

# Mark a cancel as sent if the task still needs the call's outcome, because it is in the same
# generation and has not ended.
CONFIRM_CANCEL_SENT = """
UPDATE agent_peer_sub_tasks SET status = 'done', send_due_at = NULL
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'cancelling'
  AND invocation_id = (SELECT generation FROM agent_paused_tasks AS t
                        WHERE t.logical_task_id = :task_id AND t.ended_at IS NULL)
"""

# Delete a call whose cancel was sent and whose outcome is no longer needed.
DELETE_CANCELLED_CALL = """
DELETE FROM agent_peer_sub_tasks
WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id AND status = 'cancelling'
"""

# Mark a reply as sent if the task has not ended again since and the address is the same. The row
# stays as a tombstone.
CONFIRM_REPLY_SENT = """
UPDATE agent_paused_tasks SET reply_sent = true, wake_at = expires_at
WHERE logical_task_id = :task_id AND fence = :fence AND coalesce(reply_to, '') = :reply_to AND ended_at IS NOT NULL
  AND NOT reply_sent
"""

_SUMMARY = """t.logical_task_id, t.agent_name, t.status, t.generation, t.fence, t.attempt, t.owner, t.wake_at,
       t.checkpointed_at, t.dead_reason, t.rescues, j.completed_count, j.total_expected
  FROM agent_paused_tasks AS t LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = t.logical_task_id AND j.invocation_id = t.generation"""

# List tasks of one agent, newest first.
LIST_AGENT_TASKS = f"""
SELECT {_SUMMARY} WHERE t.agent_name = :agent AND t.status {{one_of:statuses}}
 ORDER BY t.checkpointed_at DESC, t.logical_task_id DESC LIMIT :limit
"""

# List tasks of a whole namespace, newest first.
LIST_TASKS = f"""
SELECT {_SUMMARY}
 WHERE substr(t.agent_name, 1, length(CAST(:prefix AS text))) = CAST(:prefix AS text)
   AND t.status {{one_of:statuses}}
 ORDER BY t.checkpointed_at DESC, t.logical_task_id DESC LIMIT :limit
"""

# Show one task.
SHOW_TASK = f"""
SELECT {_SUMMARY} WHERE t.logical_task_id = :task_id
"""

# Show the calls of a task. `dispatched_at` is the call's own, or its join's if all requests of the
# pause were sent together.
SHOW_CALLS = """
SELECT c.sub_task_id, c.call_id, c.peer_agent, c.invocation_id, c.status, c.outcome, c.timeout_deadline,
       CASE WHEN c.dispatched_at IS NOT NULL THEN c.dispatched_at
            WHEN c.send_attempts > 0 AND (c.status <> 'pending' OR c.send_due_at IS NULL) THEN j.dispatched_at
       END AS dispatched_at
  FROM agent_peer_sub_tasks AS c LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = c.logical_task_id AND j.invocation_id = c.invocation_id
 WHERE c.logical_task_id = :task_id ORDER BY c.invocation_id, c.seq
"""
