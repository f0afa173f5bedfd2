"""`tasks complete`, and questions in `tasks show` and `tasks list`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from command_result import Command
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import Question, QuestionKey
from meshpoint.testing.conformance.build import AGENT, HERE, a_call, a_pause, one

SCHEMA = b'{"prompt": "Buy it?", "schema": {"type": "boolean"}, "allow": []}'


@pytest.fixture
def task_id(tmp_path: Path) -> TaskId:
    """A task that waits for an approval."""
    question = Question("approval", bool)
    call = replace(
        a_call("a", timeout=None, peer=AgentName(question.peer)),
        body=SCHEMA,
        sub_task_id=TaskId("~?approval.1"),
        headers={},
    )
    pause = a_pause(call)

    async def write() -> None:
        store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
        await store.open()
        await store.pause([pause])
        await store.close()

    asyncio.run(write())
    return pause.run.task_id


def outcome_of(tmp_path: Path) -> object:
    async def read() -> object:
        store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
        await store.open()
        try:
            return one(await store.acquire(HERE, 1)).outcomes[0][2]
        finally:
            await store.close()

    return asyncio.run(read())


def test_a_question_is_answered_once(
    run_command: Command, task_id: TaskId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    refused = run_command("complete", task_id, "approval", "maybe")
    assert refused.code == 1
    assert "approval: should be a boolean" in refused.err
    done = run_command("complete", task_id, "approval", "true")
    assert (done.code, done.out) == (0, f"answered approval of {task_id}\n")
    again = run_command("complete", task_id, "approval", "false")
    assert again.code == 1
    assert "'approval' was answered at " in again.err
    assert "by 'ada'" in again.err
    outcome = outcome_of(tmp_path)
    assert isinstance(outcome, Ok)
    assert outcome.value is True


def test_a_question_is_rejected(
    run_command: Command, task_id: TaskId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    assert run_command("complete", task_id, "approval").code == 2
    assert run_command("complete", task_id, "approval", "true", "--reject", "no").code == 2
    done = run_command("complete", task_id, "approval", "--reject", "too dear")
    assert (done.code, done.out) == (0, f"rejected approval of {task_id}\n")
    again = run_command("complete", task_id, "approval", "true")
    assert "'approval' was rejected at " in again.err
    outcome = outcome_of(tmp_path)
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == (
        FailureKind.ERROR,
        "rejected by 'ada': too dear",
    )


def test_a_question_that_is_not_asked(run_command: Command, task_id: TaskId) -> None:
    result = run_command("complete", task_id, "colour", "true")
    assert result.code == 1
    assert f"task {task_id} does not ask 'colour': it asks 'approval'" in result.err
    assert run_command("complete", "unknown", "approval", "true").code == 1


def test_open_questions_are_shown_and_listed(run_command: Command, task_id: TaskId) -> None:
    question_id = QuestionKey(AGENT, task_id, TaskId("~?approval.1")).to_id()
    shown = run_command("show", task_id).out
    assert "question approval" in shown
    assert question_id in shown.replace("\n", "")
    assert "Buy it?" in shown
    assert "~" not in shown
    (question,) = json.loads(run_command("show", task_id, "--json").out)["questions"]
    assert question == {"name": "approval", "id": question_id, "prompt": "Buy it?"}
    listed = run_command("list", "--waiting-for", "approval").out
    assert task_id in listed
    assert "no such tasks" in run_command("list", "--waiting-for", "colour").out
    assert run_command("complete", task_id, question_id, "false").code == 0


def test_a_task_with_a_damaged_question_is_shown(
    run_command: Command, task_id: TaskId, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "tasks.db")) as database, database:
        database.execute("UPDATE agent_peer_sub_tasks SET request = X'07'")
    shown = run_command("show", task_id)
    assert (shown.code, "Buy it?" in shown.out) == (0, False)
    assert "question approval" in shown.out  # what it waits for


@pytest.mark.parametrize(
    "value", ["[" * 30_000, "[NaN]", "1e999", '"\\ud800"', "[" * 150 + "]" * 150, "{yes"]
)
def test_a_value_that_is_not_json(run_command: Command, task_id: TaskId, value: str) -> None:
    result = run_command("complete", task_id, "approval", value)
    assert result.code == 2
    assert result.err.startswith("error: VALUE: ")
    assert result.err.count("\n") == 1


def test_an_answer_of_a_user_without_a_name(
    run_command: Command, task_id: TaskId, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr("getpass.getuser", find_no_name)
    assert run_command("complete", task_id, "approval", "true").code == 0
    assert "by 'unknown'" in run_command("complete", task_id, "approval", "true").err
