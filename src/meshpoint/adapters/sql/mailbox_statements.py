"""Statements on signals, open questions and values of tasks.

The writers of all three have locked the task: see `statements`.
"""

from __future__ import annotations

# Find a signal of a task by its id.
FIND_SIGNAL = """
SELECT digest, received_at FROM agent_task_signals
 WHERE logical_task_id = :task_id AND signal_id = :signal_id
"""

# Count the signals that a task has not received, by sender.
COUNT_SIGNALS = """
SELECT sender, count(*) AS number, sum(size) AS bytes FROM agent_task_signals
 WHERE logical_task_id = :task_id AND received_at IS NULL GROUP BY sender
"""

# Append a signal to the mailbox of its task.
INSERT_SIGNAL = """
INSERT INTO agent_task_signals (
  logical_task_id, seq, signal_id, name, sender, size, digest, value, sent_at)
VALUES (
  :task_id,
  (SELECT coalesce(max(s.seq), 0) + 1 FROM agent_task_signals AS s
    WHERE s.logical_task_id = CAST(:task_id AS varchar)),
  :signal_id, :name, :sender, :size, :digest, :value, :now)
"""

# Forget the oldest received signals of a task.
DELETE_OLD_SIGNALS = """
DELETE FROM agent_task_signals
 WHERE logical_task_id = :task_id AND received_at IS NOT NULL
   AND seq <= (SELECT max(seq) FROM agent_task_signals WHERE logical_task_id = :task_id) - :kept
"""

# Read the unreceived signals of tasks, oldest first.
READ_KEPT_SIGNALS = """
SELECT logical_task_id, seq, name FROM agent_task_signals
 WHERE logical_task_id {one_of:ids} AND received_at IS NULL ORDER BY logical_task_id, seq
"""

# Read the value of a signal that its task has not received.
READ_SIGNAL_VALUE = """
SELECT signal_id, value FROM agent_task_signals WHERE logical_task_id = :task_id AND seq = :seq
"""

# Record that a task has received a signal.
SET_RECEIVED = """
UPDATE agent_task_signals SET received_at = :now, value = NULL
 WHERE logical_task_id = :task_id AND seq = :seq
"""

# Find the first call of a task's pause that waits for this signal.
FIND_WAIT = """
SELECT sub_task_id FROM agent_peer_sub_tasks
 WHERE logical_task_id = :task_id AND invocation_id = :generation AND peer_agent = :peer
   AND status = 'pending'
 ORDER BY seq LIMIT 1
"""

# Record a question that a pause asks, and its answer if the pause already has it. A kept answer
# that the pause did not take stays.
PUT_QUESTION = """
INSERT INTO agent_task_questions (logical_task_id, sub_task_id, request, answer, is_kept)
VALUES (:task_id, :sub_task_id, :request, :answer, false)
ON CONFLICT (logical_task_id, sub_task_id) DO UPDATE SET
  request = excluded.request,
  answer = coalesce(
    excluded.answer, CASE WHEN agent_task_questions.is_kept THEN agent_task_questions.answer END),
  is_kept = agent_task_questions.is_kept AND excluded.answer IS NULL
"""

# Read the kept answers of tasks.
READ_KEPT_ANSWERS = """
SELECT logical_task_id, sub_task_id, request, answer FROM agent_task_questions
 WHERE logical_task_id {one_of:ids} AND is_kept
"""

# Read one question of a locked task.
READ_QUESTION = """
SELECT request, answer, is_kept FROM agent_task_questions
 WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Record the answer to a question.
SET_ANSWER = """
UPDATE agent_task_questions SET answer = :answer, is_kept = :is_kept
 WHERE logical_task_id = :task_id AND sub_task_id = :sub_task_id
"""

# Read questions by key, with the states of their tasks and the outcomes of their waits.
READ_QUESTIONS = """
SELECT q.logical_task_id, q.sub_task_id, q.request, q.answer, t.agent_name, t.status,
       t.requester_app_id
  FROM {pairs} JOIN agent_task_questions AS q
    ON q.logical_task_id = pair.task_id AND q.sub_task_id = pair.sub_task_id
  JOIN agent_paused_tasks AS t ON t.logical_task_id = q.logical_task_id
"""

# Count the values of a task under other keys.
COUNT_OTHER_VALUES = """
SELECT count(*) AS number FROM agent_task_values WHERE logical_task_id = :task_id AND key <> :key
"""

# Set a value.
PUT_VALUE = """
INSERT INTO agent_task_values (logical_task_id, key, value, set_at)
VALUES (:task_id, :key, :value, :now)
ON CONFLICT (logical_task_id, key) DO UPDATE SET value = excluded.value, set_at = excluded.set_at
"""

# Read a value of a task, without a lock.
READ_VALUE = """
SELECT t.agent_name, t.status, t.fence, t.reply_to, t.requester_app_id, v.value
  FROM agent_paused_tasks AS t
  LEFT JOIN agent_task_values AS v ON v.logical_task_id = t.logical_task_id AND v.key = :key
 WHERE t.logical_task_id = :task_id
"""

# List what is kept for a task.
LIST_SIGNALS = """
SELECT signal_id, name, sender, size, sent_at FROM agent_task_signals
 WHERE logical_task_id = :task_id AND received_at IS NULL ORDER BY seq
"""
LIST_QUESTIONS = """
SELECT sub_task_id, answer, is_kept FROM agent_task_questions
 WHERE logical_task_id = :task_id ORDER BY sub_task_id
"""
LIST_VALUES = """
SELECT v.key, v.value, t.agent_name
  FROM agent_task_values AS v JOIN agent_paused_tasks AS t
    ON t.logical_task_id = v.logical_task_id
 WHERE v.logical_task_id = :task_id ORDER BY v.key
"""
