"""A scene with a past for the pictures: replicas, a task's timeline, and actions in the audit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pydantic import JsonValue

from dashboard.scene import HOUR, MINUTE, REPLICA, Scene, ask, call, open_store, wait, write_scene
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Ok
from meshpoint.model.replicas import Registration
from meshpoint.model.tasks import Replica, Resumable, TaskState
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import End, JoinCompleted, Pause
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import LEASE, a_claim, a_replica

ACTIONS = 5
"""Actions in the audit of a day."""
LOST, DRAINING, FLIGHTS = (
    ReplicaId(f"01a21e40-9a02-7b43-9c02-6d1f{end}") for end in ("0e8ab7c4", "77a3d219", "c1905fe6")
)
_SECOND = timedelta(seconds=1)
_SCENE = 21 * MINUTE
"""How long ago the scene begins: 19 minutes, and then the actions."""


def _registration(
    replica: ReplicaId, agent: str, host: str, version: str, *, is_draining: bool = False
) -> Registration:
    """A replica that stays registered while the pictures are taken, unless it is the lost one."""
    valid_for = 30 * _SECOND if replica == LOST else HOUR
    formats = frozenset({f"{agent}/1"})
    return Registration(
        replica,
        AgentName(agent),
        "0.1.0",
        version,
        formats,
        16,
        host,
        valid_for,
        is_draining,
        pid=1,
    )


_LOST = _registration(LOST, "travel", "node-1", "2026.11")
_LIVE = (
    _registration(REPLICA, "travel", "node-3", "2026.11"),
    _registration(DRAINING, "travel", "node-2", "2026.10", is_draining=True),
    _registration(FLIGHTS, "flights", "node-2", "2026.11"),
)


@dataclass(frozen=True, slots=True)
class Day:
    """A scene, and the id of a task that was rescued."""

    scene: Scene
    rescued: TaskId


async def write_day(url: str, now: datetime) -> Day:
    """Write a scene that is a few hours old."""
    clock = FakeClock(now - 3 * HOUR)
    store = await open_store(url, clock, TimelineOptions(REPLICA))
    for each in (*_LIVE, _LOST):
        await store.register(each)
    clock.advance(2 * HOUR + 5 * MINUTE)
    await store.register(_LOST)
    rescued = await _write_rescue(
        store, await open_store(url, clock, TimelineOptions(LOST)), clock
    )
    clock.advance(now - clock.now() - _SCENE)
    scene = await write_scene(store, with_attack=False, advance=clock.advance)
    clock.advance(now - clock.now() - 2 * MINUTE)
    await _write_actions(store, clock, scene)
    clock.advance(now - clock.now())
    for each in _LIVE:
        await store.register(each)
    await store.close()
    return Day(scene, rescued)


async def _write_rescue(
    store: SqlOperatorStore, other: SqlOperatorStore, clock: FakeClock
) -> TaskId:
    """Write a task whose replica, which uses `other`, is lost, and which another one completes."""
    lost = a_replica(LOST, agent=AgentName("travel"), formats=["travel/1"], version="2026.11")
    here = a_replica(REPLICA, agent=AgentName("travel"), formats=["travel/1"], version="2026.11")
    trip: JsonValue = {"city": "Vienna", "days": 2}
    pause = await wait(store, "travel", call("flights"), call("hotels"), value=trip)
    clock.advance(3.2 * _SECOND)
    await _answer(store, pause, "flights", here)
    clock.advance(8.6 * _SECOND)
    await _answer(other, pause, "hotels", lost)
    await other.close()
    clock.advance(LEASE + 2 * _SECOND)
    (task,) = await store.rescue(here, 10, 10)
    clock.advance(0.4 * _SECOND)
    question = ask("approval", "Book the trip to Vienna?", {"type": "boolean"}, 2 * HOUR)
    pause = replace(pause, run=task.run, calls=(question,), request=None)
    await store.pause([pause])
    clock.advance(17 * MINUTE)
    resumed = await _answer(store, pause, "approval", here)
    assert resumed is not None
    clock.advance(1.3 * _SECOND)
    run = resumed.run
    await store.end([End(run, TaskState.COMPLETED, _reply(run.task_id))])
    return run.task_id


async def _answer(
    store: SqlOperatorStore, pause: Pause, call_id: str, replica: Replica
) -> Resumable | None:
    """Answer a call, and return the task if that completes the join."""
    peer = next(each.peer for each in pause.calls if each.call_id == call_id)
    (result,) = await store.claim([a_claim(pause, call_id, sender=peer)], replica, 1)
    return result.task if isinstance(result, JoinCompleted) else None


def _reply(task_id: TaskId) -> bytes:
    return encode_reply(task_id, None, Ok({"booked": True, "price": 318.5}))


async def _write_actions(store: SqlOperatorStore, clock: FakeClock, scene: Scene) -> None:
    """Write actions of two people: done, failed and not finished."""
    later = "call 3: expected flights, recorded weather"
    for actor, action, target, reason, succeeded, result in (
        ("bob", "suspend", scene.root, None, True, "suspended"),
        ("ada", "resume", scene.root, None, True, "continued"),
        ("ada", "resume-parked", "travel", later, True, "offered 12 tasks again"),
        ("bob", "replay", "flights", "delivery limit", False, "the broker does not answer"),
        ("ada", "cancel", scene.child, None, None, ""),
    ):
        details: JsonValue = None if reason is None else {"reason": reason}
        action_id = await store.record_action(actor, action, target, details)
        clock.advance(0.2 * _SECOND)
        if succeeded is not None:
            await store.complete_action(action_id, succeeded=succeeded, result=result)
        clock.advance(19 * _SECOND)
