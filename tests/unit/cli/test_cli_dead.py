"""`meshpoint dead list`, `show`, `replay` and `drop`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

from command_result import Command, CommandResult, run_main
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.adapters.sqlite_queue import SqliteBroker, dead_letters
from meshpoint.adapters.sqlite_queue.dead_letters import SqliteDeadLetters
from meshpoint.cli import main
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import ReplicaId
from meshpoint.model.messages import Message, MessageType, private_queue
from meshpoint.testing.conformance.broker import AGENT, REQUESTS, Inbox, a_message, send

PRIVATE = private_queue(AGENT, ReplicaId("r1"))
AddLetters = Callable[..., None]


@pytest.fixture
def run_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `meshpoint dead` on the queues of a SQLite file."""

    def run(*arguments: str) -> CommandResult:
        url = f"sqlite:///{tmp_path}/mesh.db"
        return run_main(["dead", *arguments, "--broker", url, "--namespace", "demo"], capsys)

    return run


@pytest.fixture
def add_letters(tmp_path: Path) -> AddLetters:
    """Makes messages dead letters, from the request queue or another one."""

    async def use_broker(reason: str, messages: tuple[Message, ...], address: Any) -> None:
        broker, inbox = SqliteBroker(tmp_path / "mesh.db", namespace="demo"), Inbox()
        await broker.open()
        await broker.declare(AGENT, ReplicaId("r1"))
        await send(broker, address, *messages)
        await broker.consume(address, len(messages), inbox)
        for delivery in await inbox.take(len(messages)):
            await delivery.dead_letter(reason)
        await broker.close()

    def add_letters(reason: str, *messages: Message, address: Any = REQUESTS) -> None:
        asyncio.run(use_broker(reason, messages, address))

    return add_letters


def execute(tmp_path: Path, statement: str) -> None:
    with closing(sqlite3.connect(tmp_path / "mesh.db")) as db:
        db.execute(statement)
        db.commit()


def test_groups_are_printed_with_the_largest_first(
    run_dead: Command, add_letters: AddLetters
) -> None:
    hour = timedelta(hours=1)
    now = datetime.now(UTC)
    add_letters("not JSON", *(a_message(timestamp=now - age * hour) for age in (5, 3, 9)))
    add_letters("the password=hunter2 is wrong", a_message(app_id="shop"))
    result = run_dead("list")
    assert result.code == 0
    assert [" ".join(line.split()) for line in result.out.splitlines() if "─" not in line] == [
        "",
        "agent letters sender oldest newest newest id reason",
        f"{AGENT} 3 planner 9 h ago 3 h ago {AGENT}:3 not JSON",
        f"{AGENT} 1 shop - - {AGENT}:4 the password=*** is wrong",
        "",
    ]
    groups = run_dead("list", "--json").json
    assert [group["count"] for group in groups] == [3, 1]
    assert groups[0]["oldest"] < groups[0]["newest"]
    assert "hunter2" not in json.dumps(groups)
    assert [group["count"] for group in run_dead("list", "--sender", "shop", "--json").json] == [1]
    assert [group["count"] for group in run_dead("list", "--reason", "JSON", "--json").json] == [3]


def test_letters_are_listed_up_to_a_limit(run_dead: Command, add_letters: AddLetters) -> None:
    add_letters("unwanted", *(a_message() for _ in range(3)))
    result = run_dead("list", "--letters", "--limit", "2", "--json")
    assert [letter["id"] for letter in result.json] == [f"{AGENT}:1", f"{AGENT}:2"]
    assert result.json[0]["queue"] == REQUESTS
    assert result.err == "there may be more: raise --limit\n"
    assert f"{AGENT}:3" in run_dead("list", "--letters").out


def test_unreadable_letters_are_a_group_of_their_own(
    run_dead: Command, add_letters: AddLetters, tmp_path: Path
) -> None:
    add_letters("unwanted", a_message(), a_message(b"\xff"))
    execute(tmp_path, "UPDATE meshpoint_queue_content SET app_id = X'ff1b' WHERE id = 2")
    groups = run_dead("list", "--json").json
    assert [(group["readable"], group["sender"]) for group in groups] == [
        (True, "planner"),
        (False, None),
    ]
    assert "(unreadable)" in run_dead("list").out
    shown = run_dead("show", f"{AGENT}:2")
    assert "app_id: must be text, not bytes" in shown.out
    assert "\x1b" not in shown.out
    raw = tmp_path / "body"
    assert run_dead("show", f"{AGENT}:2", "--raw", str(raw)).code == 0
    assert raw.read_bytes() == b"\xff"
    replayed = run_dead("replay", f"{AGENT}:2", "--yes")
    assert replayed.code == 1
    assert replayed.out.startswith("replayed 0 letters; 1 kept: impossible to replay, the letter")
    assert run_dead("drop", f"{AGENT}:2", "--yes").out == "dropped 1 letter\n"


def test_a_letter_is_shown_with_its_secrets_masked(
    run_dead: Command, add_letters: AddLetters
) -> None:
    body = json.dumps({"city": "Rome", "api_key": "k-123"}).encode()
    add_letters("unwanted", a_message(body, headers={"x-token": "t-456", "x-attempt": 2}))
    shown = run_dead("show", f"{AGENT}:1")
    assert shown.code == 0
    assert "Rome" in shown.out
    assert REQUESTS in shown.out
    as_json = run_dead("show", f"{AGENT}:1", "--json")
    assert as_json.json["body"] == {"city": "Rome", "api_key": None}
    assert as_json.json["properties"]["headers"] == {"x-token": None, "x-attempt": 2}
    for text in (shown.out, as_json.out):
        assert "k-123" not in text
        assert "t-456" not in text


def test_the_raw_body_goes_to_standard_output(
    add_letters: AddLetters, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    add_letters("unwanted", a_message(b"password=\x00\xff"))
    options = ["--broker", f"sqlite:///{tmp_path}/mesh.db", "--namespace", "demo"]
    with pytest.raises(SystemExit) as exited:
        main(["dead", "show", f"{AGENT}:1", "--raw", "-", *options])
    assert exited.value.code in {0, None}
    assert capfdbinary.readouterr().out == b"password=\x00\xff"


def test_a_body_that_is_not_json_is_shown_as_masked_text(
    run_dead: Command, add_letters: AddLetters
) -> None:
    add_letters("unwanted", a_message(b"password=hunter2 \xff\x1b[2J"))
    shown = run_dead("show", f"{AGENT}:1")
    assert "password=***" in shown.out
    assert "\x1b" not in shown.out
    assert run_dead("show", f"{AGENT}:1", "--json").json["body"] == "password=*** \\xff\x1b[2J"


def test_a_letter_is_replayed_with_an_edited_body(
    run_dead: Command, add_letters: AddLetters, tmp_path: Path
) -> None:
    add_letters("unwanted", a_message(b"{1}"))
    edited = tmp_path / "body.json"
    edited.write_bytes(b"{}")
    result = run_dead("replay", f"{AGENT}:1", "--edit", str(edited), "--yes")
    assert (result.code, result.out) == (0, "replayed 1 letter\n")
    with closing(sqlite3.connect(tmp_path / "mesh.db")) as db:
        row = db.execute(
            "SELECT queue, deliveries, holder, dead_reason, dead_from, body"
            " FROM meshpoint_queue_message JOIN meshpoint_queue_content USING (id)"
        ).fetchall()
    assert row == [(f"demo.{REQUESTS}", 0, None, None, None, b"{}")]


def test_a_group_is_replayed_after_a_confirmation(
    run_dead: Command, add_letters: AddLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_letters("not JSON", a_message(), a_message())
    add_letters("no slot", a_message())
    questions: list[str] = []

    def confirm(text: str, *, err: bool) -> bool:
        questions.append(text)
        return len(questions) > 1

    monkeypatch.setattr(typer, "confirm", confirm)
    assert run_dead("replay", "--reason", "JSON", "--dry-run").out == "would replay 2 letters\n"
    refused = run_dead("replay", "--reason", "JSON")
    assert (refused.code, refused.out) == (1, "")
    assert len(run_dead("list", "--json").json) == 2
    accepted = run_dead("replay", "--reason", "JSON", "--json")
    assert accepted.code == 0
    assert accepted.json == {
        "replayed": 2,
        "gone": 0,
        "no_queue": 0,
        "refused": 0,
        "defective": 0,
    }
    assert questions == ["replay 2 letters"] * 2
    assert [group["reason"] for group in run_dead("list", "--json").json] == ["no slot"]


def test_a_letter_whose_queue_is_gone_is_kept(
    run_dead: Command, add_letters: AddLetters, tmp_path: Path
) -> None:
    add_letters("unwanted", a_message(type=MessageType.RESPONSE), address=PRIVATE)
    execute(tmp_path, "DELETE FROM meshpoint_queue WHERE private")
    result = run_dead("replay", "--all", "--yes")
    assert result.code == 1
    assert result.out == ("replayed 0 letters; 1 kept: the queue of origin is gone\n")


def test_letters_are_dropped(run_dead: Command, add_letters: AddLetters) -> None:
    add_letters("unwanted", a_message(), a_message())
    assert run_dead("drop", f"{AGENT}:1", "--yes").out == "dropped 1 letter\n"
    assert run_dead("drop", "--all", "--yes").out == "dropped 1 letter\n"
    assert run_dead("list").out == "no dead letters in namespace demo\n"
    assert run_dead("list", "--sender", "shop").out == "no such dead letters in namespace demo\n"


def test_letters_that_do_not_exist_are_reported(
    run_dead: Command, add_letters: AddLetters
) -> None:
    add_letters("unwanted", a_message())
    shown = run_dead("show", f"{AGENT}:99")
    assert shown.code == 1
    assert shown.err.startswith(f"error: there is no dead letter {AGENT}:99: it was replayed")
    dropped = run_dead("drop", f"{AGENT}:1", f"{AGENT}:99", "--yes")
    assert dropped.code == 1
    assert dropped.out == (
        "dropped 1 letter; 1 not found: dropped, displaced or taken by another command\n"
    )


def test_an_outage_shows_how_far_the_command_came(
    run_dead: Command, add_letters: AddLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_letters("unwanted", a_message(), a_message())
    monkeypatch.setattr(dead_letters, "_READ_PAGE", dead_letters._READ_PAGE.replace("500", "1"))
    calls, replay = [], SqliteDeadLetters.replay

    async def replay_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise BrokerUnavailable("the disk is gone")
        return await replay(*arguments)

    monkeypatch.setattr(SqliteDeadLetters, "replay", replay_once)
    result = run_dead("replay", "--all", "--yes")
    assert result.code == 3
    note, error = result.err.splitlines()
    assert note == "replayed 1 letter before the error; run this again"
    assert error.startswith("error: the broker does not answer: the disk is gone")
    assert len(run_dead("list", "--letters", "--json").json) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("replay",), "name IDs, or use --agent, --reason, --sender or --all"),
        (("drop", "travel:1", "--all"), "exclude each other"),
        (("drop", "--agent", "travel", "--all"), "exclude each other"),
        (("replay", "--all", "--edit", "x"), "--edit needs exactly one ID"),
        (("replay", "a:1", "b:2", "--edit", "x"), "--edit needs exactly one ID"),
    ],
)
def test_a_wrong_selection_is_a_usage_error(
    run_dead: Command, arguments: tuple[str, ...], problem: str
) -> None:
    result = run_dead(*arguments)
    assert result.code == 2
    assert problem in " ".join(result.err.replace("│", " ").split())


@pytest.mark.parametrize("letter_id", ["17", "travel:", ":17", "no agent:17"])
def test_an_invalid_id_is_one_line(run_dead: Command, letter_id: str) -> None:
    result = run_dead("show", letter_id)
    assert result.code == 2
    assert result.err.startswith(f"error: ID: {letter_id!r} is not the id of a dead letter")
    assert result.err.count("\n") == 1


def test_a_mesh_without_queues_has_no_dead_letters(run_dead: Command, tmp_path: Path) -> None:
    assert run_dead("list").out == "no dead letters in namespace demo\n"
    assert run_dead("drop", "--all", "--yes").out == "dropped 0 letters\n"
    assert not (tmp_path / "mesh.db").exists()


def test_memory_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_main(["dead", "list", "--broker", "memory://"], capsys)
    assert result.code == 2
    assert result.err == (
        "error: mesh.broker_url: dead letters at memory:// exist only inside the process that has "
        "them; name the broker of the replicas with --config FILE or --broker URL\n"
    )


def test_changes_of_letters_are_in_the_audit_of_the_named_database(
    add_letters: AddLetters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def read_actions() -> list[tuple[str, str, object, str | None]]:
        store = SqlOperatorStore(f"sqlite:///{tmp_path}/tasks.db", namespace="demo")
        await store.open()
        page = await store.actions(limit=10)
        await store.close()
        return [(each.action, each.target, each.details, each.result) for each in page.items]

    file = tmp_path / "mesh.yaml"
    file.write_text(
        f"mesh: {{namespace: demo, broker_url: 'sqlite:///{tmp_path}/mesh.db',"
        f" database_url: 'sqlite:///{tmp_path}/tasks.db'}}\n"
        f"agent: {{name: {AGENT}, entrypoint: 'mod:agent'}}\n"
    )
    add_letters("not JSON", a_message(), a_message(), a_message())
    assert asyncio.run(read_actions()) == []
    options = ("--config", str(file), "--yes")
    assert run_main(["dead", "drop", f"{AGENT}:1", *options], capsys).code == 0
    assert run_main(["dead", "replay", "--reason", "JSON", *options], capsys).code == 0
    assert asyncio.run(read_actions()) == [
        (
            "replay",
            "all agents",
            {"sender": None, "letters": [], "reason": "JSON"},
            "replayed 2 letters",
        ),
        ("drop", f"{AGENT}:1", {"sender": None, "letters": [f"{AGENT}:1"]}, "dropped 1 letter"),
    ]


def test_letters_are_replayed_although_the_audit_cannot_be_written(
    add_letters: AddLetters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.db").write_text("no database")
    file = tmp_path / "mesh.yaml"
    file.write_text(
        f"mesh: {{namespace: demo, broker_url: 'sqlite:///{tmp_path}/mesh.db',"
        f" database_url: 'sqlite:///{tmp_path}/tasks.db'}}\n"
        f"agent: {{name: {AGENT}, entrypoint: 'mod:agent'}}\n"
    )
    add_letters("not JSON", a_message())
    result = run_main(["dead", "replay", "--all", "--config", str(file), "--yes"], capsys)
    assert (result.code, result.out) == (0, "replayed 1 letter\n")
    assert "the audit does not record this: " in result.err
