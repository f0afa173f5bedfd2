"""Publishing and acking in the statements of the fast path, where the queues are in the database.

The tables of the queues belong to `adapters.postgres_queue`, which prepares each hand-over. A
statement applies one only to a task that it moves, and only if it finds the broker's lease: its
random number proves that these are the tables that the broker reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshpoint.adapters.sql.array_literals import int_array, split_texts, text_array
from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import TaskId


class QueuedMessage(NamedTuple):
    """A message as its queue stores it."""

    queue: int
    request: str | None
    properties: str
    body: bytes


class HeldMessage(NamedTuple):
    """A delivery to ack: one claim of one message."""

    queue: int
    id: int
    deliveries: int
    holder: int


@dataclass(slots=True, eq=False)
class QueueHandOver(HandOver):
    """A hand-over to tables of queues.

    Attributes:
        lease_id: Of the broker that has prepared it.
        messages: To append to their queues.
        held: To remove from their queues.
    """

    lease_id: int = 0
    messages: Sequence[QueuedMessage] = ()
    held: Sequence[HeldMessage] = ()

    @property
    def size(self) -> int:
        """Approximate bytes that it adds to a statement."""
        return sum(len(each.body) + len(each.properties) for each in self.messages)


def size_of(hand_over: HandOver | None) -> int:
    """Approximate bytes that `hand_over` adds to a statement."""
    return hand_over.size if isinstance(hand_over, QueueHandOver) else 0


FIND_TABLES = """/* reads: queues */
SELECT bool_and(coalesce(has_table_privilege(to_regclass(name), privilege), false)) AS are_writable
  FROM (VALUES ('meshpoint_queue', 'SELECT'), ('meshpoint_queue_holder', 'SELECT'),
               ('meshpoint_queue_message', 'SELECT'), ('meshpoint_queue_message', 'INSERT'),
               ('meshpoint_queue_message', 'DELETE')) AS needed(name, privilege)
"""

FIND_LEASE = """/* reads: lease */
SELECT 1 FROM meshpoint_queue_holder WHERE id = $1::bigint
"""


def has_key(queue: str, message_id: str) -> str:
    """SQL for the condition that the message `m` has this key, from another row.

    The planner can only look up each message by its key. With plain equality, it could also read
    the whole index and join it with the rows. It does so once VACUUM has found no message, which
    is common in short queues, while another session holds a snapshot that keeps millions of dead
    ones.
    """
    return f"m.queue = ANY (ARRAY[{queue}]) AND m.id = {message_id}"


def ack_held(first: int, place: str) -> str:
    """SQL that deletes the messages which the `held_arrays` from `$first` name.

    `place`, a column of a table, has the number of each message.
    """
    return f"""DELETE FROM meshpoint_queue_message AS m
   USING unnest(${first}::text::int[], ${first + 1}::text::int[], ${first + 2}::text::bigint[],
                ${first + 3}::text::int[], ${first + 4}::text::bigint[])
         AS held(number, queue, id, deliveries, holder)
    JOIN {place.partition(".")[0]} ON {place} = held.number
   WHERE {has_key("held.queue", "held.id")} AND m.deliveries = held.deliveries
     AND m.holder = held.holder"""


def hand_over(first: int, *, moved: str, guard: str) -> str:
    """SQL that publishes and acks for the tasks in `moved`, and lists them as `handed_over`.

    Its parameters start at `$first`. `guard` compares the row of a task, `w`, with the text
    `o.expected` that the messages were prepared for.
    """
    offers, messages = (
        [f"${number}" for number in range(begin, begin + 5)] for begin in (first, first + 5)
    )
    return f"""
offered AS MATERIALIZED (
  SELECT o.task_id, o.number, o.messages, o.planned_at
    FROM unnest({split_texts(offers[0])}, {offers[1]}::text::bigint[], {offers[2]}::text::int[],
                {split_texts(offers[3])}, {offers[4]}::double precision[])
         WITH ORDINALITY AS o(task_id, lease_id, messages, expected, planned_at, number)
    JOIN {moved} AS w ON w.logical_task_id = o.task_id
   WHERE {guard}
     AND (SELECT h.id FROM meshpoint_queue_holder AS h WHERE h.id = o.lease_id) IS NOT NULL),
routed AS MATERIALIZED (
  SELECT m.number, m.place
    FROM unnest({messages[0]}::text::int[], {messages[1]}::text::int[])
         WITH ORDINALITY AS m(number, queue, place)
   WHERE (SELECT q.id FROM meshpoint_queue AS q WHERE q.id = m.queue) IS NOT NULL),
handed_over AS MATERIALIZED (
  SELECT o.task_id, o.number, o.planned_at FROM offered AS o
   WHERE o.messages = (SELECT count(*) FROM routed WHERE routed.number = o.number)),
published AS (
  INSERT INTO meshpoint_queue_message (queue, request, properties, body)
  SELECT m.queue, m.request, m.properties, m.body
    FROM unnest({messages[0]}::text::int[], {messages[1]}::text::int[], {messages[2]}::text[],
                {messages[3]}::text[], {messages[4]}::bytea[])
         WITH ORDINALITY AS m(number, queue, request, properties, body, place)
    JOIN handed_over ON handed_over.number = m.number
   ORDER BY m.place),
acked AS (
  {ack_held(first + 10, "handed_over.number")}),"""


class Offer(NamedTuple):
    """A hand-over of one task.

    `expected` is compared with the row of the task. `planned_at` is when the timeouts of its calls
    begin, if any has one.
    """

    task_id: TaskId
    expected: str | None
    planned_at: float | None
    hand_over: QueueHandOver


def hand_over_arrays(offers: Sequence[Offer]) -> list[Any]:
    """The parameters of `hand_over`."""
    messages = [
        (number, message)
        for number, offer in enumerate(offers, 1)
        for message in offer.hand_over.messages
    ]
    held = [
        (number, *message)
        for number, offer in enumerate(offers, 1)
        for message in offer.hand_over.held
    ]
    return [
        text_array([offer.task_id for offer in offers]),
        int_array(offer.hand_over.lease_id for offer in offers),
        int_array(len(offer.hand_over.messages) for offer in offers),
        text_array([offer.expected for offer in offers]),
        [offer.planned_at for offer in offers],
        int_array(number for number, _ in messages),
        int_array(message.queue for _, message in messages),
        [message.request for _, message in messages],
        [message.properties for _, message in messages],
        [message.body for _, message in messages],
        *held_arrays(held),
    ]


def held_arrays(held: Sequence[tuple[int, int, int, int, int]]) -> list[str]:
    """Deliveries to ack as arrays: a number, the queue, the id, the deliveries and the holder."""
    return [int_array(column) for column in zip(*held, strict=True)] if held else ["{}"] * 5


# Ack the claimed messages whose outcomes a claim has recorded.
ACK_RECORDED = f"""
acked AS (
  {ack_held(19, "recorded.place")}
  RETURNING recorded.logical_task_id, recorded.place),"""
