"""Statements of the floor: arrays as arguments, one round trip each, no transaction block."""

from __future__ import annotations

_NOW = "now AS MATERIALIZED (SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS float8) AS at)"

# Write checkpoints: tasks, joins and calls.
PAUSE = f"""
WITH {_NOW}, joined AS (
  INSERT INTO agent_parallel_invocations (
    logical_task_id, invocation_id, total_expected, completed_count, succeeded_count,
    agent_name, send_due_at, send_attempts)
  SELECT task_id, 1, total, 0, 0, $24, now.at + $28, 1
    FROM now, unnest($1::text[], $2::int[]) AS i (task_id, total)
), paused AS (
  INSERT INTO agent_paused_tasks (
    logical_task_id, run_id, parent_task_id, request, a2a_context, effective_session_id, user_id,
    produced_artifacts, artifact_signals_to_return, response_buffer, flags,
    security_context, token_usage, context_rest, state, reply_to, requester_app_id,
    agent_name, status, generation, fence, attempt, wake_at, checkpointed_at,
    state_format, app_version)
  SELECT i.*, $24, 'waiting', 1, 1, 0, now.at + $27, now.at, $25, $26
    FROM now, unnest($1::text[], $3::text[], $4::text[], $5::bytea[], $6::text[],
                     $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::text[],
                     $13::bytea[], $14::text[], $15::text[], $16::bytea[], $17::text[],
                     $18::text[]) AS i
)
INSERT INTO agent_peer_sub_tasks (
  logical_task_id, sub_task_id, seq, call_id, peer_agent, request,
  agent_name, invocation_id, correlation_data, status, send_attempts,
  timeout_deadline, absolute_deadline, created_at)
SELECT i.*, $24, 1, $29, 'pending', 1, now.at + $27, now.at + $27, now.at
  FROM now, unnest($19::text[], $20::text[], $21::int[], $22::text[], $23::text[],
                   $30::bytea[]) AS i
"""

# Mark the requests of tasks as sent.
MARK_DISPATCHED = """
UPDATE agent_parallel_invocations
   SET dispatched_at = CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS float8), send_due_at = NULL
 WHERE logical_task_id = ANY($1::text[]) AND send_due_at IS NOT NULL
"""

# Record each answer once, and acquire the tasks whose last answer is included. It is a function,
# because each statement in it sees the rows committed while the first one waited for locks.
CREATE_CLAIM = """
CREATE OR REPLACE FUNCTION floor_claim(
  p_tasks text[], p_calls text[], p_outcomes bytea[], p_claims text[],
  p_owner text, p_lease float8)
RETURNS TABLE (
  o_task_id text, o_fence int, o_run_id text, o_state bytea, o_request bytea,
  o_security_context bytea, o_context text[], o_call_ids text[], o_peers text[],
  o_outcomes bytea[])
LANGUAGE plpgsql AS $$
DECLARE
  met text[];
BEGIN
  PERFORM 1 FROM agent_paused_tasks WHERE logical_task_id = ANY (p_tasks)
    ORDER BY logical_task_id FOR NO KEY UPDATE;
  WITH answered AS (
    UPDATE agent_peer_sub_tasks AS c
       SET status = 'done', outcome = i.outcome, claim_id = i.claim_id
      FROM unnest(p_tasks, p_calls, p_outcomes, p_claims)
           AS i (task_id, call_id, outcome, claim_id)
     WHERE c.logical_task_id = i.task_id AND c.sub_task_id = i.call_id AND c.status = 'pending'
    RETURNING c.logical_task_id
  ), counted AS (
    SELECT logical_task_id, count(*)::int AS n FROM answered GROUP BY 1
  ), joins AS (
    UPDATE agent_parallel_invocations AS j
       SET completed_count = completed_count + n, succeeded_count = succeeded_count + n
      FROM counted WHERE j.logical_task_id = counted.logical_task_id AND j.invocation_id = 1
    RETURNING j.logical_task_id, completed_count = total_expected AS met
  )
  SELECT array_agg(logical_task_id) INTO met FROM joins WHERE joins.met;
  IF met IS NULL THEN
    RETURN;
  END IF;
  RETURN QUERY
    WITH taken AS (
      UPDATE agent_paused_tasks AS t
         SET status = 'running', fence = t.fence + 1, run_id = last.claim_id,
             owner = p_owner, attempt = 1,
             wake_at = CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS float8) + p_lease
        FROM (SELECT task_id, (array_agg(claim_id))[count(*)] AS claim_id
                FROM unnest(p_tasks, p_claims) AS i (task_id, claim_id)
                WHERE task_id = ANY (met) GROUP BY 1) AS last
       WHERE t.logical_task_id = last.task_id
      RETURNING t.*
    ), calls AS (
      SELECT c.logical_task_id, array_agg(c.call_id ORDER BY seq) AS call_ids,
             array_agg(c.peer_agent ORDER BY seq) AS peers,
             array_agg(c.outcome ORDER BY seq) AS outcomes
        FROM agent_peer_sub_tasks AS c WHERE c.logical_task_id = ANY (met) GROUP BY 1
    )
    SELECT t.logical_task_id::text, t.fence, t.run_id::text, t.state, t.request,
           t.security_context,
           ARRAY[t.a2a_context, t.produced_artifacts, t.artifact_signals_to_return,
                 t.response_buffer, t.flags, t.token_usage, t.context_rest],
           calls.call_ids::text[], calls.peers::text[], calls.outcomes
      FROM taken AS t JOIN calls USING (logical_task_id);
END $$
"""

CLAIM = "SELECT * FROM floor_claim($1, $2, $3, $4, $5, $6)"

# Turn tasks into tombstones, if this run still owns them.
END = f"""
WITH {_NOW}, ended AS (
  UPDATE agent_paused_tasks AS t SET
    status = 'completed', owner = NULL, wake_at = now.at + $5, keep_alive_at = NULL,
    reply = i.reply, reply_sent = false, reply_attempts = 1, dead_reason = NULL, request = NULL,
    ended_at = now.at, expires_at = now.at + $4, run_id = i.run_id,
    a2a_context = NULL, effective_session_id = NULL, user_id = NULL, current_invocation_id = NULL,
    produced_artifacts = NULL, artifact_signals_to_return = NULL, response_buffer = NULL,
    flags = NULL, security_context = NULL, token_usage = NULL, context_rest = NULL, state = NULL
    FROM now, unnest($1::text[], $2::int[], $3::bytea[], $6::text[])
           AS i (task_id, fence, reply, run_id)
   WHERE t.logical_task_id = i.task_id AND t.fence = i.fence AND t.status = 'running'
  RETURNING t.logical_task_id
), calls AS (
  DELETE FROM agent_peer_sub_tasks AS c USING ended
   WHERE c.logical_task_id = ended.logical_task_id AND c.status = 'done'
), joins AS (
  DELETE FROM agent_parallel_invocations AS j USING ended
   WHERE j.logical_task_id = ended.logical_task_id
)
SELECT logical_task_id FROM ended
"""

# Mark the replies of tasks as sent.
MARK_REPLIED = """
UPDATE agent_paused_tasks SET reply_sent = true, wake_at = expires_at
 WHERE logical_task_id = ANY($1::text[]) AND ended_at IS NOT NULL AND NOT reply_sent
"""
