"""`tasks list` and `tasks show` on a database file that the store has written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from command_result import Command, CommandResult
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.cli import tasks
from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Join
from meshpoint.model.envelopes import encode_reply, encode_request
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Message, MessageType
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import ExistingTask
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    HERE,
    HOUR,
    LEASE,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_requester,
    a_run,
    an_end,
    begun,
    error,
    operating,
    paused,
    ready,
    resumed,
    write_pause,
)
from meshpoint.testing.conformance.store_retries import a_retried_call

HOSTILE = TaskId("[bold red]x[/] \x1b[2J")
OUTCOMES = [
    Failed(FailureKind.ERROR, "ValueError: odd"),
    Failed(FailureKind.TIMEOUT, "peer 'flights': timeout: the peer did not answer in time"),
    Failed(FailureKind.UNDELIVERABLE, "peer 'flights': undeliverable: nobody serves it"),
    Failed(FailureKind.INVALID, "input of travel: city: missing"),
    Failed(FailureKind.CANCELLED, "cancelled on request"),
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Callable[[SqlStore], Awaitable[Any]]], Any]:
    """Runs a function with the store, on the real clock."""

    def run(work: Callable[[SqlStore], Awaitable[Any]], clock: FakeClock | None = None) -> Any:
        async def with_store() -> Any:
            store = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test", clock=clock)
            await store.open()
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(with_store())

    return run


def facts(result: CommandResult) -> dict[str, str]:
    """The rows of the first table."""
    assert result.code == 0, result.err
    first_table = result.out.strip().split("\n\n")[0]
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in first_table.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def ended_with(outcome: Outcome) -> Callable[[SqlStore], Awaitable[TaskId]]:
    async def end(store: SqlStore) -> TaskId:
        run = (await resumed(store)).run
        state = TaskState.COMPLETED
        if isinstance(outcome, Failed):
            cancelled = outcome.kind is FailureKind.CANCELLED
            state = TaskState.CANCELLED if cancelled else TaskState.FAILED
        reply = encode_reply(run.task_id, None, outcome)
        await store.end([an_end(run, state, reply=reply)])
        return run.task_id

    return end


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.kind.value)
def test_each_kind_of_failure_is_shown(run_command: Command, write: Any, outcome: Failed) -> None:
    task_id = write(ended_with(outcome))
    shown = run_command("show", task_id)
    assert f"{outcome.kind.value}: {outcome.message}" in " ".join(shown.out.split())
    assert run_command("show", task_id, "--json").json["failure"] == {
        "kind": outcome.kind.value,
        "message": outcome.message,
    }


def test_a_result_is_shown_with_its_tokens(run_command: Command, write: Any) -> None:
    usage = TokenUsage()
    usage.record(Tokens(input=207, output=3), model="small")
    task_id = write(ended_with(Ok({"city": "Rome"}, ({"artifactId": "a"},), usage)))
    shown = run_command("show", task_id)
    for part in ('{"city": "Rome"}', "1 artifact", "207 in, 3 out", "completed"):
        assert part in shown.out
    as_json = run_command("show", task_id, "--json").json
    assert (as_json["result"], as_json["failure"]) == ({"city": "Rome"}, None)
    assert as_json["usage"]["total"]["input"] == 207


def test_a_large_result_is_cut_for_people_only(run_command: Command, write: Any) -> None:
    task_id = write(ended_with(Ok("x" * 100_000)))
    shown = run_command("show", task_id)
    assert len(shown.out) < 5_000
    assert "the rest with --json" in " ".join(shown.out.split())
    assert run_command("show", task_id, "--json").json["result"] == "x" * 100_000


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The mesh of the store, with an agent that has a secret key of its own."""
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "mesh: {namespace: test}\nagent: {name: travel, entrypoint: 'm:a', session_service: sql, "
        f"session_db_url: 'sqlite:///{tmp_path}/tasks.db', secret_keys: [badge]}}\n"
    )
    return file


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (
            Ok({"badge": "hunter2", "nested": [{"password": "hunter2"}], "city": "Rome"}),
            {"badge": None, "nested": [{"password": None}], "city": "Rome"},
        ),
        (Failed(FailureKind.ERROR, "badge: hunter2, city: Rome"), "badge: ***, city: Rome"),
    ],
    ids=["result", "failure"],
)
def test_configured_secret_keys_are_masked(
    run_command: Command, write: Any, config: Path, outcome: Outcome, shown: object
) -> None:
    task_id = write(ended_with(outcome))
    for_people = run_command("show", task_id, "--config", str(config))
    assert "hunter2" not in for_people.out
    assert "Rome" in for_people.out
    as_json = run_command("show", task_id, "--config", str(config), "--json")
    assert "hunter2" not in as_json.out
    assert shown in (as_json.json["result"], as_json.json["reason"])


def test_secret_keys_of_the_environment_are_masked(
    run_command: Command, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHPOINT_AGENT__SECRET_KEYS", '["badge"]')
    task_id = write(ended_with(Ok({"badge": "hunter2"})))
    assert "hunter2" not in run_command("show", task_id).out
    assert run_command("show", task_id, "--json").json["result"] == {"badge": None}


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["for people", "as JSON"])
def test_inputs_and_messages_of_calls_are_masked(
    run_command: Command, write: Any, config: Path, arguments: list[str]
) -> None:
    async def wait(store: SqlStore) -> TaskId:
        part = b'{"data": {"badge": "hunter2", "city": "Rome"}}'
        body = b'{"message": {"role": "ROLE_USER", "parts": [%s]}}' % part
        message = Message(MessageType.REQUEST, body, "m-1", "c-1", "requester")
        pause = replace(a_pause("a", "b"), request=encode_request(message))
        await write_pause(store, pause)
        await store.claim([a_claim(pause, "a", error("badge: hunter2"))], HERE, 1)
        return pause.run.task_id

    task_id = write(wait)
    shown = run_command("show", task_id, "--config", str(config), *arguments)
    assert "Rome" in shown.out
    assert "badge: ***" in " ".join(shown.out.split())
    assert "hunter2" not in shown.out


def test_secrets_are_masked_for_people(run_command: Command, write: Any) -> None:
    task_id = write(ended_with(Ok({"api_key": "hunter2", "text": "password=hunter2"})))
    shown = run_command("show", task_id)
    assert "hunter2" not in shown.out
    assert "***" in shown.out


def test_a_waiting_task_shows_what_it_waits_for(run_command: Command, write: Any) -> None:
    async def wait(store: SqlStore) -> TaskId:
        hotels = a_call("b", peer=AgentName("hotels"), timeout=HOUR)
        requester = a_requester(parent_task_id="parent-1")
        pause = await paused(store, "a", hotels, a_call("c"), requester=requester)
        await store.claim([a_claim(pause, "c", error("no seat"))], HERE, 1)
        return pause.run.task_id

    task_id = write(wait)
    shown = run_command("show", task_id)
    described = facts(shown)
    assert described["state"] == "waiting 1 of 3"
    assert described["waits for"].startswith("2 outcomes of flights, hotels, for ")
    assert (described["requester"], described["parent task"]) == ("client", "parent-1")
    assert "error: no seat" in shown.out
    as_json = run_command("show", task_id, "--json").json
    assert as_json["waiting_for"] == ["flights", "hotels"]
    assert [call["outcome"] for call in as_json["calls"]] == [None, None, "error"]
    assert all(call["sends"] == 1 for call in as_json["calls"])


@pytest.mark.parametrize(
    ("join", "failed", "said"),
    [
        (FIRST, "", "1 of 3 results of flights, hotels, for "),
        (FIRST, "c", "1 of 2 results of flights, hotels, for "),
        (FIRST, "ac", "1 outcome of hotels, for "),
        (AT_LEAST(2), "", "2 of 3 results of flights, hotels, for "),
        (ALL, "c", "2 outcomes of flights, hotels, for "),
    ],
)
def test_a_race_says_how_many_results_it_needs(
    run_command: Command, write: Any, join: Join, failed: str, said: str
) -> None:
    async def wait(store: SqlStore) -> TaskId:
        hotels = a_call("b", peer=AgentName("hotels"), timeout=HOUR)
        pause = await paused(store, "a", hotels, a_call("c"), join=join)
        for call_id in failed:
            await store.claim([a_claim(pause, call_id, error("no seat"))], HERE, 1)
        return pause.run.task_id

    task_id = write(wait)
    assert facts(run_command("show", task_id))["waits for"].startswith(said)
    described = run_command("show", task_id, "--json").json
    assert described["needed"] == join.needed
    assert "position" not in described  # it is internal


@pytest.mark.parametrize(
    ("interval", "due"), [(10_800, "begins in 3 h"), (0.001, "due [0-9]+ m?s ago")]
)
def test_each_attempt_is_shown_with_its_times(
    run_command: Command, write: Any, interval: float, due: str
) -> None:
    async def retry(store: SqlStore) -> TaskId:
        policy = RetryPolicy(
            max_attempts=4, initial_interval=interval, max_interval=10_800, jitter=False
        )
        pause = await paused(store, a_retried_call(retry=policy))
        await store.claim([a_claim(pause, "a", error("no seat"))], HERE, 1)
        return pause.run.task_id

    shown = run_command("show", write(retry)).out
    first, second = re.findall("a, attempt . of 4 .*", shown)
    assert re.search("1 of 4 +flights +error: no seat +(sent|called) .* ago", first)
    assert re.search(f"2 of 4 +flights +- +{due}", second)


def test_a_result_counts_towards_the_join(run_command: Command, write: Any) -> None:
    async def wait(store: SqlStore) -> TaskId:
        pause = await paused(store, "a", "b", "c", join=AT_LEAST(2))
        await store.claim([a_claim(pause, "a")], HERE, 1)
        return pause.run.task_id

    described = facts(run_command("show", write(wait)))
    assert described["waits for"].startswith("1 of 2 results of flights, for ")


def test_a_running_task_shows_its_owner_and_lease(run_command: Command, write: Any) -> None:
    async def begin(store: SqlStore) -> TaskId:
        return (await begun(store)).task_id

    described = facts(run_command("show", write(begin)))
    assert described["owner"] == HERE.id
    assert described["lease"].startswith("ends in ")
    assert "waits for" not in described


def test_an_expired_lease_is_shown(run_command: Command, write: Any) -> None:
    async def begin(store: SqlStore) -> TaskId:
        return (await begun(store)).task_id

    clock = FakeClock()
    clock.advance(-(LEASE + HOUR))
    described = facts(run_command("show", write(begin, clock)))
    assert described["waits for"] == "a replica that rescues it: its lease has expired"
    assert re.fullmatch("ended .* ago", described["lease"])


def test_a_ready_task_shows_why_it_does_not_run(run_command: Command, write: Any) -> None:
    async def make_ready(store: SqlStore) -> TaskId:
        return (await ready(store)).run.task_id

    described = facts(run_command("show", write(make_ready)))
    assert described["waits for"] == "a replica that reads travel/1 with a free slot"


def test_a_delayed_task_shows_when_it_may_run(run_command: Command, write: Any) -> None:
    async def delay(store: SqlStore) -> TaskId:
        run = (await resumed(store)).run
        await store.release([a_release(run, not_before=HOUR)])
        return run.task_id

    assert facts(run_command("show", write(delay)))["waits for"].startswith("its next attempt, in")


async def _park(store: SqlStore) -> TaskId:
    run = (await resumed(store)).run
    await store.release([a_release(run, parked="call 3: expected flights, recorded weather")])
    return run.task_id


def test_a_parked_task_shows_the_reason_and_what_continues_it(
    run_command: Command, write: Any
) -> None:
    task_id = write(_park)
    described = facts(run_command("show", task_id))
    assert described["parked because"] == "call 3: expected flights, recorded weather"
    assert described["waits for"].startswith(
        f"another version of the code, or: meshpoint tasks resume {task_id} "
        "--db URL --namespace test (tried by 1.4, for "
    )
    assert described["fails"].startswith("in ")


def test_a_parked_task_is_offered_again(run_command: Command, write: Any) -> None:
    task_id = write(_park)
    assert "is offered to every version again" in run_command("resume", task_id).out
    assert facts(run_command("show", task_id))["state"] == "ready"


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_parked_tasks_are_offered_again_by_agent_and_reason(
    run_command: Command, write: Any, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.operations._PAGE", page)
    task_ids = {write(_park), write(_park), write(_park)}
    parked = ("resume", "--state", "parked", "--agent", "travel", "--reason")
    listed = run_command(*parked, "call 3", "--dry-run", "--json").json
    assert set(listed["task_ids"]) == task_ids
    assert run_command(*parked, "call 4", "--json").json["task_ids"] == []
    offered = run_command(*parked, "call 3", "--json").json
    assert (set(offered["task_ids"]), offered["status"]) == (task_ids, "offered")
    assert run_command("list", "--state", "parked", "--json").json == []


async def _wait(store: SqlStore) -> TaskId:
    return (await paused(store)).run.task_id


async def _run(store: SqlStore) -> TaskId:
    return (await resumed(store)).run.task_id


async def _make_ready(store: SqlStore) -> TaskId:
    return (await ready(store)).run.task_id


@pytest.mark.parametrize(
    ("arrange", "status", "state", "message"),
    [
        (_wait, "suspended", "waiting 0 of 1 (suspended)", "is suspended\n"),
        (_make_ready, "suspended", "ready (suspended)", "is suspended\n"),
        (_run, "suspending", "suspending", "runs to its next pause and is suspended there\n"),
    ],
)
def test_a_task_is_suspended_and_resumed(
    run_command: Command, write: Any, arrange: Any, status: str, state: str, message: str
) -> None:
    task_id, other = write(arrange), write(arrange)
    before = run_command("show", task_id, "--json").json
    assert before["suspended_at"] is None
    assert run_command("suspend", task_id).out == f"{task_id} {message}"
    assert run_command("suspend", task_id).out == f"{task_id} is already {status}\n"
    assert run_command("suspend", other, "--json").json == {"task_id": other, "status": status}
    described = facts(run_command("show", task_id))
    assert described["state"] == state
    assert described["suspended"].endswith(" ago")
    listed = run_command("list", "--state", "suspended", "--json").json
    assert {task["task_id"] for task in listed} == {task_id, other}
    assert all(task["suspended_at"] for task in listed)
    assert state in run_command("list").out
    assert run_command("resume", task_id, "--from", "start").code == 11
    resumed = run_command("resume", task_id)
    assert resumed.out == f"{task_id} is no longer suspended\n"
    result = run_command("resume", other, "--json").json
    assert result == {"task_id": other, "status": "continued"}
    assert run_command("list", "--state", "suspended", "--json").json == []
    timeless = {"wake_at": None, "waits_for": None}
    assert run_command("show", task_id, "--json").json | timeless == before | timeless


def test_a_ready_task_that_is_suspended_waits_for_a_person(
    run_command: Command, write: Any
) -> None:
    task_id = write(_make_ready)
    run_command("suspend", task_id)
    described = facts(run_command("show", task_id))
    assert (
        described["waits for"]
        == f"a person: meshpoint tasks resume {task_id} --db URL --namespace test"
    )
    assert "deadline" not in described


@pytest.mark.parametrize("page", [1, 1000])
def test_many_tasks_are_suspended_and_resumed(
    run_command: Command, write: Any, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.operations._PAGE", page)
    waiting, held, running = {write(_wait), write(_wait)}, write(_make_ready), write(_run)
    kept = write(_park)
    chosen = ("suspend", "--agent", "travel", "--state", "waiting")
    listed = run_command(*chosen, "--dry-run", "--json").json
    assert (set(listed["task_ids"]), listed["status"]) == (waiting, "unchanged")
    assert "waiting 0 of 1" in run_command(*chosen, "--dry-run").out
    changed = run_command(*chosen, "--json").json
    assert (set(changed["task_ids"]), changed["status"]) == (waiting, "suspended")
    assert run_command(*chosen).out == "no such task can be suspended\n"
    rest = run_command("suspend", "--agent", "travel", "--json").json
    assert set(rest["task_ids"]) == {held, running}
    assert run_command("suspend", "--agent", "nobody", "--json").json["task_ids"] == []
    everything = ("resume", "--state", "suspended")
    assert run_command(*everything, "--agent", "nobody").out == "no such task is suspended\n"
    listed = run_command(*everything, "--dry-run", "--json").json
    assert set(listed["task_ids"]) == {*waiting, held, running}
    continued = run_command(*everything, "--json").json
    assert set(continued["task_ids"]) == {*waiting, held, running}
    assert continued["status"] == "continued"
    assert run_command("show", kept, "--json").json["state"] == "parked"


def test_changes_of_many_tasks_are_in_the_audit(
    run_command: Command, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_actions(_: SqlStore) -> list[tuple[str, str, str, object, str]]:
        store = SqlOperatorStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
        await store.open()
        page = await store.actions(limit=10)
        await store.close()
        return [
            (each.actor, each.action, each.target, each.succeeded, each.result or "")
            for each in page.items
        ]

    monkeypatch.setattr("meshpoint.cli.audit.current_user", lambda: "ada")
    write(_wait), write(_wait), write(_park)
    run_command("suspend", "--agent", "travel", "--state", "waiting", "--dry-run")
    run_command("resume", "--state", "suspended", "--agent", "nobody")
    assert write(read_actions) == []
    run_command("suspend", "--agent", "travel", "--state", "waiting")
    run_command("resume", "--state", "suspended")
    run_command("resume", "--state", "parked", "--agent", "travel", "--reason", "call")
    assert write(read_actions) == [
        ("ada", "resume-parked", "travel", True, "offered 1 task again"),
        ("ada", "resume-suspended", "all agents", True, "continued 2 tasks"),
        ("ada", "suspend", "travel", True, "suspended 2 tasks"),
    ]


@pytest.mark.parametrize(
    ("arrange", "code", "message"),
    [
        (
            _park,
            1,
            "is parked, so no replica runs it; offer it again with: meshpoint tasks resume",
        ),
        (ended_with(Ok(1)), 12, "has completed; there is nothing to suspend"),
        (ended_with(OUTCOMES[0]), 1, "has already failed; there is nothing to suspend"),
        (ended_with(OUTCOMES[4]), 1, "has already been cancelled; there is nothing to suspend"),
    ],
    ids=["parked", "completed", "failed", "cancelled"],
)
def test_a_task_that_cannot_be_suspended_says_why(
    run_command: Command, write: Any, arrange: Any, code: int, message: str
) -> None:
    task_id = write(arrange)
    result = run_command("suspend", task_id)
    assert (result.code, result.err.count("\n")) == (code, 1)
    assert message in result.err


def test_a_task_whose_cancel_was_requested_is_not_suspended(
    run_command: Command, write: Any
) -> None:
    async def cancel(store: SqlStore) -> TaskId:
        task_id = await _run(store)
        await store.cancel([a_cancel(task_id)])
        return task_id

    result = run_command("suspend", write(cancel))
    assert result.code == 1
    assert "is being cancelled" in result.err


def test_a_task_without_a_row_is_not_suspended(run_command: Command, write: Any) -> None:
    write(_wait)
    result = run_command("suspend", "nobody")
    assert result.code == 10
    assert "a task has no row until it pauses or begins a step or subtask" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("suspend",),
        ("suspend", "--dry-run"),
        ("suspend", "1", "--agent", "travel"),
        ("suspend", "1", "--state", "waiting"),
        ("suspend", "--state", "parked"),
        ("suspend", "--state", "odd"),
        ("resume", "--state", "suspended", "--reason", "call 3"),
        ("list", "--state", "suspended", "--state", "waiting"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    run_command: Command, write: Any, arguments: tuple[str, ...]
) -> None:
    write(_wait)
    assert run_command(*arguments).code == 2
    assert run_command("list", "--state", "suspended", "--json").json == []


def test_an_operation_shows_its_subject(run_command: Command, write: Any) -> None:
    async def operate(store: SqlStore) -> TaskId:
        return (await operating(store)).task_id

    task_id = write(operate)
    assert facts(run_command("show", task_id))["subject"] == "ACME"
    (listed,) = run_command("list", "--subject", "ACME", "--json").json
    assert listed["task_id"] == task_id
    assert run_command("list", "--subject", "ABB", "--json").json == []


def test_a_hostile_id_is_printed_as_it_is(run_command: Command, write: Any) -> None:
    async def wait(store: SqlStore) -> None:
        await store.pause([a_pause(a_call("[red]a"), run=a_run(HOSTILE))])

    write(wait)
    for shown in (run_command("show", HOSTILE), run_command("list")):
        assert r"[bold red]x[/] \x1b[2J" in shown.out
        assert "\x1b" not in shown.out


def test_tasks_are_listed_by_filters(run_command: Command, write: Any) -> None:
    async def wait(store: SqlStore) -> list[TaskId]:
        context: Any = {"a2a_context": {"user_id": "ada"}}
        pauses = [
            await paused(store, a_call("a", peer=AgentName("hotels"))),
            await paused(store, context=context),
            await paused(store, requester=a_requester(app_id="shop")),
        ]
        return [pause.run.task_id for pause in pauses]

    hotels, ada, shop = write(wait)
    for options, expected in (
        (["--waiting-for", "hotels"], [hotels]),
        (["--user", "ada"], [ada]),
        (["--requester", "shop", "--state", "waiting"], [shop]),
        (["--since", "1h"], [shop, ada, hotels]),
        (["--until", "1h"], []),
        (["--until", "2099-01-01T00:00Z", "--agent", "travel"], [shop, ada, hotels]),
        (["--after", ada], [hotels]),
        (["--limit", "1"], [shop]),
    ):
        listed = run_command("list", *options, "--json").json
        assert [task["task_id"] for task in listed] == expected, options
    page = run_command("list", "--limit", "2")
    assert page.err == f"there may be more: add --after {ada}\n"
    assert run_command("list", "--user", "eve").out == "no such tasks in namespace test\n"
    assert run_command("list", "--after", "nobody").code == 1


@pytest.mark.parametrize(
    "time", ["yesterday", "2026-01-31", "2026-01-31T12:00", "5 weeks", "999999999d", ""]
)
def test_a_time_that_cannot_be_read_is_refused(run_command: Command, time: str) -> None:
    result = run_command("list", "--since", time)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("error: --since: ")


def test_all_tasks_have_the_same_keys(run_command: Command, write: Any) -> None:
    async def begin(store: SqlStore) -> TaskId:
        return (await begun(store)).task_id

    ids = [write(begin), write(ended_with(Ok(1))), write(ended_with(OUTCOMES[0]))]
    shown = [run_command("show", task_id, "--json").json for task_id in ids]
    assert shown[0].keys() == shown[1].keys() == shown[2].keys()
    assert {"failure", "result", "usage", "waits_for", "calls", "input"} <= shown[0].keys()


async def complete(store: SqlStore, value: str) -> TaskId:
    """Complete a task that has paused, with a result."""
    run = (await resumed(store)).run
    await store.end([an_end(run, reply=encode_reply(run.task_id, None, Ok(value)))])
    return run.task_id


def test_the_result_of_a_task(
    run_command: Command, write: Callable[[Callable[[SqlStore], Awaitable[Any]]], Any]
) -> None:
    task_id = write(lambda store: complete(store, "by train"))
    result = run_command("result", task_id)
    assert (result.code, result.out) == (0, "by train\n")
    shown = run_command("result", task_id, "--wait", "--json")
    assert shown.code == 0
    assert shown.json["task_id"] == task_id
    assert (shown.json["status"], shown.json["value"]) == ("completed", "by train")


def test_a_task_without_a_result_has_its_own_exit_code(
    run_command: Command, write: Callable[[Callable[[SqlStore], Awaitable[Any]]], Any]
) -> None:
    waiting = write(paused).run.task_id
    result = run_command("result", waiting)
    assert result.code == 11
    assert result.err.startswith(f"error: task {waiting} has not ended; --wait waits for it")
    cancelled = write(paused).run.task_id

    async def cancel(store: SqlStore) -> None:
        reply = encode_reply(cancelled, None, Failed(FailureKind.CANCELLED, "too late"))
        await store.cancel([replace(a_cancel(cancelled), reply=reply)])

    write(cancel)
    assert run_command("result", cancelled, "--wait").code == 5
    missing = run_command("result", "order-17")
    assert missing.code == 10
    assert "there is no task order-17 in the database" in missing.err


def test_waiting_for_a_result(
    run_command: Command,
    write: Callable[[Callable[[SqlStore], Awaitable[Any]]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task ends after the command has read its row for the first time."""
    pause = write(paused)
    read_outcome = tasks._read_outcome

    async def end_task(store: SqlStore) -> None:
        run = (await resumed(store, pause)).run
        await store.end([an_end(run, reply=encode_reply(run.task_id, None, Ok("by train")))])

    def read_and_end(found: ExistingTask | None) -> Outcome | None:
        if (outcome := read_outcome(found)) is None:
            ending = Thread(target=write, args=(end_task,))
            ending.start()
            ending.join()
        return outcome

    monkeypatch.setattr(tasks, "_read_outcome", read_and_end)
    monkeypatch.setattr(tasks, "_POLL_SECONDS", 0.0)
    result = run_command("result", pause.run.task_id, "--wait")
    assert (result.code, result.out) == (0, "by train\n")
