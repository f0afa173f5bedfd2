"""All statements on the timelines of tasks, and the fast path's statements that write entries.

Each entry is written in the transaction that makes the change, under the same lock. A change that
is fenced out reaches no statement that writes an entry.
"""

from __future__ import annotations

import re

from meshpoint.adapters.sql import batch_statements as batch
from meshpoint.model.timeline import CHANGES_OF_CALLS, CHANGES_WITH_JOIN

_COLUMNS = """logical_task_id, agent_name, at, change, replica, generation, fence, attempt, calls,
  completed, total, peer, ref"""


def _quoted(values: tuple[str, ...]) -> str:
    return ", ".join(f"'{value}'" for value in values)


# Write entries of tasks that the transaction has locked and changed. They have the values at its
# end.
INSERT_ENTRIES = f"""
WITH clock AS MATERIALIZED (SELECT {{clock}} AS now)
INSERT INTO agent_task_timelines (
  {_COLUMNS})
SELECT t.logical_task_id, t.agent_name, clock.now, e.change, CAST(:replica AS varchar),
       t.generation,
       CASE WHEN e.change NOT IN ({_quoted(CHANGES_OF_CALLS)}) THEN t.fence END,
       CASE WHEN e.change NOT IN ({_quoted(CHANGES_OF_CALLS)}) THEN t.attempt END,
       e.calls, j.completed_count, j.total_expected,
       (SELECT c.peer_agent FROM agent_peer_sub_tasks AS c
         WHERE c.logical_task_id = t.logical_task_id AND c.sub_task_id = e.ref),
       e.ref
  FROM clock, {{timeline_entries}}
  JOIN agent_paused_tasks AS t ON t.logical_task_id = e.task_id
  LEFT JOIN agent_parallel_invocations AS j
    ON j.logical_task_id = t.logical_task_id AND j.invocation_id = t.generation
   AND e.change IN ({_quoted(CHANGES_WITH_JOIN)})
 WHERE true
 ORDER BY e.place
"""

# The same, only for tasks that have a timeline.
INSERT_ENTRIES_OF_KNOWN = INSERT_ENTRIES.replace(
    "WHERE true",
    """WHERE EXISTS (SELECT 1 FROM agent_task_timelines AS known
                WHERE known.logical_task_id = t.logical_task_id)""",
)

# Read the entries of a task after one, oldest first.
READ_TIMELINE = """
SELECT * FROM agent_task_timelines
 WHERE logical_task_id = :task_id AND id > :after
   AND substr(agent_name, 1, length(CAST(:prefix AS text))) = CAST(:prefix AS text)
 ORDER BY id LIMIT :limit
"""

# Pick the oldest entries of an agent that are older than `:age`.
PICK_OLD_ENTRIES = """
SELECT id FROM agent_task_timelines
 WHERE agent_name = :agent AND at < {instant} - :age
 ORDER BY at LIMIT :limit {for_delete_skip_locked}
"""

# Delete entries.
DELETE_ENTRIES = """
DELETE FROM agent_task_timelines WHERE id {one_of:ids}
"""


# The fast path's statements, and what they write. The last parameter is the replica.


def _writing(statement: str, entries: str) -> str:
    """`statement`, which also writes `entries`: a SELECT of `_COLUMNS` from its other steps."""
    replica = 1 + max(int(number) for number in re.findall(r"\$(\d+)", statement))
    steps, result = statement.split("\nSELECT")
    return f"""{steps},
timeline AS (
  INSERT INTO agent_task_timelines (
  {_COLUMNS})
  {entries.replace("$replica", f"${replica}::text")})
SELECT{result}"""


def _returning(statement: str, addition: str, *, after: str) -> str:
    """`statement` with an addition to what a step returns."""
    steps = statement.split(after)
    if len(steps) != 2:
        raise AssertionError(f"{len(steps) - 1} steps return {after!r}")
    return f"{after}{addition}".join(steps)


def _pause(statement: str, *, fence: str) -> str:
    return _writing(
        statement,
        f"""SELECT w.logical_task_id, w.agent_name, w.now, 'paused', $replica, w.generation,
         {fence}, 0, NULL, 0, {batch.PAUSED["total"]}, NULL, NULL
    FROM given AS i JOIN written AS w ON w.logical_task_id = i.task_id""",
    )


def _claim(statement: str) -> str:
    """Write two entries for a task whose join is met: the last outcomes, and who runs it."""
    for addition, after in (
        (", c.sub_task_id", "c.call_id, c.peer_agent, c.seq"),
        (", min(sub_task_id) AS sub_task_id", "array_agg(seq) AS seqs"),
        (" j.completed_count,", "n.last_claim, j.total_expected,"),
    ):
        statement = _returning(statement, addition, after=after)
    return _writing(
        statement,
        """SELECT logical_task_id, $4::text, now, change, $replica, generation, fence, attempt,
         calls, completed, total, peer, ref
    FROM (
      SELECT c.logical_task_id, clock.now, 'answered' AS change, c.generation,
             NULL::int AS fence, NULL::int AS attempt, c.outcomes AS calls,
             j.completed_count AS completed, j.total_expected AS total,
             CASE WHEN c.outcomes = 1 THEN c.peers[1] END AS peer,
             CASE WHEN c.outcomes = 1 THEN c.sub_task_id END AS ref, 1 AS place
        FROM joined AS j JOIN counted AS c ON c.logical_task_id = j.logical_task_id, clock
      UNION ALL
      SELECT o.logical_task_id, clock.now, CASE WHEN m.acquired THEN 'acquired' ELSE 'ready' END,
             o.generation, o.fence, o.attempt, NULL, NULL, NULL, NULL, NULL, 2
        FROM owned AS o JOIN met AS m ON m.logical_task_id = o.logical_task_id, clock) AS entries
   ORDER BY logical_task_id, place""",
    )


def _end(statement: str) -> str:
    more = ", t.status, t.generation, t.fence, t.attempt, clock.now"
    return _writing(
        _returning(statement, more, after="\n            t.log_seq"),
        """SELECT logical_task_id, agent_name, now, status, $replica, generation, fence, attempt,
         NULL, NULL, NULL, NULL, NULL
    FROM ended""",
    )


WRITING_ENTRIES = {
    **{
        statement: _pause(statement, fence="1")
        for statement in (
            batch.PAUSE_NEW,
            batch.PAUSE_NEW_HANDING_OVER,
            batch.PAUSE_NEW_WITH_LOG,
            batch.PAUSE_NEW_WITH_LOG_HANDING_OVER,
        )
    },
    **{
        statement: _pause(statement, fence=batch.PAUSED_FENCE)
        for statement in (
            batch.PAUSE_EXISTING,
            batch.PAUSE_EXISTING_HANDING_OVER,
            batch.PAUSE_EXISTING_WITH_LOG,
            batch.PAUSE_EXISTING_WITH_LOG_HANDING_OVER,
            batch.PAUSE_OPERATION,
            batch.PAUSE_OPERATION_HANDING_OVER,
        )
    },
    **{
        statement: _claim(statement)
        for statement in (
            batch.CLAIM,
            batch.CLAIM_SKIP_LOCKED,
            batch.CLAIM_ACKING,
            batch.CLAIM_ACKING_SKIP_LOCKED,
        )
    },
    **{statement: _end(statement) for statement in (batch.END, batch.END_HANDING_OVER)},
}
"""The fast path's statements with the ones that also write entries."""
