"""Each action changes the database, without a replica, and is in the audit."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dashboard import scene as scenes
from dashboard.client import Browser
from dashboard.scene import NAMESPACE, Scene, call, respond, wait
from meshpoint import interventions
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.dashboard import LocalAccess, actions
from meshpoint.dashboard.access import Role
from meshpoint.dashboard.sources import load_sources
from meshpoint.errors import MeshpointError, StoreUnavailable
from meshpoint.model.ids import TaskId
from meshpoint.model.operator_views import OperatorAction
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.tasks import TaskState

MESH = f"/m/{NAMESPACE}"


async def state_of(store: SqlOperatorStore, task_id: TaskId) -> TaskState:
    found = await store.task(task_id)
    assert found is not None
    return found[0].state


async def link_to(browser: Browser, page: str, text: str) -> str:
    """The address of the first link on a page whose text begins like this."""
    shown = (await browser.get(f"{MESH}/{page}")).text
    found = re.search(rf'href="([^"]+)">{text}', shown)
    assert found, f"{page} has no link {text!r}"
    return unescape(found[1])


async def last_action(store: SqlOperatorStore) -> OperatorAction:
    return (await store.actions(limit=1)).items[0]


async def test_a_tree_is_cancelled_from_its_root(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    page = await browser.get(f"{MESH}/do/cancel", id=scene.root)
    assert "This task and the 2 tasks that it waits for" in page.text
    done = await browser.submit(f"{MESH}/do/cancel", {"choice": "tree"}, id=scene.root)
    assert done.status_code == 303
    assert await state_of(store, scene.root) is TaskState.CANCELLED
    assert await state_of(store, scene.child) is TaskState.CANCELLED
    action = await last_action(store)
    assert (action.actor, action.action, action.target) == ("ada", "cancel", scene.root)
    assert action.succeeded
    assert action.result == "cancelled 3 tasks"
    shown = await browser.get(done.headers["location"])
    assert "cancelled 3 tasks" in shown.text
    again = await browser.submit(f"{MESH}/do/cancel", id=scene.root)
    assert again.status_code == 409
    assert "has already ended as cancelled" in again.text


async def test_one_task_is_cancelled_without_those_it_waits_for(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    await browser.submit(f"{MESH}/do/cancel", {"choice": "one"}, id=scene.root)
    assert await state_of(store, scene.root) is TaskState.CANCELLED
    assert await state_of(store, scene.child) is TaskState.WAITING


async def test_a_cancel_that_comes_too_late_says_so(
    config: Path, scene: Scene, store: SqlOperatorStore
) -> None:
    """Two operators confirm at the same time."""
    (source,) = load_sources([config])
    plans = [await actions.plan(source, "cancel", {"id": scene.child}) for _ in range(2)]
    await actions.perform(source, plans[0], "ada")
    with pytest.raises(MeshpointError, match="nothing is left to cancel"):
        await actions.perform(source, plans[1], "bob")
    latest, first = (await store.actions(limit=2)).items
    assert (first.succeeded, latest.succeeded) == (True, False)
    await source.close()


async def test_an_answer_that_no_text_can_hold_is_refused(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    fields = {"mode": "json", "json": '{"approved": true, "remark": "\\ud800"}'}
    refused = await browser.submit(f"{MESH}/question", fields, id=scene.question.to_id())
    assert refused.status_code == 409
    assert "the answer is not JSON" in refused.text
    assert (await store.actions(limit=1)).items == []


async def test_a_task_is_suspended_and_continued(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    await browser.submit(f"{MESH}/do/suspend", id=scene.root)
    found = await store.task(scene.root)
    assert found is not None
    assert found[0].suspended_at is not None
    page = await browser.get(f"{MESH}/task", id=scene.root)
    assert "A person has suspended it." in page.text
    await browser.submit(f"{MESH}/do/resume", id=scene.root)
    assert (await last_action(store)).result == "continued"


async def test_a_failed_operation_begins_a_new_attempt(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    await browser.submit(f"{MESH}/do/resume", {"choice": "start"}, id=scene.operation)
    assert await state_of(store, scene.operation) is TaskState.READY
    action = await last_action(store)
    assert action.result == "ready for attempt 2"
    assert action.details == {"choice": "start", "of": None}


async def test_a_refused_action_is_recorded_as_failed(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    refused = await browser.submit(f"{MESH}/do/resume", id=scene.failed)
    assert refused.status_code == 409
    action = await last_action(store)
    assert (action.action, action.target, action.succeeded) == ("resume", scene.failed, False)
    assert action.result
    assert action.result in refused.text
    assert action.result in (await browser.get(f"{MESH}/audit")).text


async def test_all_tasks_that_were_parked_for_one_reason_are_offered_again(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    link = await link_to(browser, "failures", "Offer again 3")
    assert "Resume 3 parked tasks" in (await browser.get(link)).text
    await browser.submit(link)
    assert await state_of(store, scene.parked) is TaskState.READY
    action = await last_action(store)
    assert action.target == "travel"
    assert isinstance(action.details, dict)
    assert action.details["reason"] == "call 3: expected flights, recorded weather"
    assert action.result == "offered 3 tasks again"
    assert (await browser.get(link)).status_code == 404


async def test_failed_tasks_of_one_reason_are_resumed_together(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    resume_one = await link_to(browser, "failures", "Resume 1")  # its reply has no reason
    others = await link_to(browser, "failures", "Resume 4")
    await browser.submit(resume_one)
    assert await state_of(store, scene.operation) is TaskState.READY
    assert (await last_action(store)).result == "resumed 1 task"
    await browser.submit(others)
    result = (await last_action(store)).result
    assert result == "resumed 0 tasks; left as they are: 4 without a checkpoint"


async def test_dead_letters_are_replayed_and_dropped(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    await browser.submit(await link_to(browser, "letters", "Replay"))
    assert (await last_action(store)).result == "replayed 2 letters"
    await browser.submit(f"{MESH}/do/drop", id="travel:3")
    action = await last_action(store)
    assert (action.action, action.target) == ("drop", "travel:3")
    assert action.result == "dropped 1 letter"
    assert "No dead letter." in (await browser.get(f"{MESH}/letters")).text
    gone = await browser.submit(f"{MESH}/do/drop", id="travel:3")
    assert gone.status_code == 404


async def test_an_action_on_a_group_leaves_similar_letters_alone(
    browser: Browser, scene: Scene, store: SqlOperatorStore, config: Path
) -> None:
    file = config.parent / "mesh-queues.db"
    await scenes.write_letters(file, ["it is not JSON, token=hunter2-key"])
    with closing(sqlite3.connect(file)) as db:
        db.execute("UPDATE meshpoint_queue_content SET app_id = X'ff' WHERE id = 2")
        db.commit()
    link = await link_to(browser, "letters", "Drop")
    await browser.submit(link)
    assert (await last_action(store)).result == "dropped 1 letter"
    shown = (await browser.get(f"{MESH}/letters")).text
    assert shown.count('class="number">1<') == 3
    assert "hunter" not in shown, "neither on the page nor in an address"


async def test_a_question_is_answered_with_its_form(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    question = scene.question.to_id()
    page = await browser.get(f"{MESH}/question", id=question)
    for part in ('type="radio" name="answer.approved"', 'value="900"', "It leaves at 09:40."):
        assert part in page.text
    unfit = await browser.submit(f"{MESH}/question", {"mode": "form"}, id=question)
    assert unfit.status_code == 409
    assert "Approved: give a value" in unfit.text
    answer = {
        "mode": "form",
        "answer.approved": "true",
        "answer.limit": "450.5",
        "answer.carrier": '"train"',
        "answer.remark": "<b>window\r\nseat</b>",
    }
    done = await browser.submit(f"{MESH}/question", answer, id=question)
    assert done.status_code == 303
    (asked,) = await store.find_questions([scene.question])
    assert asked is not None
    assert isinstance(asked.outcome, Ok)
    assert asked.outcome.value == {
        "approved": True,
        "limit": 450.5,
        "carrier": "train",
        "remark": "<b>window\nseat</b>",
    }
    assert "by 'ada'" in asked.describe()
    again = await browser.submit(f"{MESH}/question", answer, id=question)
    assert again.status_code == 409
    assert "was answered at" in again.text
    assert (await last_action(store)).action == "answer"


async def test_a_question_is_rejected_or_answered_as_json(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    question = scene.question.to_id()
    unfit = await browser.submit(f"{MESH}/question", {"mode": "json", "json": "{"}, id=question)
    assert "the answer is not JSON" in unfit.text
    unfit = await browser.submit(
        f"{MESH}/question", {"mode": "json", "json": '{"approved": 7}'}, id=question
    )
    assert "should be a boolean" in unfit.text
    await browser.submit(f"{MESH}/question", {"mode": "reject", "reason": "too dear"}, id=question)
    (asked,) = await store.find_questions([scene.question])
    assert asked is not None
    assert isinstance(asked.outcome, Failed)
    assert asked.outcome.message == "rejected by 'ada': too dear"


async def test_secrets_in_an_answer_are_not_in_the_audit(
    browser: Browser, scene: Scene, store: SqlOperatorStore
) -> None:
    answer = json.dumps({"approved": True, "password": "swordfish"})
    await browser.submit(
        f"{MESH}/question", {"mode": "json", "json": answer}, id=scene.question.to_id()
    )
    assert "swordfish" not in json.dumps((await last_action(store)).details)


async def test_nothing_is_done_that_cannot_be_recorded(
    browser: Browser, scene: Scene, store: SqlOperatorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: Any) -> str:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(SqlOperatorStore, "record_action", fail)
    page = await browser.submit(f"{MESH}/do/suspend", id=scene.root)
    assert page.status_code == 503
    found = await store.task(scene.root)
    assert found is not None
    assert found[0].suspended_at is None


async def test_an_action_is_recorded_before_it_begins(
    browser: Browser, scene: Scene, store: SqlOperatorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[OperatorAction] = []

    async def crash(*arguments: object) -> str:
        seen.append(await last_action(store))
        raise RuntimeError("token=hunter2-key")

    monkeypatch.setattr(interventions, "cancel_all", crash)
    with pytest.raises(RuntimeError):
        await browser.submit(f"{MESH}/do/cancel", id=scene.root)
    assert (seen[0].action, seen[0].ended_at, seen[0].succeeded) == ("cancel", None, None)
    action = await last_action(store)
    assert (action.succeeded, action.result) == (False, "RuntimeError: token=***")


async def test_actions_are_offered_only_to_operators(
    make_browser: Any, scene: Scene, store: SqlOperatorStore
) -> None:
    viewer = make_browser(LocalAccess("bob", Role.VIEW))
    for path in ("failures", "letters", "questions", f"task?id={scene.root}"):
        assert "/do/" not in (await viewer.get(f"{MESH}/{path}")).text
    page = await viewer.get(f"{MESH}/do/cancel", id=scene.root)
    assert "You may only view." in page.text
    assert '<button class="danger"' not in page.text


async def test_a_task_that_moves_on_meanwhile_shows_its_progress(
    browser: Browser, store: SqlOperatorStore, scene: Scene
) -> None:
    pause = await wait(store, "travel", call("flights"), call("hotels"))
    await respond(store, pause, "hotels")
    page = await browser.get(f"{MESH}/task", id=pause.run.task_id)
    assert "1 of 2" in page.text
