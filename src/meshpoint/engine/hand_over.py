"""Prepare what a store publishes and acks in the commit of a transition.

Where the broker's queues are in the store's database, a transition's messages are published and
the messages that caused it are acked in the same statement. Otherwise, and whenever anything is
out of the ordinary, nothing is prepared, and `Settlement` publishes and acks after the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment
from meshpoint.errors import Unavailable
from meshpoint.model.envelopes import Envelope, reply_envelope, request_envelope
from meshpoint.model.hand_over import HandOver
from meshpoint.model.tasks import NO_DEADLINE, Dispatch, PlannedCall, Reply
from meshpoint.model.transitions import Pause
from meshpoint.model.waits import is_wait
from meshpoint.ports.broker import Broker, Delivery
from meshpoint.ports.hand_over import HandOverBroker, HandOverStore
from meshpoint.ports.task_store import CheckpointStore


async def find_hand_over(broker: Broker, store: CheckpointStore) -> HandOverBroker | None:
    """`broker`, if `store` can publish and ack in its commits. Both are open.

    Raises:
        StoreUnavailable: The database did not respond.
    """
    if not (isinstance(broker, HandOverBroker) and isinstance(store, HandOverStore)):
        return None
    lease_id = broker.lease_id
    return broker if lease_id is not None and await store.finds_lease(lease_id) else None


async def prepare_pause(
    pause: Pause, segment: Segment, backend: Backend, runtime: ReplicaRuntime
) -> Pause:
    """Add the requests of a pause and the acks of its task's requests."""
    if runtime.hand_over_broker is None or not backend.is_shared or segment.unrecorded:
        return pause
    if pause.checkpoint or not all(map(_is_plain, pause.calls)):
        return pause
    now = None
    if any(call.timeout is not None for call in pause.calls):
        now = backend.store.current_time
        if now is None:
            return pause
    margin = runtime.options.deadline_margin
    envelopes = [
        request_envelope(_dispatch(pause, call, now), backend.reply_to, margin)
        for call in pause.calls
    ]
    hand_over = await _prepare(runtime, envelopes, segment.deliveries)
    return pause if hand_over is None else replace(pause, hand_over=hand_over, planned_at=now)


def _is_plain(call: PlannedCall) -> bool:
    """Whether a call is sent once, at the pause."""
    return call.outcome is None and call.retry is None and not is_wait(call.peer)


def _dispatch(pause: Pause, call: PlannedCall, now: datetime | None) -> Dispatch:
    """The request of a call whose timeout begins at `now`."""
    deadline = pause.requester.deadline or NO_DEADLINE
    if call.timeout is not None and now is not None and call.timeout < NO_DEADLINE - now:
        deadline = min(deadline, now + call.timeout)
    return pause.dispatch(call, deadline)


async def prepare_end(
    reply: Reply, segment: Segment, backend: Backend, runtime: ReplicaRuntime
) -> HandOver | None:
    """Prepare the reply of a task with a row and the acks of its requests."""
    if runtime.hand_over_broker is None or not backend.is_shared:
        return None
    envelope = reply_envelope(replace(reply, fence=segment.run.fence))
    return None if envelope is None else await _prepare(runtime, [envelope], segment.deliveries)


async def prepare_ack(
    delivery: Delivery, backend: Backend, runtime: ReplicaRuntime
) -> HandOver | None:
    """Prepare the ack of a response."""
    if runtime.hand_over_broker is None or not backend.is_shared:
        return None
    return await _prepare(runtime, (), [delivery])


async def _prepare(
    runtime: ReplicaRuntime, envelopes: Sequence[Envelope], deliveries: Sequence[Delivery]
) -> HandOver | None:
    broker = runtime.hand_over_broker
    if broker is not None:
        with suppress(Unavailable):  # publishing after the commit reports it
            return await broker.prepare_hand_over(envelopes, tuple(deliveries))
    return None
