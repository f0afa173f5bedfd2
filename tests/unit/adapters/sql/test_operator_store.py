"""What operators read and record, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from dashboard.scene import ask, call, respond, wait
from meshpoint.adapters.sql import SqlStore, operator_store
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.model.calls import AT_LEAST
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operator_views import DuePosition, QuestionPosition
from meshpoint.model.tasks import NO_DEADLINE, TaskState
from meshpoint.testing.conformance.build import a_release, a_replica

TRAVEL = AgentName("travel")
HOUR = timedelta(hours=1)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database: SQLite and PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlOperatorStore]:
    """An open store."""
    opened = SqlOperatorStore(url, namespace="demo")
    await opened.open()
    yield opened
    await opened.close()


async def roots(store: SqlOperatorStore, limit: int, agent: AgentName | None = None) -> list[str]:
    """All roots, page by page."""
    found: list[str] = []
    after: DuePosition | None = None
    while True:
        page = await store.waiting_roots(agent, after=after, limit=limit)
        found += page.items
        if page.next is None:
            return found
        after = DuePosition(float(page.next[0]), page.next[1])


async def test_roots_are_listed_by_their_deadlines(
    store: SqlOperatorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_store, "_SCANNED", 3)
    late = await wait(store, "travel", call("flights", 3 * HOUR))
    soon = await wait(store, "billing", call("flights", HOUR))
    child = call("hotels", 2 * HOUR)
    middle = await wait(store, "travel", child)
    for number in range(4):  # more children than one page scans
        nested = call("hotels", timedelta(minutes=number + 1))
        parent = await wait(store, "travel", replace(child, call_id=str(number)), nested)
        await wait(store, "hotels", nested, parent=parent.run.task_id, task_id=nested.sub_task_id)
    await wait(store, "hotels", call("x"), parent=middle.run.task_id, task_id=child.sub_task_id)
    for limit in (1, 2, 100):
        found = await roots(store, limit)
        assert len(found) == len(set(found)) == 7
        order = [found.index(each.run.task_id) for each in (soon, middle, late)]
        assert order == sorted(order)
    assert await roots(store, 10, AgentName("billing")) == [soon.run.task_id]


async def test_tasks_without_a_deadline_are_listed_in_the_order_of_their_pauses(
    store: SqlOperatorStore,
) -> None:
    question = ask("approval", "Book it?", {"type": "boolean"})
    first, second, third = (TaskId(f"task-{number}") for number in (3, 1, 2))
    for task_id in (first, second):
        await wait(store, "travel", question, task_id=task_id)
    soon = call("flights", timedelta())
    pause = await wait(store, "travel", question, soon, task_id=third, join=AT_LEAST(1))
    await store.expire(a_replica(agent=TRAVEL), 10, 1)
    tasks = (await store.due_tasks(TaskState.WAITING, limit=10)).items
    assert [each.task.task_id for each in tasks] == [first, second, pause.run.task_id]
    # Distinct places let the index find a page: without them, each page would sort all tasks.
    assert len({each.position.at for each in tasks}) == 3
    assert all(each.task.wake_at >= NO_DEADLINE for each in tasks)


async def test_a_child_whose_parent_has_moved_on_is_a_root(store: SqlOperatorStore) -> None:
    flights = call("flights")
    parent = await wait(store, "travel", flights)
    child = await wait(
        store, "flights", call("x"), parent=parent.run.task_id, task_id=flights.sub_task_id
    )
    assert await roots(store, 10) == [parent.run.task_id]
    await respond(store, parent)
    assert await roots(store, 10) == [child.run.task_id]


async def test_one_tree_has_all_that_a_task_waits_for(store: SqlOperatorStore) -> None:
    flights, hotels = call("flights"), call("hotels")
    root = await wait(store, "travel", flights, hotels, ask("approval", "Yes?", {}))
    await respond(store, root, "hotels")
    airline = call("airline")
    await wait(store, "flights", airline, parent=root.run.task_id, task_id=flights.sub_task_id)
    nodes = await store.trees([root.run.task_id, TaskId("missing")], limit=100)
    assert [(node.depth, node.peer, node.parent_id) for node in nodes] == [
        (0, "", None),
        (1, "flights", root.run.task_id),
        (1, "~?approval", root.run.task_id),
        (2, "airline", flights.sub_task_id),
    ]
    task = nodes[0].task
    assert task is not None
    assert (task.completed, task.expected, task.agent) == (1, 3, TRAVEL)
    assert nodes[1].task is not None
    assert nodes[3].task is None
    assert nodes[2].deadline is None
    assert len(await store.trees([root.run.task_id], limit=2)) == 2
    assert await store.trees([], limit=10) == []


async def test_other_namespaces_are_invisible(store: SqlOperatorStore, url: str) -> None:
    flights = call("flights")
    root = await wait(store, "travel", flights, ask("approval", "Yes?", {}))
    await wait(store, "flights", call("x"), task_id=flights.sub_task_id)
    other = SqlOperatorStore(url, namespace="x")
    await other.open()
    await store.record_action("ada", "cancel", "t", None)
    assert await other.trees([root.run.task_id], limit=10) == []
    assert (await other.open_questions(limit=10)).items == []
    assert (await other.due_tasks(TaskState.WAITING, limit=10)).items == []
    assert (await other.actions(limit=10)).items == []
    assert await other.agents() == []
    await other.close()


async def test_open_questions_are_paged(
    store: SqlOperatorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_store, "_SCANNED", 2)
    expected = []
    for number in range(3):
        asked = ask("approval", str(number), {}, HOUR if number else None)
        pause = await wait(store, "travel", call("flights"), asked)
        expected.append(pause.run.task_id)
    await respond(store, await wait(store, "travel", ask("approval", "x", {})), "approval")
    found, after = [], None
    for _ in range(10):
        page = await store.open_questions(after=after, limit=1)
        found += [each.task_id for each in page.items]
        if page.next is None:
            break
        after = QuestionPosition(str(page.next[0]), page.next[1])
    assert found == sorted(expected)


async def test_tasks_are_listed_in_both_directions(store: SqlOperatorStore) -> None:
    for hours in (3, 1, 2):
        await wait(store, "travel", call("flights", hours * HOUR))
    page = await store.due_tasks(TaskState.WAITING, limit=2)
    dues = [each.position.at for each in page.items]
    assert dues == sorted(dues)
    after = page.items[-1].position
    rest = await store.due_tasks(TaskState.WAITING, TRAVEL, after=after, limit=2)
    assert [each.position > after for each in rest.items] == [True]
    assert rest.next is None
    assert (await store.due_tasks(TaskState.FAILED, limit=2, after=after)).items == []


async def test_agents_are_sampled_by_version(store: SqlOperatorStore) -> None:
    await wait(store, "travel", call("flights"))
    run = await respond(store, await wait(store, "travel", call("flights")))
    await store.release([a_release(run, parked="call 1")])
    samples = await store.sample(TRAVEL)
    assert [(each.state, each.state_format, each.version, each.count) for each in samples] == [
        (TaskState.WAITING, "travel/1", "2026.11", 1),
        (TaskState.PARKED, "travel/1", "2026.11", 1),
    ]
    assert await store.agents() == [TRAVEL]


async def test_an_action_is_recorded_in_two_steps(store: SqlOperatorStore) -> None:
    first = await store.record_action("ada", "cancel", "t-1", {"tasks": ["é"]})
    second = await store.record_action("bob", "drop", "t-2", None)
    begun = await store.action(first)
    assert begun is not None
    assert (begun.actor, begun.action, begun.details) == ("ada", "cancel", {"tasks": ["é"]})
    assert (begun.ended_at, begun.succeeded, begun.result) == (None, None, None)
    await store.complete_action(first, succeeded=True, result="cancelled 1 task")
    await store.complete_action(first, succeeded=False, result="too late")
    done = await store.action(first)
    assert done is not None
    assert done.ended_at is not None
    assert (done.succeeded, done.result) == (True, "cancelled 1 task")
    page = await store.actions(limit=1)
    assert ([each.id for each in page.items], page.next) == ([second], (second, ""))
    assert [each.id for each in (await store.actions(before=second, limit=9)).items] == [first]
    assert [each.id for each in (await store.actions(target="t-1", limit=9)).items] == [first]
    assert await store.action("missing") is None


def test_replicas_do_not_load_what_operators_need() -> None:
    assert not issubclass(SqlStore, SqlOperatorStore)
