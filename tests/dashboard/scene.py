"""A mesh of travel agents in the middle of a working day, written by the store itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from pydantic import JsonValue

from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.adapters.sqlite_queue import SqliteBroker
from meshpoint.model.calls import ALL, AT_LEAST, Join
from meshpoint.model.envelopes import encode_reply, encode_request
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId, new_id
from meshpoint.model.messages import Address, Message, MessageType, request_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import Question, QuestionKey
from meshpoint.model.tasks import PlannedCall, Requester, Run, TaskState
from meshpoint.model.timeline import TimelineOptions
from meshpoint.model.transitions import Begin, BeginCommitted, End, JoinCompleted, Pause, Save
from meshpoint.ports.clock import Clock
from meshpoint.testing.conformance.broker import Inbox, a_message, send
from meshpoint.testing.conformance.build import (
    a_call,
    a_checkpoint,
    a_claim,
    a_release,
    a_replica,
    an_end,
    an_operation,
    write_pause,
)

NAMESPACE = "demo"
AGENTS = ("travel", "flights", "hotels", "billing")
REPLICA = ReplicaId("01a21e40-7c1d-7a02-8f10-2f9d53a0c6e1")
"""The replica of `travel` that runs its tasks."""
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
DECISION: JsonValue = {
    "type": "object",
    "title": "Decision",
    "properties": {
        "approved": {"type": "boolean", "title": "Approved"},
        "limit": {
            "type": "number",
            "title": "Limit",
            "description": "Up to this price, in EUR.",
            "default": 900,
        },
        "carrier": {"enum": ["any", "train", "plane"], "title": "Carrier", "default": "any"},
        "remark": {
            "anyOf": [{"type": "string", "maxLength": 400}, {"type": "null"}],
            "title": "Remark",
            "default": None,
        },
    },
    "required": ["approved"],
}


@dataclass(frozen=True, slots=True)
class Scene:
    """The ids of what the scene has."""

    root: TaskId
    child: TaskId
    question: QuestionKey
    failed: TaskId
    operation: TaskId
    parked: TaskId
    hostile: TaskId


def write_config(folder: Path, database: str | None = None, name: str = "mesh") -> Path:
    """Write the configuration of the mesh, with its broker in a file."""
    url = database or f"sqlite:///{folder}/{name}.db"
    agents = "".join(f"  - {{name: {each}, entrypoint: 'mod:{each}'}}\n" for each in AGENTS)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"mesh: {{namespace: {NAMESPACE}, broker_url: 'sqlite:///{folder}/{name}-queues.db',"
        f" database_url: '{url}'}}\nagents:\n{agents}"
    )
    return path


def run_of(agent: str, task_id: TaskId | None = None) -> Run:
    """The first run of a task of `agent`."""
    return Run(task_id or TaskId(new_id()), AgentName(agent), RunId(new_id()))


def request(value: JsonValue) -> bytes:
    """A stored request with an input."""
    body = {"message": {"role": "ROLE_USER", "parts": [{"data": value}]}}
    headers: dict[str, str | int | float] = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    message = Message(
        MessageType.REQUEST, json.dumps(body).encode(), "m-1", "c-1", "shop", headers=headers
    )
    return encode_request(message)


def ask(
    name: str, prompt: str | None, schema: JsonValue, timeout: timedelta | None = None
) -> PlannedCall:
    """A question as a call of a pause."""
    question = Question(name, bool)
    details = {"prompt": prompt, "schema": schema, "allow": ["ada"]}
    return replace(
        a_call(name, timeout=timeout, peer=AgentName(question.peer)),
        body=json.dumps(details).encode(),
        sub_task_id=TaskId(f"{question.peer}.1"),
        headers={},
    )


def call(peer: str, timeout: timedelta = 30 * MINUTE) -> PlannedCall:
    """A call to a peer."""
    return a_call(peer, timeout=timeout, peer=AgentName(peer))


async def wait(
    store: SqlOperatorStore,
    agent: str,
    *calls: PlannedCall,
    parent: TaskId | None = None,
    task_id: TaskId | None = None,
    join: Join = ALL,
    value: JsonValue = None,
) -> Pause:
    """Write a task that waits for calls."""
    pause = Pause(
        run=run_of(agent, task_id),
        context={"flags": {}},
        state=b"state",
        state_format=f"{agent}/1",
        calls=calls,
        join=join,
        requester=Requester(Address("shop.resp"), "shop", parent, None, None),
        request=request(value),
        app_version="2026.11",
        framework="none",
    )
    committed = await write_pause(store, pause)
    await store.confirm_sent(committed.dispatches)
    return pause


async def respond(store: SqlOperatorStore, pause: Pause, *call_ids: str, slots: int = 1) -> Run:
    """Answer calls of a task, by default all, and return its run: the next one after the last."""
    agent = pause.run.agent
    replica = a_replica(REPLICA, agent=agent, formats=[f"{agent}/1"])
    run = pause.run
    for each in pause.calls:
        if call_ids and each.call_id not in call_ids:
            continue
        claim = a_claim(pause, each.call_id, sender=each.peer)
        (result,) = await store.claim([claim], replica, slots)
        if isinstance(result, JoinCompleted):
            run = result.task.run
    return run


async def write_scene(
    store: SqlOperatorStore,
    *,
    with_attack: bool = True,
    advance: Callable[[timedelta], None] = lambda duration: None,
) -> Scene:
    """Write tasks in every state, and a task full of attacks.

    `advance` moves the clock of the store, so that the tasks are of different ages.
    """
    flights, hotels = call("flights"), replace(call("hotels"), call_id="hotels, 2 rooms")
    approval = ask(
        "approval", "Book the flight to Rome for 412 EUR?\nIt leaves at 09:40.", DECISION
    )
    trip: JsonValue = {"city": "Rome", "days": 3, "api_key": "hunter2-key", "travellers": ["Ada"]}
    failures = await _write_failures(store, advance)
    root = await wait(store, "travel", flights, hotels, call("weather"), approval, value=trip)
    advance(3 * MINUTE)
    await respond(store, root, "weather")
    root_id = root.run.task_id
    advance(9 * MINUTE)
    await wait(
        store,
        "flights",
        call("airline-a", 5 * MINUTE),
        call("airline-b", 5 * MINUTE),
        parent=root_id,
        task_id=flights.sub_task_id,
        join=AT_LEAST(1),
        value={"to": "FCO"},
    )
    advance(MINUTE)
    await wait(store, "hotels", call("billing"), parent=root_id, task_id=hotels.sub_task_id)
    advance(MINUTE)
    await _write_questions(store)
    question = QuestionKey(AgentName("travel"), root_id, approval.sub_task_id)
    hostile_id = await _write_attack(store) if with_attack else root_id
    return Scene(root_id, flights.sub_task_id, question, *failures, hostile_id)


async def _write_attack(store: SqlOperatorStore) -> TaskId:
    hostile = "<script>alert(1)</script>"
    pause = await wait(
        store,
        "billing",
        ask("confirm", f"{hostile} </pre>", {"title": hostile}),
        task_id=TaskId(f"{hostile}../../etc/passwd?x=1#y"),
        value={"name": hostile, "password": "swordfish"},
    )
    return pause.run.task_id


async def _write_questions(store: SqlOperatorStore) -> None:
    for number, city in enumerate(("Oslo", "Lyon"), 1):
        question = ask(
            "approval", f"Book the night train to {city}?", {"type": "boolean"}, 2 * HOUR
        )
        await wait(store, "travel", question, value={"city": city, "number": number})
    reviewers: JsonValue = {"type": "array", "items": {"enum": ["legal", "finance", "risk"]}}
    question = ask("reviewers", "Who must review the invoice of 12,400 EUR?", reviewers, 4 * HOUR)
    await wait(store, "billing", question, value={"invoice": 17})


async def _write_failures(
    store: SqlOperatorStore, advance: Callable[[timedelta], None]
) -> tuple[TaskId, TaskId, TaskId]:
    """Write failed and parked tasks and others, and return one failed, revivable and parked."""
    for number, message in enumerate(
        ["peer 'flights': no seat on flight 4711", "peer 'flights': no seat on flight 815"] * 2
        + ["ValueError: api_key=hunter2-key is not valid"]
    ):
        pause = await wait(store, "travel", call("flights"), value={"number": number})
        run = await respond(store, pause)
        outcome = Failed(FailureKind.ERROR, message)
        reply = encode_reply(run.task_id, None, outcome)
        await store.end([an_end(run, TaskState.FAILED, reply=reply)])
        advance(MINUTE)
        failed_id = run.task_id
    operation_id = await _write_failed_operation(store)
    for _ in range(3):
        pause = await wait(store, "travel", call("flights"), call("hotels"))
        run = await respond(store, pause)
        reason = "call 3: expected flights, recorded weather"
        await store.release([a_release(run, parked=reason, version="2026.12")])
        parked_id = run.task_id
    pause = await wait(store, "travel", call("flights"), value={"city": "Bern"})
    run = await respond(store, pause)
    await store.end(
        [End(run, TaskState.COMPLETED, encode_reply(run.task_id, None, Ok("by train")))]
    )
    pause = await wait(store, "travel", call("flights"))
    await respond(store, pause)  # it runs
    return failed_id, operation_id, parked_id


async def _write_failed_operation(store: SqlOperatorStore) -> TaskId:
    """Write an operation that failed at its second subtask, and can be resumed."""
    begin = Begin(
        run_of("travel"),
        a_replica(REPLICA),
        Requester(Address("shop.resp"), "shop", None, None, None),
        request({"ticker": "ACME"}),
        an_operation(),
    )
    (result,) = await store.begin([begin])
    assert isinstance(result, BeginCommitted)
    run = result.run
    await store.save(Save(run, a_checkpoint(run)))
    reason = "the price service does not answer"
    reply = encode_reply(run.task_id, None, Failed(FailureKind.ERROR, reason))
    await store.end([an_end(run, TaskState.FAILED, reply=reply, reason=reason)])
    return run.task_id


async def write_letters(file: Path, reasons: Sequence[str]) -> None:
    """Make a dead letter for each reason."""
    agent = AgentName("travel")
    broker, inbox = SqliteBroker(file, namespace=NAMESPACE), Inbox()
    await broker.open()
    for each in AGENTS:
        await broker.declare(AgentName(each), ReplicaId("r1"))
    address = request_queue(agent)
    body = json.dumps({"city": "Rome", "api_key": "k-123"}).encode()
    await send(broker, address, *[a_message(body) for _ in reasons])
    await broker.consume(address, len(reasons), inbox)
    for reason, delivery in zip(reasons, await inbox.take(len(reasons)), strict=True):
        await delivery.dead_letter(reason)
    await broker.close()


async def open_store(
    url: str, clock: Clock | None = None, timeline: TimelineOptions | None = None
) -> SqlOperatorStore:
    """Open the store of the scene."""
    store = SqlOperatorStore(url, namespace=NAMESPACE, clock=clock, timeline=timeline)
    await store.open()
    return store
