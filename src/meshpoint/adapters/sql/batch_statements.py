"""The fast path's statements, for PostgreSQL only.

Each moves a batch of tasks one step, over arrays, in its own transaction. (Checkpoints within a
segment are large, so each is written separately.)

A statement handles only the ordinary case. It changes the rows that are as expected, and returns
those. The general transaction in `checkpointing`, `claiming` or `ending` handles the other tasks,
and decides under the row's lock what their state means. Decisions are therefore made in one place,
and none is repeated here.

As everywhere, tasks are locked in order of id, and calls only under the lock of their task. If
another session holds a lock:

- On a task: a pause or end leaves it to the general transaction, so that it does not delay the
  rest of the batch. A claim waits, since replicas that count outcomes on the same join hold the
  lock for a single commit. After `lock_timeout`, claims skip such tasks for a while.
- On a call or a join: the statement fails after `lock_timeout`, and the general transaction finds
  out which task is affected.

After waiting for a lock, a guard on the locked row is evaluated on the row's newest version.
Changes that others made to *other* rows in the meantime are invisible to the statement, whose
snapshot is older. So no statement here reads such rows for a decision. If a claim returns only
some of a task's outcomes, `READ_OWNED` reads all of them later.

`$1` is the time in tests, or NULL for the database's time. The comment at the start of each
statement is its name in the database's statistics.
"""

from __future__ import annotations

from functools import partial

from meshpoint.adapters.sql import columns
from meshpoint.adapters.sql.array_literals import split_texts
from meshpoint.adapters.sql.columns import APPENDED, CONTEXT_TYPES, comma_separated, emptied
from meshpoint.adapters.sql.hand_over import ACK_RECORDED, hand_over
from meshpoint.adapters.sql.operation_statements import (
    ON_CONFLICT_REPLACE,
    ON_CONFLICT_REPLACE_RECORD,
    appended_children,
)
from meshpoint.model.tasks import NO_DEADLINE

SHORT_TEXTS = frozenset(
    {
        *("run_id", "status", "agent", "request_digest"),
        *("reply_to", "requester_app_id", "parent_task_id"),
        *("effective_session_id", "user_id", "current_invocation_id"),
        *("state_format", "app_version", "framework"),
    }
)
"""The texts of `_items` that are passed as `array_literals`, as all numbers are."""


def _item(name: str, number: int, kind: str) -> str:
    is_literal = name in SHORT_TEXTS if kind == "text" else kind != "bytea"
    array = f"${number}::{kind}[]"
    if is_literal:
        literal = split_texts(f"${number}") if kind == "text" else f"${number}::text::{kind}[]"
        array = f"(SELECT {literal})"
    return f"({array})[i.place::int]"


def _items(first: int, **types: str) -> dict[str, str]:
    """SQL for the element at `i.place` of the arrays `$first`, `$first + 1`, …, by name.

    One array is unnested to get the places, from 1; the others are indexed. To unnest them all
    costs a buffer per array, and to carry their elements through the steps of a statement copies
    them: for each UPDATE and FOR UPDATE, PostgreSQL copies the rows that it joins to the table.
    Arrays of calls are long, so those are unnested instead: indexing an array of texts takes time
    proportional to the place.
    """
    return {
        name: _item(name, number, kind) for number, (name, kind) in enumerate(types.items(), first)
    }


def value_of(row: str, values: str) -> str:
    """SQL for the value of a row with `first` and `size`: see `array_literals.joined_values`."""
    return f"CASE WHEN {row}.size > 0 THEN substr({values}::bytea, {row}.first, {row}.size) END"


# The time of a batch, read after the last lock.
_CLOCK_AFTER_LOCKS = """
clock AS MATERIALIZED (
  SELECT coalesce($1::double precision,
                  CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)) AS now
    FROM (SELECT count(*) FROM locked) AS counted)"""

_CONTEXT, _REQUESTER = comma_separated(columns.CONTEXT), comma_separated(columns.REQUESTER)

# The columns of a task that its next segment needs.
_RESUME_COLUMNS = comma_separated(
    (
        *(
            "logical_task_id",
            "agent_name",
            "run_id",
            "fence",
            "generation",
            "attempt",
            "cancel_requested",
            "request",
        ),
        *columns.REQUESTER,
        "further_reply_to",
        *columns.RESTORED,
        *("checkpoint_seq", "retry_count", "rescues", "dead_reason", "request_digest", "log_seq"),
    ),
    "t.",
)

# Delete the done calls of the tasks in `{moved}`. Calls with an unsent cancel stay. A cancel may
# have been sent while this statement waited for its locks; the snapshot does not show that, but
# locking the row does.
_DELETE_DONE_CALLS = """
cancels_sent AS MATERIALIZED (
  SELECT c.logical_task_id, c.sub_task_id, c.status
    FROM (SELECT o.logical_task_id, o.sub_task_id
            FROM agent_peer_sub_tasks AS o
            JOIN {moved} ON {moved}.logical_task_id = o.logical_task_id
           WHERE o.status = 'cancelling' OFFSET 0) AS candidates
    JOIN agent_peer_sub_tasks AS c
      ON c.logical_task_id = candidates.logical_task_id AND c.sub_task_id = candidates.sub_task_id
     FOR UPDATE OF c),
done_calls AS (
  DELETE FROM agent_peer_sub_tasks AS c USING {moved}
   WHERE c.logical_task_id = {moved}.logical_task_id
     AND (c.status = 'done' OR EXISTS (SELECT 1 FROM cancels_sent AS l
                                        WHERE l.logical_task_id = c.logical_task_id
                                          AND l.sub_task_id = c.sub_task_id
                                          AND l.status = 'done')))"""

# The values of every pause, and the additional ones of pauses of new tasks.
PAUSED = _items(
    15,
    task_id="text",
    run_id="text",
    generation="int",
    earliest_timeout="double precision",
    total="int",
    needed="int",
    join_timeout="double precision",
    **CONTEXT_TYPES,
    task_deadline="double precision",
    agent="text",
    request="bytea",
    reply_to="text",
    requester_app_id="text",
    parent_task_id="text",
    idle_timeout="double precision",
    request_digest="text",
    result_ttl="double precision",
)
PAUSED_FENCE = _item("fence", 37, "int")
"""Of a pause of a task that has a row."""


def _wake_at(deadline: str) -> str:
    """When the sweeper checks a task whose own deadline is `deadline`."""
    earliest, join = PAUSED["earliest_timeout"], PAUSED["join_timeout"]
    return f"LEAST(clock.now + {earliest}, {deadline}, clock.now + {join})"


# Insert the calls and joins of the tasks in `written`. `given` has the places of their pauses.
# The calls of a task rarely differ in peer, headers and timeouts, so each distinct combination of
# these terms is passed once, and each call has the number of its combination.
_NEW_CALL = comma_separated(name for name in columns.NEW_CALL if name != "outcome")


def _insert_calls_and_joins(*, hands_over: bool) -> str:
    """Insert the calls and joins, and return the tasks. Requests handed over are sent already."""
    due_at, sent_at, begin, source, result = "w.now + $2::double precision", "", "w.now", "", ""
    if hands_over:
        begin = "coalesce(h.planned_at, w.now)"
        due_at = f"CASE WHEN h.number IS NULL THEN {due_at} END"
        sent_at = ", CASE WHEN h.number IS NOT NULL THEN w.now END"
        source = " LEFT JOIN handed_over AS h ON h.task_id = w.logical_task_id"
        result = """,
       EXISTS (SELECT FROM handed_over WHERE task_id = logical_task_id) AS is_handed_over"""
    return f"""
calls AS (
  INSERT INTO agent_peer_sub_tasks (
    {_NEW_CALL})
  SELECT w.logical_task_id, c.sub_task_id, w.agent_name, w.generation, c.place - terms.first,
         c.call_id, terms.peer, terms.headers, {value_of("c", "$5")}, 'pending', 1,
         terms.idle_timeout,
         LEAST({begin} + terms.timeout, w.now + terms.idle_timeout, w.task_deadline),
         coalesce(LEAST({begin} + terms.timeout, w.task_deadline), {NO_DEADLINE.timestamp()}),
         w.now
    FROM unnest({split_texts("$3")}, {split_texts("$4")}, $6::text::int[], $7::text::int[],
                $8::text::int[])
         WITH ORDINALITY AS c(sub_task_id, call_id, first, size, terms, place)
    JOIN unnest({split_texts("$9")}, $10::text::int[], {split_texts("$11")}, $12::text[],
                 $13::text::double precision[], $14::text::double precision[])
         WITH ORDINALITY AS terms(task_id, first, peer, headers, timeout, idle_timeout, number)
      ON terms.number = c.terms
    JOIN written AS w ON w.logical_task_id = terms.task_id{source}),
joins AS (
  INSERT INTO agent_parallel_invocations (
    {comma_separated(columns.NEW_JOIN)}{", dispatched_at" if hands_over else ""})
  SELECT w.logical_task_id, w.generation, {PAUSED["total"]}, 0, 0, {PAUSED["needed"]},
         w.now + {PAUSED["join_timeout"]}, w.agent_name, {due_at}, 1{sent_at}
    FROM given AS i JOIN written AS w ON w.logical_task_id = i.task_id{source})
SELECT logical_task_id, now, task_deadline{result} FROM written"""


def _hand_over_requests(first: int | None) -> str:
    """Publish the requests of the pauses in `written`. They name the deadlines of their calls."""
    if first is None:
        return ""
    guard = """w.task_deadline IS NOT DISTINCT FROM o.expected::double precision
     AND (o.planned_at IS NULL OR abs(w.now - o.planned_at) < 1)"""
    return hand_over(first, moved="written", guard=guard)


def _append_entries(first: int) -> str:
    """Append entries to the logs of the tasks in `written`.

    Three arrays, starting at `$first`, hold each entry's task, its number among the task's new
    entries, and its bytes.
    """
    return f"""
logged AS (
  INSERT INTO agent_task_log (logical_task_id, seq, run_id, entry)
  SELECT w.logical_task_id, w.log_seq - w.new_entries + e.number, w.run_id, e.entry
    FROM unnest(${first}::text[], ${first + 1}::int[], ${first + 2}::bytea[])
         AS e(task_id, number, entry)
    JOIN written AS w ON w.logical_task_id = e.task_id),"""


def _pause_new(
    name: str,
    *,
    column: str = "",
    value: str = "",
    returned: str = "",
    logged: str = "",
    hand_over_at: int | None = None,
) -> str:
    deadline = PAUSED["task_deadline"]
    requester, context = (
        ", ".join(PAUSED[name] for name in names) for names in (columns.REQUESTER, columns.CONTEXT)
    )
    return f"""/* commits: {name} */
WITH locked AS (SELECT 1), {_CLOCK_AFTER_LOCKS},
given AS MATERIALIZED (
  SELECT i.task_id, i.place, {_wake_at(deadline)} AS wake_at
    FROM unnest($15::text[]) WITH ORDINALITY AS i(task_id, place), clock
   WHERE {deadline} IS NULL OR {deadline} > clock.now),
written AS (
  INSERT INTO agent_paused_tasks (
    logical_task_id, agent_name, status, generation, fence, run_id, attempt, wake_at, request,
    {_REQUESTER}, keep_alive_at, checkpointed_at, request_digest,{column}
    {_CONTEXT})
  SELECT i.task_id, {PAUSED["agent"]}, 'waiting', {PAUSED["generation"]}, 1,
         {PAUSED["run_id"]}, 0, i.wake_at, {PAUSED["request"]}, {requester},
         clock.now + {PAUSED["idle_timeout"]} / $46::int, clock.now,
         {PAUSED["request_digest"]},{value} {context}
    FROM given AS i, clock
  ON CONFLICT DO NOTHING
  RETURNING logical_task_id, agent_name, generation, task_deadline, checkpointed_at AS now
            {returned}),{_hand_over_requests(hand_over_at)}{logged}
{_insert_calls_and_joins(hands_over=hand_over_at is not None)}
"""


# Insert tasks that have no row, with their first checkpoints.
PAUSE_NEW = _pause_new("pause")
PAUSE_NEW_HANDING_OVER = _pause_new("pause handing over", hand_over_at=47)

# The same, with the first entries of their logs.
_pause_new_with_log = partial(
    _pause_new,
    column=" log_seq,",
    value=f" {_item('new_entries', 47, 'int')},",
    returned=", run_id, log_seq, log_seq AS new_entries",
    logged=_append_entries(48),
)
PAUSE_NEW_WITH_LOG = _pause_new_with_log("pause with log")
PAUSE_NEW_WITH_LOG_HANDING_OVER = _pause_new_with_log(
    "pause with log handing over", hand_over_at=51
)


def _pause_existing(
    name: str,
    *,
    guard: str = "",
    log_seq: str = "",
    state: str = PAUSED["state"],
    returned: str = "",
    logged: str = "",
    hand_over_at: int | None = None,
) -> str:
    context = ", ".join((PAUSED | {"state": state})[name] for name in columns.CONTEXT)
    return f"""/* commits: {name} */
WITH locked AS MATERIALIZED (
  SELECT t.logical_task_id, i.place, t.task_deadline
    FROM agent_paused_tasks AS t
    JOIN unnest($15::text[]) WITH ORDINALITY AS i(task_id, place) ON i.task_id = t.logical_task_id
   WHERE t.logical_task_id = ANY($15::text[]) AND t.fence = {PAUSED_FENCE}
     AND t.status = 'running' AND NOT t.cancel_requested{guard}
   ORDER BY t.logical_task_id FOR NO KEY UPDATE OF t SKIP LOCKED), {_CLOCK_AFTER_LOCKS},
given AS MATERIALIZED (
  SELECT i.logical_task_id AS task_id, i.place, {_wake_at("i.task_deadline")} AS wake_at
    FROM locked AS i, clock
   WHERE i.task_deadline IS NULL OR i.task_deadline > clock.now),
written AS (
  UPDATE agent_paused_tasks AS t SET
    status = 'waiting', generation = {PAUSED["generation"]}, run_id = {PAUSED["run_id"]},
    owner = NULL, attempt = 0, rescues = 0, wake_at = i.wake_at,
    keep_alive_at = clock.now + t.idle_timeout / $38::int, checkpointed_at = clock.now,
    dead_reason = NULL, {emptied(columns.PARKING)},{log_seq}
    ({_CONTEXT}) = ROW({context})
    FROM given AS i, clock WHERE t.logical_task_id = i.task_id
  RETURNING t.logical_task_id, t.agent_name, t.generation, t.task_deadline, clock.now{returned}),
{_DELETE_DONE_CALLS.format(moved="written")},
met_joins AS (
  DELETE FROM agent_parallel_invocations AS j USING written
   WHERE j.logical_task_id = written.logical_task_id),{_hand_over_requests(hand_over_at)}{logged}
{_insert_calls_and_joins(hands_over=hand_over_at is not None)}
"""


# Write the checkpoints of tasks that have a row, and delete the done calls and the joins of their
# earlier pauses.
PAUSE_EXISTING = _pause_existing("pause existing")
PAUSE_EXISTING_HANDING_OVER = _pause_existing("pause existing handing over", hand_over_at=39)

# The same, with changes of their logs. `$39` has the last entry that each run has read, NULL for a
# pause that leaves the log as it is. A row with another last entry, or with entries after it, is
# left to the general transaction.
_LOG = _items(39, after="int", replaces="boolean", keeps_state="boolean", new_entries="int")
_CHANGE_LOG = f"""
replaced AS (
  DELETE FROM agent_task_log AS l
   WHERE l.logical_task_id = ANY(ARRAY(SELECT logical_task_id FROM written WHERE replaces))),
{_append_entries(43)}"""
_pause_existing_with_log = partial(
    _pause_existing,
    guard=f"""
     AND ({_LOG["after"]} IS NULL OR t.log_seq = {_LOG["after"]}
          AND NOT EXISTS (SELECT 1 FROM agent_task_log AS l
                           WHERE l.logical_task_id = t.logical_task_id AND l.seq > t.log_seq))""",
    log_seq=f" log_seq = t.log_seq + {_LOG['new_entries']},",
    state=f"CASE WHEN {_LOG['keeps_state']} THEN t.state ELSE {PAUSED['state']} END",
    returned=f""",
            t.run_id, t.log_seq, {_LOG["new_entries"]} AS new_entries,
            {_LOG["replaces"]} AS replaces""",
    logged=_CHANGE_LOG,
)
PAUSE_EXISTING_WITH_LOG = _pause_existing_with_log("pause existing with log")
PAUSE_EXISTING_WITH_LOG_HANDING_OVER = _pause_existing_with_log(
    "pause existing with log handing over", hand_over_at=46
)

# The same for operations: `$46` has the children that each pause adds, or NULL.
_CHILDREN = _item("children", 46, "text")
_pause_operation = partial(
    _pause_existing_with_log,
    logged=f"""{_CHANGE_LOG}
added_children AS (
  UPDATE agent_operations AS o SET children = {appended_children("o.children", _CHILDREN)}
    FROM written JOIN given AS i ON i.task_id = written.logical_task_id
   WHERE o.operation_id = written.logical_task_id AND {_CHILDREN} IS NOT NULL),""",
)
PAUSE_OPERATION = _pause_operation("pause operation")
PAUSE_OPERATION_HANDING_OVER = _pause_operation("pause operation handing over", hand_over_at=47)

# Append entries to the logs of running tasks, if the logs are as their runs have read them. The
# last entry is found by a subquery, because the planner would turn NOT EXISTS into a join.
APPEND = f"""/* commits: append */
WITH locked AS MATERIALIZED (
  SELECT t.logical_task_id, mine.run_id, mine.entries AS new_entries
    FROM agent_paused_tasks AS t
    JOIN unnest($2::text[], $3::int[], $4::int[], $5::int[], $6::text[])
         AS mine(task_id, fence, after, entries, run_id)
      ON mine.task_id = t.logical_task_id AND mine.fence = t.fence AND mine.after = t.log_seq
   WHERE t.logical_task_id = ANY($2::text[]) AND t.status = 'running' AND NOT t.cancel_requested
     AND coalesce((SELECT max(l.seq) FROM agent_task_log AS l
                    WHERE l.logical_task_id = t.logical_task_id), 0) <= t.log_seq
   ORDER BY t.logical_task_id FOR NO KEY UPDATE OF t SKIP LOCKED), {_CLOCK_AFTER_LOCKS},
written AS (
  UPDATE agent_paused_tasks AS t SET
    log_seq = t.log_seq + locked.new_entries, {APPENDED}
    FROM locked WHERE t.logical_task_id = locked.logical_task_id
  RETURNING t.logical_task_id, locked.run_id, t.log_seq, locked.new_entries),
{_append_entries(7).strip().rstrip(",")}
SELECT written.logical_task_id FROM written, clock
"""


# Record outcomes of calls whose join needs an outcome of every call. Tasks whose join is met are
# assigned to the replica `$2`, or made ready. Suspended tasks, and failures of calls that may be
# retried, are left to the general transaction.
#
# Returns one row per task:
# - the positions in the arrays of the outcomes recorded;
# - `acquired`: whether the replica owns the task now, or NULL if the join is not met;
# - for an acquired task, its row, and its earlier outcomes as far as the statement's snapshot has
#   them. Earlier outcomes of more than `$17` bytes are left to `READ_OWNED`, since a result row
#   must stay below 1 GiB;
# - its log, unless that has more than `$18` bytes: a driver reads a large array more slowly than
#   the rows of `READ_OWNED_LOG`. The snapshot has the whole log if it has the last entry: all
#   entries were committed by pauses, and a later pause would have changed the generation.
#
# The statement finds each row by its whole key, regardless of the planner's statistics: calls are
# joined to `given` only, and `|| ''` prevents the use of an index on the agent's name.
def _claim(name: str, *, acked: str = "", returned: str = "") -> str:
    return f"""/* commits: {name} */
WITH locked AS MATERIALIZED (
  SELECT t.logical_task_id, t.generation, t.state_format
    FROM agent_paused_tasks AS t
    JOIN agent_parallel_invocations AS j
      ON j.logical_task_id = t.logical_task_id AND j.invocation_id = t.generation
     AND j.needed IS NULL
   WHERE t.logical_task_id = ANY($3::text[]) AND t.agent_name || '' = $4::text
     AND t.status = 'waiting' AND t.suspended_at IS NULL
   ORDER BY t.logical_task_id FOR NO KEY UPDATE OF t), {_CLOCK_AFTER_LOCKS},
given AS MATERIALIZED (
  SELECT c.*, terms.task_id, terms.ok, terms.sender, l.generation, l.state_format
    FROM unnest({split_texts("$5")}, {split_texts("$6")}, $8::text::int[], $9::text::int[],
                $10::text::int[])
         WITH ORDINALITY AS c(sub_task_id, claim_id, first, size, terms, place)
    JOIN unnest({split_texts("$11")}, $12::text::boolean[], {split_texts("$13")}) WITH ORDINALITY
         AS terms(task_id, ok, sender, number)
      ON terms.number = c.terms
    JOIN locked AS l ON l.logical_task_id = terms.task_id),
recorded AS (
  UPDATE agent_peer_sub_tasks AS c
     SET status = 'done', outcome = {value_of("g", "$7")}, claim_id = g.claim_id,
         send_due_at = NULL
    FROM given AS g
   WHERE c.logical_task_id = g.task_id AND c.sub_task_id = g.sub_task_id AND c.status = 'pending'
     AND c.invocation_id = g.generation AND (g.sender IS NULL OR g.sender = c.peer_agent)
     AND (g.ok OR c.retry IS NULL)
  RETURNING c.logical_task_id, g.generation, g.state_format, g.place::int, g.ok, g.claim_id,
            c.call_id, c.peer_agent, c.seq),{acked}
counted AS MATERIALIZED (
  SELECT logical_task_id, generation, state_format, count(*) AS outcomes,
         count(*) FILTER (WHERE ok) AS results,
         (array_agg(claim_id))[count(*)] AS last_claim, array_agg(place) AS places,
         array_agg(call_id) AS call_ids, array_agg(peer_agent) AS peers, array_agg(seq) AS seqs
    FROM recorded GROUP BY logical_task_id, generation, state_format),
joined AS (
  UPDATE agent_parallel_invocations AS j
     SET completed_count = j.completed_count + n.outcomes,
         succeeded_count = j.succeeded_count + n.results,
         send_due_at = CASE WHEN j.completed_count + n.outcomes < j.total_expected
                            THEN j.send_due_at END
    FROM counted AS n
   WHERE j.logical_task_id = n.logical_task_id AND j.invocation_id = n.generation
  RETURNING j.logical_task_id, n.state_format, n.last_claim, j.total_expected,
            j.completed_count >= j.total_expected AS met),
met AS MATERIALIZED (
  SELECT logical_task_id, last_claim, total_expected,
         state_format = ANY($14::text[])
         AND sum((state_format = ANY($14::text[]))::int)
               OVER (ORDER BY logical_task_id) <= $15::int AS acquired
    FROM joined WHERE met),
owned AS (
  UPDATE agent_paused_tasks AS t SET
    status = CASE WHEN met.acquired THEN 'running' ELSE 'ready' END,
    fence = t.fence + met.acquired::int, run_id = met.last_claim,
    owner = CASE WHEN met.acquired THEN $2::text END, attempt = met.acquired::int,
    wake_at = CASE WHEN met.acquired THEN clock.now + $16::double precision ELSE clock.now END
    FROM met, clock WHERE t.logical_task_id = met.logical_task_id
  RETURNING {_RESUME_COLUMNS}),
logs AS MATERIALIZED (
  SELECT owned.logical_task_id AS task_id, size.log_bytes, entries.*
    FROM owned JOIN met ON met.logical_task_id = owned.logical_task_id AND met.acquired,
         LATERAL (
           SELECT sum(octet_length(s.entry)) AS log_bytes
             FROM agent_task_log AS s
            WHERE s.logical_task_id = owned.logical_task_id AND s.seq <= owned.log_seq) AS size,
         LATERAL (
           SELECT array_agg(l.entry ORDER BY l.seq) AS log_entries, max(l.seq) AS log_last
             FROM agent_task_log AS l
            WHERE size.log_bytes <= $18::bigint
              AND l.logical_task_id = owned.logical_task_id AND l.seq <= owned.log_seq) AS entries
   WHERE owned.log_seq > 0)
SELECT counted.places, met.acquired, met.total_expected, before.*, owned.*, logs.*,
       CASE WHEN met.acquired THEN counted.seqs END AS seqs,
       CASE WHEN met.acquired THEN counted.call_ids END AS call_ids,
       CASE WHEN met.acquired THEN counted.peers END AS peers{returned}
  FROM counted
  LEFT JOIN met ON met.logical_task_id = counted.logical_task_id
  LEFT JOIN owned ON owned.logical_task_id = met.logical_task_id AND met.acquired
  LEFT JOIN LATERAL (
    SELECT array_agg(c.seq) AS seqs_before, array_agg(c.call_id) AS call_ids_before,
           array_agg(c.peer_agent) AS peers_before, array_agg(c.outcome) AS outcomes_before,
           array_agg(c.sub_task_id) AS ids_before
      FROM agent_peer_sub_tasks AS c
     WHERE c.logical_task_id = counted.logical_task_id AND c.invocation_id = counted.generation
       AND c.status <> 'pending' AND met.acquired AND counted.outcomes < met.total_expected
       AND (SELECT coalesce(sum(octet_length(s.outcome)), 0) FROM agent_peer_sub_tasks AS s
             WHERE s.logical_task_id = counted.logical_task_id
               AND s.invocation_id = counted.generation
               AND s.status <> 'pending') <= $17::bigint) AS before ON true
  LEFT JOIN logs ON logs.task_id = owned.logical_task_id
"""


CLAIM = _claim("claim")

# The same, and ack the messages that the outcomes recorded came in.
CLAIM_ACKING = _claim(
    "claim acking",
    acked=ACK_RECORDED,
    returned=""",
       (SELECT array_agg(acked.place) FROM acked
         WHERE acked.logical_task_id = counted.logical_task_id) AS acked""",
)


def skip_locked(claim: str) -> str:
    """The same claim, but tasks that other sessions hold are left to the general transaction."""
    return claim.replace("commits: claim", "commits: claim skip locked").replace(
        "FOR NO KEY UPDATE OF t)", "FOR NO KEY UPDATE OF t SKIP LOCKED)"
    )


CLAIM_SKIP_LOCKED, CLAIM_ACKING_SKIP_LOCKED = skip_locked(CLAIM), skip_locked(CLAIM_ACKING)

# Read tasks that exactly these runs of this replica own, with the outcomes of their pause in call
# order, unless those have more than `$4` bytes.
READ_OWNED = f"""/* reads: owned */
SELECT {_RESUME_COLUMNS}, sizes.outcome_bytes, calls.*
  FROM agent_paused_tasks AS t,
       LATERAL (SELECT coalesce(sum(octet_length(outcome)), 0) AS outcome_bytes
                  FROM agent_peer_sub_tasks
                 WHERE logical_task_id = t.logical_task_id
                   AND invocation_id = t.generation) AS sizes,
       LATERAL (SELECT array_agg(c.call_id) AS call_ids, array_agg(c.peer_agent) AS peers,
                       array_agg(c.outcome) AS outcomes, array_agg(c.sub_task_id) AS ids
                  FROM (SELECT call_id, peer_agent, outcome, sub_task_id
                          FROM agent_peer_sub_tasks
                         WHERE logical_task_id = t.logical_task_id AND invocation_id = t.generation
                           AND sizes.outcome_bytes <= $4::bigint
                         ORDER BY seq) AS c) AS calls
 WHERE t.logical_task_id = ANY($1::text[]) AND t.owner = $2::text AND t.status = 'running'
   AND t.run_id = ANY($3::text[])
"""

# Read the log of an owned task from entry `$3` on. It does not change meanwhile.
READ_OWNED_LOG = """/* reads: log */
SELECT seq, entry, CASE WHEN seq = $2::int OR seq = $3::int THEN run_id END AS run_id
  FROM agent_task_log
 WHERE logical_task_id = $1::text AND seq <= $2::int AND seq >= $3::int ORDER BY seq
"""

# The reply goes to one address, and is addressed as the row says.
_REPLIES_AS_EXPECTED = """w.further_reply_to IS NULL
     AND concat(w.reply_to, chr(10), w.parent_task_id) = o.expected"""

_ENDED = _items(
    4,
    task_id="text",
    fence="int",
    run_id="text",
    status="text",
    reply="bytea",
    dead_reason="text",
)


# Turn tasks into tombstones: wipe their context and state, and make their replies due. Operations
# are left to the general transaction, which also handles their checkpoints.
def _end(name: str, *, hands_over: bool = False) -> str:
    expires_at = """GREATEST(
      GREATEST(clock.now, t.task_deadline) + $3::double precision, clock.now + t.result_ttl)"""
    wake_at, is_sent = "clock.now + $2::double precision", "false"
    requester = published = source = result = ""
    if hands_over:
        requester = ", t.reply_to, t.parent_task_id, t.further_reply_to"
        published = hand_over(10, moved="locked", guard=_REPLIES_AS_EXPECTED)
        source = " LEFT JOIN handed_over AS h ON h.task_id = i.logical_task_id"
        wake_at = f"CASE WHEN h.number IS NULL THEN {wake_at} ELSE {expires_at} END"
        is_sent = "h.number IS NOT NULL"
        result = ", t.reply_sent AS is_handed_over"
    return f"""/* commits: {name} */
WITH locked AS MATERIALIZED (
  SELECT t.logical_task_id, i.place{requester}
    FROM agent_paused_tasks AS t
    JOIN unnest($4::text[]) WITH ORDINALITY AS i(task_id, place) ON i.task_id = t.logical_task_id
   WHERE t.logical_task_id = ANY($4::text[]) AND t.fence = {_ENDED["fence"]}
     AND t.status = 'running' AND t.checkpoint_seq IS NULL
   ORDER BY t.logical_task_id FOR NO KEY UPDATE OF t SKIP LOCKED), {_CLOCK_AFTER_LOCKS},{published}
ended AS (
  UPDATE agent_paused_tasks AS t SET
    status = {_ENDED["status"]}, run_id = {_ENDED["run_id"]}, owner = NULL,
    wake_at = {wake_at},
    keep_alive_at = NULL, reply = {_ENDED["reply"]}, reply_sent = {is_sent}, reply_attempts = 1,
    dead_reason = {_ENDED["dead_reason"]},
    request = CASE WHEN {_ENDED["dead_reason"]} IS NOT NULL THEN t.request END,
    ended_at = clock.now, expires_at = {expires_at},
    suspended_at = NULL,
    {emptied(columns.WIPED_AT_END)}
    FROM locked AS i{source}, clock WHERE t.logical_task_id = i.logical_task_id
  RETURNING t.logical_task_id, t.agent_name, {comma_separated(columns.REQUESTER, "t.")},
            t.log_seq{result}),
{_DELETE_DONE_CALLS.format(moved="ended")},
met_joins AS (
  DELETE FROM agent_parallel_invocations AS j USING ended
   WHERE j.logical_task_id = ended.logical_task_id),
log_entries AS (
  DELETE FROM agent_task_log AS l
   WHERE l.logical_task_id = ANY(ARRAY(SELECT logical_task_id FROM ended WHERE log_seq > 0)))
SELECT * FROM ended
"""


END = _end("end")

# The same, and publish the replies.
END_HANDING_OVER = _end("end handing over", hands_over=True)

_TIME_COLUMNS = {"checkpoint_time", "created_at"}
_SAVED_TYPES = {"progress_pct": "double precision", "retry_count": "int", "l1_snapshot": "bytea"}
_SAVED_TYPES |= dict.fromkeys(columns.CHECKPOINT_JSON, "text::jsonb")

SAVED_COLUMNS = tuple(name for name in columns.CHECKPOINT_VALUES if name not in _TIME_COLUMNS)
"""The columns whose values come from the checkpoint, in the order of the parameters of `SAVE`."""

_POSITIONS = {name: place for place, name in enumerate(SAVED_COLUMNS, 7)}
_CHECKPOINT_VALUES = ", ".join(
    "clock.now"
    if name in _TIME_COLUMNS
    else f"${_POSITIONS[name]}::{_SAVED_TYPES.get(name, 'text')}"
    for name in columns.CHECKPOINT_VALUES
)
_HAS_SNAPSHOT = f"${_POSITIONS['l1_snapshot']}::bytea IS NOT NULL"
# The statement does not see the row that it inserts, which belongs to the current attempt.
_ENDS_ATTEMPT = f"""c.retry_count <> ${_POSITIONS["retry_count"]}::int AND NOT EXISTS (
         SELECT 1 FROM agent_checkpoints AS later
          WHERE later.analysis_id = c.analysis_id AND later.agent_type = c.agent_type
            AND later.seq > c.seq AND later.retry_count = c.retry_count)"""

_STARTS, _NAMES, _PLACES, _RECORDS, _RESULTS = (
    f"${place}" for place in range(7 + len(SAVED_COLUMNS), 12 + len(SAVED_COLUMNS))
)
SAVED_RECORD = ("name", *columns.RECORD_VALUES)
"""The columns of changed records, whose values are arrays at the end of the parameters."""

# Write the checkpoint of one running operation and delete those beyond the history, except the
# final checkpoint of each attempt. If the new checkpoint has a working memory, it is removed from
# the others. Deleted and updated rows are distinguished by `seq` and attempt, because one
# statement must not do both to a row. For the same reason, the records that an earlier task with
# the same id left behind are deleted only if no new ones replace them.
SAVE = f"""/* commits: save */
WITH locked AS MATERIALIZED (
  SELECT t.logical_task_id, t.agent_name
    FROM agent_paused_tasks AS t
   WHERE t.logical_task_id = $2::text AND t.fence = $3::int AND t.status = 'running'
     AND NOT t.cancel_requested AND t.checkpoint_seq < $4::int
     FOR NO KEY UPDATE OF t SKIP LOCKED), {_CLOCK_AFTER_LOCKS},
updated_task AS (
  UPDATE agent_paused_tasks AS t SET
    checkpoint_seq = $4::int, attempt = CASE WHEN $6::boolean THEN 1 ELSE t.attempt END,
    rescues = CASE WHEN $6::boolean THEN LEAST(t.rescues, 2) ELSE t.rescues END
    FROM locked WHERE t.logical_task_id = locked.logical_task_id),
pruned AS (
  DELETE FROM agent_checkpoints AS c USING locked
   WHERE c.analysis_id = locked.logical_task_id AND c.agent_type = locked.agent_name
     AND c.seq <= $4::int - $5::int AND (c.l1_snapshot IS NULL OR {_HAS_SNAPSHOT})
     AND NOT ({_ENDS_ATTEMPT})),
dropped AS (
  UPDATE agent_checkpoints AS c SET l1_snapshot = NULL FROM locked
   WHERE {_HAS_SNAPSHOT}
     AND c.analysis_id = locked.logical_task_id AND c.agent_type = locked.agent_name
     AND (c.seq > $4::int - $5::int OR {_ENDS_ATTEMPT})
     AND c.seq < $4::int AND c.l1_snapshot IS NOT NULL),
left_behind AS (
  DELETE FROM agent_subtask_records AS r USING locked
   WHERE {_STARTS}::boolean
     AND r.analysis_id = locked.logical_task_id AND r.agent_type = locked.agent_name
     AND r.seq >= $4::int AND (r.seq > $4::int OR r.name <> ALL({_NAMES}::text[]))),
changed AS (
  INSERT INTO agent_subtask_records ({comma_separated(columns.RECORD)})
  SELECT locked.logical_task_id, locked.agent_name, r.name, $4::int, r.place, r.record, r.result
    FROM locked, unnest({_NAMES}::text[], {_PLACES}::int[], {_RECORDS}::text[], {_RESULTS}::text[])
                 AS r(name, place, record, result)
  {ON_CONFLICT_REPLACE_RECORD})
INSERT INTO agent_checkpoints ({comma_separated(columns.CHECKPOINT)})
SELECT locked.logical_task_id, locked.agent_name, $4::int, {_CHECKPOINT_VALUES} FROM locked, clock
{ON_CONFLICT_REPLACE}
RETURNING seq
"""

# Let COMMIT return before the data is on disk, for this transaction only. A crash may lose
# the records, which only causes resends.
_ASYNC_COMMIT = (
    "async_commit AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))"
)

# Mark the requests of pauses as sent where as many were sent as the pause has calls. Returns the
# remaining tasks: with `complete` false, if only some requests were sent or the previous release
# wrote them; with `complete` true, if another session holds the join. The statement does not lock
# the task, so it never waits for the join.
CONFIRM_DISPATCHED = f"""/* commits: confirm dispatched */
WITH {_ASYNC_COMMIT},
due AS MATERIALIZED (
  SELECT j.logical_task_id, j.invocation_id,
         j.send_attempts > 0 AND j.total_expected = sent.requests
         AND NOT EXISTS (SELECT 1 FROM agent_paused_tasks AS t
                          WHERE t.logical_task_id = j.logical_task_id AND t.retry_count > 0)
           AS complete
    FROM async_commit,
         unnest($2::text[], $3::text::int[], $4::text::int[])
           AS sent(task_id, generation, requests)
    JOIN agent_parallel_invocations AS j
      ON j.logical_task_id = sent.task_id AND j.invocation_id = sent.generation
   WHERE j.send_due_at IS NOT NULL OR j.send_attempts = 0),
locked AS MATERIALIZED (
  SELECT j.logical_task_id, j.invocation_id
    FROM due JOIN agent_parallel_invocations AS j
      ON j.logical_task_id = due.logical_task_id AND j.invocation_id = due.invocation_id
   WHERE due.complete FOR NO KEY UPDATE OF j SKIP LOCKED),
confirmed AS (
  UPDATE agent_parallel_invocations AS j SET
    dispatched_at = coalesce($1::double precision,
                             CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)),
    send_due_at = NULL
    FROM locked
   WHERE j.logical_task_id = locked.logical_task_id AND j.invocation_id = locked.invocation_id
  RETURNING j.logical_task_id)
SELECT due.logical_task_id, due.complete FROM due
 WHERE NOT EXISTS (SELECT 1 FROM confirmed WHERE confirmed.logical_task_id = due.logical_task_id)
"""

# Mark replies as sent if their tasks have not ended again since and their addresses are the same.
# The rows stay as tombstones, whose replies are due to the first further address if there is any.
# Replies are given in lock order. The lateral join looks up each row separately, so that no plan
# compares all rows with all replies.
CONFIRM_REPLIED = f"""/* commits: confirm replied */
WITH {_ASYNC_COMMIT},
locked AS MATERIALIZED (
  SELECT t.logical_task_id
    FROM async_commit, unnest($1::text[], $2::int[], $3::text[]) AS sent(task_id, fence, reply_to),
         LATERAL (SELECT logical_task_id FROM agent_paused_tasks
                   WHERE logical_task_id = sent.task_id AND fence = sent.fence
                     AND coalesce(reply_to, '') = sent.reply_to AND ended_at IS NOT NULL
                     AND NOT reply_sent FOR NO KEY UPDATE SKIP LOCKED) AS t)
UPDATE agent_paused_tasks AS t SET
  reply_sent = (further_reply_to IS NULL),
  wake_at = CASE WHEN further_reply_to IS NULL THEN expires_at ELSE ended_at END,
  reply_attempts = CASE WHEN further_reply_to IS NULL THEN reply_attempts ELSE 1 END,
  reply_to = coalesce(split_part(further_reply_to, chr(10), 1), reply_to),
  further_reply_to =
    nullif(substr(further_reply_to, length(split_part(further_reply_to, chr(10), 1)) + 2), '')
  FROM locked WHERE t.logical_task_id = locked.logical_task_id
"""

# Look up tasks by id, without a lock; ended tasks include their reply. Also returns the time, in a
# row of NULLs if no task exists.
LOOKUP = f"""/* reads: lookup */
SELECT {comma_separated(columns.REPLY, "t.")}, t.request_digest, t.resume_token, clock.now
  FROM (SELECT coalesce($1::double precision,
                        CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS double precision))
               AS now) AS clock
  LEFT JOIN agent_paused_tasks AS t ON t.logical_task_id = ANY($2::text[])
"""
