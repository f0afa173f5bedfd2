"""All statements on queues, messages, and holders of unacked messages.

Each is one transaction. A holder is an open broker; only the holder of a message settles it, and
only with the delivery count of its claim, so that a late settlement finds nothing to change.
"""

from __future__ import annotations

from meshpoint.adapters.sql.hand_over import ack_held, has_key

UNREADABLE_HOLDER = 0
"""Holder of dead letters that consumers cannot read, and operators read with SQL.

No broker has this id.
"""

TABLES = [
    f"meshpoint_queue{ending}" for ending in ("", "_message", "_holder", "_topic", "_marker")
]
FIND_TABLES = """
SELECT to_regclass('meshpoint_queue_marker') IS NOT NULL AS exist,
       EXISTS (SELECT FROM pg_attribute
                WHERE attrelid = to_regclass('meshpoint_queue_message')
                  AND attname = 'dead_from' AND NOT attisdropped) AS are_current,
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)
       AND coalesce(pg_has_role((SELECT relowner FROM pg_class
                                  WHERE oid = to_regclass('meshpoint_queue_message')), 'USAGE'),
                    true) AS may_create"""
"""Whether the tables exist, judged by the last one; whether they have the last column of this
release; and whether the login may create or change them."""

FIND_MISSING_RIGHTS = """
SELECT name, privilege
  FROM unnest($1::text[]) AS given(name),
       unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS needed(privilege)
 WHERE NOT has_table_privilege(name, privilege)"""

REGISTER_HOLDER = """
INSERT INTO meshpoint_queue_holder (id, until) OVERRIDING SYSTEM VALUE
VALUES ($1, clock_timestamp() + $2) ON CONFLICT (id) DO UPDATE SET until = excluded.until"""
"""The id is random. If the answer is lost, the statement is repeated with the same one."""

HEARTBEAT = """
UPDATE meshpoint_queue_holder SET until = clock_timestamp() + $2
 WHERE id = $1 AND until > clock_timestamp() RETURNING id"""
"""Extends the lease. A lapsed one is not extended: others may have requeued its messages."""

DECLARE = """
INSERT INTO meshpoint_queue (name, agent, dead_letters, is_private)
SELECT name, $2, $3, false FROM unnest($1::text[]) WITH ORDINALITY AS given(name, place)
 WHERE NOT EXISTS (SELECT FROM meshpoint_queue q WHERE q.name = given.name)
 ORDER BY name ON CONFLICT DO NOTHING"""

DECLARE_PRIVATE = """
INSERT INTO meshpoint_queue (name, agent, dead_letters, is_private, holder)
VALUES ($1, $2, $3, true, $4)
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, left_at = NULL"""

SUBSCRIBE = """
INSERT INTO meshpoint_queue_topic (topic, queue)
SELECT topic, q.id FROM unnest($2::text[]) AS given(topic), meshpoint_queue q WHERE q.name = $1
 ORDER BY topic ON CONFLICT DO NOTHING"""

FIND_QUEUES = """
SELECT name, id, is_private FROM meshpoint_queue WHERE name = ANY($1::text[])"""

FIND_REPLICAS = """
SELECT name FROM meshpoint_queue WHERE agent = $1 AND is_private"""

FIND_SUBSCRIBED = """
SELECT q.name FROM meshpoint_queue_topic t JOIN meshpoint_queue q ON q.id = t.queue
 WHERE t.topic = $1"""

COUNT_READY = """
SELECT w.queue AS id, counted.messages, counted.first_id
  FROM unnest($1::integer[], $2::bigint[], $3::integer[]) AS w(queue, low, most)
 CROSS JOIN LATERAL (SELECT count(*) AS messages, min(ready.id) AS first_id FROM (
    SELECT m.id FROM meshpoint_queue_message m
     WHERE m.queue = w.queue AND m.id > w.low AND m.holder IS NULL
     ORDER BY m.queue, m.id LIMIT w.most) ready) counted"""

DEPTH = """
SELECT (SELECT count(*) FROM (
    SELECT FROM meshpoint_queue_message m
     WHERE m.queue = q.id AND (m.holder IS NULL OR m.holder = 0)
     LIMIT 1000000) waiting) AS messages
  FROM meshpoint_queue q WHERE q.name = $1"""
"""Counts the messages of a queue that no consumer holds, up to a limit."""

PUBLISH = """
INSERT INTO meshpoint_queue_message (queue, request, properties, body)
SELECT q.id, request, properties, body
  FROM unnest($1::text::integer[], $2::text[], $3::text[], $4::bytea[])
       WITH ORDINALITY AS given(queue, request, properties, body, place)
  JOIN meshpoint_queue q ON q.id = given.queue
 ORDER BY place
RETURNING queue"""
"""Appends messages in the order given. A queue deleted in the meantime gets none."""

PUBLISH_ACKING = f"""
WITH given AS MATERIALIZED (
    SELECT q.id AS queue, request, properties, body, place
      FROM unnest($1::text::integer[], $2::text[], $3::text[], $4::bytea[])
           WITH ORDINALITY AS given(queue, request, properties, body, place)
      JOIN meshpoint_queue q ON q.id = given.queue),
published AS (
    INSERT INTO meshpoint_queue_message (queue, request, properties, body)
    SELECT queue, request, properties, body FROM given ORDER BY place),
acked AS (
  {ack_held(5, "given.place")})
SELECT DISTINCT queue FROM given"""
"""Does the same, and acks claims with the messages at their places."""

CLAIM = f"""
WITH wanted AS MATERIALIZED (
    SELECT queue, low, room
      FROM unnest($2::integer[], $3::bigint[], $4::integer[]) AS given(queue, low, room)
     WHERE EXISTS (SELECT FROM meshpoint_queue_holder
                    WHERE id = $1 AND until > clock_timestamp())),
got AS MATERIALIZED (
    SELECT ready.queue, ready.id FROM wanted CROSS JOIN LATERAL (
        SELECT m.queue, m.id FROM meshpoint_queue_message m
         WHERE m.queue = wanted.queue AND m.id > wanted.low AND m.holder IS NULL
         ORDER BY m.queue, m.id LIMIT wanted.room FOR UPDATE SKIP LOCKED) ready)
UPDATE meshpoint_queue_message m
   SET holder = $1, deliveries = least(greatest(deliveries, 0), 2147483646) + 1
  FROM got WHERE {has_key("got.queue", "got.id")}
RETURNING m.queue, m.id, m.deliveries, left(m.dead_reason, 10000) AS dead_reason,
          CASE WHEN octet_length(m.properties) <= $6 THEN m.properties END AS properties,
          octet_length(m.body) AS body_size,
          CASE WHEN octet_length(m.body) <= $5 THEN m.body END AS body"""
"""Claims messages, oldest first. The bodies of large messages are read one by one.

Other programs may write any row, so no value may fail the statement or fill the memory.
"""

READ_BODY = """
SELECT body FROM meshpoint_queue_message
 WHERE queue = $1 AND id = $2 AND holder = $3 AND deliveries = $4"""

_SETTLED = f"""
unnest($2::text::integer[], $3::text::bigint[], $4::text::integer[])
     AS given(queue, id, deliveries)
 WHERE {has_key("given.queue", "given.id")} AND m.deliveries = given.deliveries
   AND m.holder = $1"""

ACK = f"DELETE FROM meshpoint_queue_message m USING {_SETTLED} RETURNING m.id, m.deliveries"

REQUEUE = f"""
WITH settled AS MATERIALIZED (
    SELECT m.queue, m.id FROM meshpoint_queue_message m, {_SETTLED} FOR UPDATE OF m)
UPDATE meshpoint_queue_message m SET holder = NULL FROM settled
 WHERE {has_key("settled.queue", "settled.id")}
RETURNING m.id, m.deliveries"""

DEAD_LETTER = f"""
UPDATE meshpoint_queue_message m
   SET queue = coalesce(dead.id, m.queue), holder = $6, deliveries = 0, request = NULL,
       id = DEFAULT,
       dead_reason = coalesce(given.reason, m.dead_reason, 'delivery limit'),
       dead_from = CASE WHEN q.name = q.dead_letters THEN m.dead_from ELSE q.name END
  FROM unnest($2::text::integer[], $3::text::bigint[], $4::text::integer[], $5::text[])
       AS given(queue, id, deliveries, reason)
  JOIN meshpoint_queue q ON q.id = given.queue
  LEFT JOIN meshpoint_queue dead ON dead.name = q.dead_letters
 WHERE {has_key("given.queue", "given.id")} AND m.deliveries = given.deliveries
   AND m.holder = $1
RETURNING given.id, given.deliveries"""
"""Appends messages to the dead letters of their agents. $6 holds those that nobody can read."""

FREE = f"""
WITH gone AS MATERIALIZED (
    SELECT m.queue, m.id, m.deliveries >= $1 AS is_dead FROM meshpoint_queue_message m
     WHERE m.holder <> 0
       AND NOT EXISTS (SELECT FROM meshpoint_queue_holder h WHERE h.id = m.holder)
     LIMIT 10000 FOR UPDATE SKIP LOCKED),
moved AS (
    UPDATE meshpoint_queue_message m
       SET queue = coalesce(dead.id, m.queue), holder = NULL, deliveries = 0, request = NULL,
           id = DEFAULT,
           dead_reason = coalesce(m.dead_reason, 'delivery limit'),
           dead_from = CASE WHEN q.name = q.dead_letters THEN m.dead_from ELSE q.name END
      FROM gone
      JOIN meshpoint_queue q ON q.id = gone.queue
      LEFT JOIN meshpoint_queue dead ON dead.name = q.dead_letters
     WHERE gone.is_dead AND {has_key("gone.queue", "gone.id")}
    RETURNING m.queue)
UPDATE meshpoint_queue_message m SET holder = NULL FROM gone
 WHERE NOT gone.is_dead AND {has_key("gone.queue", "gone.id")}
RETURNING m.queue"""
"""Requeues messages whose holder does not exist, or moves them at the delivery limit."""

RELEASE_UNKNOWN = """
UPDATE meshpoint_queue_message SET holder = NULL
 WHERE holder = $1 AND id <> ALL ($2::bigint[])"""
"""Requeues what this process holds and does not know."""

REMOVE_HOLDER = """
WITH removed AS (DELETE FROM meshpoint_queue_holder WHERE id = $1 RETURNING id)
UPDATE meshpoint_queue q SET left_at = clock_timestamp() FROM removed
 WHERE q.holder = removed.id AND q.is_private"""

REMOVE_LAPSED_HOLDERS = """
WITH removed AS (
    DELETE FROM meshpoint_queue_holder WHERE until < clock_timestamp() RETURNING id),
abandoned AS (
    UPDATE meshpoint_queue q SET left_at = clock_timestamp() FROM removed
     WHERE q.holder = removed.id AND q.is_private)
SELECT count(*) AS holders FROM removed"""

DROP_UNUSED_QUEUES = """
WITH dropped AS (
    DELETE FROM meshpoint_queue WHERE left_at < clock_timestamp() - $1::interval RETURNING id)
DELETE FROM meshpoint_queue_message WHERE queue = ANY (ARRAY (SELECT id FROM dropped))"""
"""An array, because the planner may join all messages with the few queues dropped."""

TRIM_DEAD_LETTERS = """
WITH dropped AS (
    DELETE FROM meshpoint_queue_message
     WHERE queue = $1 AND holder IS NULL AND id <= (
        SELECT m.id FROM meshpoint_queue_message m
         WHERE m.queue = $1 AND m.holder IS NULL
         ORDER BY m.queue DESC, m.id DESC OFFSET $2 LIMIT 1)
    RETURNING id)
SELECT count(*) AS messages FROM dropped"""
"""Keeps the newest $2 letters."""

FIND_DEAD_LETTERS = """
SELECT id, name FROM meshpoint_queue WHERE name = dead_letters AND starts_with(name, $1)"""

READ_DEAD_LETTERS = """
SELECT id, deliveries, left(dead_reason, 10000) AS dead_reason,
       left(dead_from, 1000) AS dead_from, octet_length(body) AS body_size,
       CASE WHEN octet_length(properties) <= $4 THEN properties END AS properties
  FROM meshpoint_queue_message m
 WHERE m.queue = $1 AND m.id > $2 AND m.id <= $3 AND (m.holder IS NULL OR m.holder = 0)
 ORDER BY m.queue, m.id LIMIT $5"""

LAST_DEAD_LETTER = """
SELECT coalesce(max(id), 0) AS id FROM meshpoint_queue_message WHERE queue = $1"""

READ_DEAD_BODY = """
SELECT body FROM meshpoint_queue_message m JOIN meshpoint_queue q ON q.id = m.queue
 WHERE q.name = $1 AND m.id = $2 AND octet_length(body) <= $3"""

REPLAY_DEAD_LETTERS = f"""
WITH named AS MATERIALIZED (
    SELECT dead.id AS queue, given.id, given.request, target.id AS target
      FROM unnest($2::bigint[], $3::text[], $4::text[]) AS given(id, target, request),
           meshpoint_queue dead, meshpoint_queue target
     WHERE dead.name = $1 AND target.name = given.target)
UPDATE meshpoint_queue_message m
   SET queue = named.target, id = DEFAULT, holder = NULL, deliveries = 0, request = named.request,
       dead_reason = NULL, dead_from = NULL, body = coalesce($5::bytea, m.body)
  FROM named
 WHERE {has_key("named.queue", "named.id")} AND (m.holder IS NULL OR m.holder = 0)
RETURNING named.id, named.target AS queue"""
"""Appends dead letters to the queues given. Of several commands, one finds each."""

DROP_DEAD_LETTERS = f"""
WITH named AS MATERIALIZED (
    SELECT dead.id AS queue, given.id
      FROM meshpoint_queue dead, unnest($2::bigint[]) AS given(id) WHERE dead.name = $1)
DELETE FROM meshpoint_queue_message m USING named
 WHERE {has_key("named.queue", "named.id")} AND (m.holder IS NULL OR m.holder = 0)
RETURNING m.id"""

DELETE_QUEUES = """
WITH dropped AS (DELETE FROM meshpoint_queue WHERE agent = ANY ($1::text[]) RETURNING id),
unmarked AS (DELETE FROM meshpoint_queue_marker WHERE name = ANY ($1::text[]))
DELETE FROM meshpoint_queue_message WHERE queue = ANY (ARRAY (SELECT id FROM dropped))"""

HAS_REQUEST = """
SELECT 1 FROM meshpoint_queue_message m JOIN meshpoint_queue q ON q.id = m.queue
 WHERE m.request = $1 AND q.agent = $2 AND NOT q.is_private AND q.name <> q.dead_letters LIMIT 1"""

SET_MARKER = "INSERT INTO meshpoint_queue_marker VALUES ($1) ON CONFLICT DO NOTHING RETURNING name"
HAS_MARKER = "SELECT 1 FROM meshpoint_queue_marker WHERE name = $1"
REMOVE_MARKER = "DELETE FROM meshpoint_queue_marker WHERE name = $1"

NOTIFY = "SELECT pg_notify($1, $2)"

VACUUM = "VACUUM (TRUNCATE false, SKIP_LOCKED) meshpoint_queue_message"

FIND_OLD_SNAPSHOT = """
SELECT pid, extract(epoch FROM clock_timestamp() - xact_start)::integer AS seconds
  FROM pg_stat_activity
 WHERE backend_xmin IS NOT NULL AND backend_type = 'client backend'
   AND datname = current_database() AND xact_start < clock_timestamp() - $1::interval
 ORDER BY xact_start LIMIT 1"""
"""The oldest session that keeps dead rows from being removed. Needs the right to see sessions."""
