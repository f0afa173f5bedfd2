"""The `exec` and `sessions` commands, run in this process: their output and exit codes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from command_result import Command
from meshpoint.exec.locks import FileLock
from meshpoint.exec.session import ExecInput, SessionSpec
from meshpoint.exec.sessions import SessionStore
from meshpoint.model.ids import AgentName

from .flows import read_effects, write_flow

FLOW = """
from pathlib import Path
from typing import Annotated, TypedDict

from meshpoint import Done, Secret, StatefulAgent, agent


class Login(TypedDict):
    user: str
    key: Annotated[str, Secret]


@agent("flow", version="1", subtasks=["fetch", "login", "rate"])
async def flow(ctx, n: int) -> int:
    page = await ctx.subtask("fetch", fetch, n)
    login = await ctx.subtask("login", log_in, page)
    return await ctx.subtask("rate", rate, page, login)


async def fetch(n: int) -> int:
    ran("fetch")
    return n + 1


async def log_in(page: int) -> Login:
    ran("login")
    return {"user": "ada", "key": "s3cret"}


async def rate(page: int, login: Login) -> int:
    ran("rate")
    raise RuntimeError("no rate today")


@agent("plain")
async def plain(ctx, text: str) -> str:
    print("hello from plain")
    return text.upper()


class Stateful(StatefulAgent[int, None, int]):
    name = "stateful"

    async def on_request(self, ctx, n: int):
        return Done(n + 1)


def ran(step):
    with Path("effects").open("a") as file:
        file.write(step + "\\n")
"""
REPAIRED = FLOW.replace('raise RuntimeError("no rate today")', "return page")


def repair_flow(folder: Path, source: str = REPAIRED) -> None:
    write_flow(folder, source)


def test_an_agent_without_steps_has_only_an_output(cli: Command) -> None:
    done = cli("exec", "tested_flow:plain", "--input", "ada")
    assert (done.code, done.out) == (0, '"ADA"\n')
    assert "hello from plain" in done.err
    assert cli("exec", "tested_flow:plain", "--input", '"ada"', "--json").json["steps"] == []


def test_an_agent_without_steps_is_resumed_from_its_start(cli: Command, folder: Path) -> None:
    repair_flow(folder, FLOW.replace("text.upper()", "text.uper()"))
    assert cli("exec", "tested_flow:plain", "--input", "ada").code == 4
    repair_flow(folder)
    done = cli("exec", "tested_flow:plain", "--input", "ada", "--resume", "--json")
    assert (done.code, done.json["output"], done.json["attempt"]) == (0, "ADA", 2)


def test_a_class_is_instantiated(cli: Command) -> None:
    assert cli("exec", "tested_flow:Stateful", "--input", "3").out == "4\n"


def test_the_input_can_be_read_from_a_file(cli: Command, folder: Path) -> None:
    (folder / "input.json").write_text("41\n")
    assert cli("exec", "tested_flow:Stateful", "--input", "@input.json").out == "42\n"


def test_a_failure_is_readable_on_a_terminal(cli: Command) -> None:
    failed = cli("exec", "tested_flow:flow", "--input", "3")
    assert (failed.code, failed.out) == (4, "")
    lines = failed.err.splitlines()
    session = lines[0].split()[1].rstrip(",")
    assert lines[:3] == [f"session {session}, attempt 1", "step 1 of 3: fetch: runs", lines[2]]
    assert lines[2].startswith("step 1 of 3: fetch: completed in ")
    assert any(line.split()[:2] == ["rate", "failed"] for line in lines)
    assert 'raise RuntimeError("no rate today")' in failed.err
    assert lines[-2] == "error: flow failed: RuntimeError: no rate today"
    assert lines[-1] == f"resume with: meshpoint exec tested_flow:flow --session {session}"


def test_an_invalid_input_is_a_failure(flow: Command) -> None:
    failed = flow("--input", '"three"')
    assert (failed.code, failed.json["error"]["kind"], failed.json["checkpoint"]) == (
        4,
        "invalid",
        None,
    )
    assert [status for _, status, _ in failed.steps] == ["not run"] * 3


def test_the_suggested_resume_command_repeats_the_given_options(cli: Command) -> None:
    failed = cli(
        *("exec", "tested_flow:flow", "--input", "3", "--with", "tested_flow:plain"),
        *("--home", "my home", "--session", "rome", "--json"),
    )
    assert failed.json["resume"] == (
        "meshpoint exec tested_flow:flow --with tested_flow:plain --home 'my home' --session rome"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--input", "3", "--resume", "--session", "a"], "exclude each other"),
        (["--input", "3", "--resume", "--resume-from", "a"], "exclude each other"),
        ([], "--input: a new session needs an input"),
        (["--resume"], "--input: a new session needs an input"),
        (["--input", "{"], "--input: is not valid JSON"),
        (["--input", '"\\ud800"'], "--input: "),
        (["--input", "@nothing.json"], "--input: nothing.json cannot be read"),
        (["--input", "3", "--ttl", "soon"], "--ttl: 'soon' is not a valid duration"),
        (["--input", "3", "--ttl", "0s"], "--ttl: '0s' is not a valid duration"),
        (["--input", "3", "--with", "tested_flow:flow"], "--with: two agents are called 'flow'"),
        (["--input", "3", "--with", "tested_flow:nobody"], "has no 'nobody'"),
        (["--input", "3", "--home", "tested_flow.py"], "--home: "),
        (
            ["--input", "3", "--export", "nowhere/kept.json"],
            "--export: nowhere/kept.json cannot be a file",
        ),
        (["--input", "3", "--session", "no/name"], "is not a valid session id"),
    ],
)
def test_an_invalid_command_line_is_refused_in_one_line(
    flow: Command, folder: Path, arguments: list[str], problem: str
) -> None:
    refused = flow(*arguments)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert problem in refused.err
    assert not list(folder.glob(".meshpoint/sessions/*.json"))


def test_a_resume_without_an_earlier_session_is_refused(flow: Command) -> None:
    flow("--input", "4")
    refused = flow("--input", "3", "--resume")
    assert (refused.code, refused.err.count("\n")) == (10, 1)


def test_a_named_session_is_resumed_until_it_completes(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--session", "rome")
    repair_flow(folder)
    done = flow("--session", "rome")
    assert (done.code, done.json["output"], done.json["attempt"]) == (0, 4, 2)
    restarted = flow("--session", "rome")
    assert (restarted.code, [status for _, status, _ in restarted.steps]) == (0, ["completed"] * 3)
    assert restarted.json["operation_id"] != done.json["operation_id"]


def test_a_changed_input_reruns_the_steps_that_use_it(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--session", "rome")
    repair_flow(folder)
    done = flow("--input", "4", "--session", "rome")
    assert (done.json["output"], done.steps[0]) == (5, ("fetch", "completed", "input 'n' differs"))


def test_a_locked_session_is_refused_at_once(flow: Command, cli: Command, folder: Path) -> None:
    flow("--input", "3", "--session", "rome")
    lock = FileLock.try_acquire(folder / ".meshpoint/sessions/rome.lock")
    assert lock is not None
    for refused in (
        flow("--session", "rome"),
        flow("--input", "3", "--resume"),
        cli("sessions", "rm", "rome"),
    ):
        assert (refused.code, refused.err.count("\n")) == (7, 1)
        assert "session rome is in use by pid" in refused.err
    assert cli("sessions", "list", "--json").json[0]["status"] == "running"
    lock.release()
    assert flow("--session", "rome").code == 4


def test_an_expired_session_is_deleted_with_its_rows(flow: Command, folder: Path) -> None:
    operation = flow("--input", "3", "--ttl", "12h", "--session", "rome").json["operation_id"]
    file = folder / ".meshpoint/sessions/rome.json"
    session = json.loads(file.read_text())
    remaining = datetime.fromisoformat(session["expires_at"]) - datetime.now(UTC)
    assert timedelta(hours=11) < remaining <= timedelta(hours=12)
    assert operation in find_rows(folder)
    session["expires_at"] = datetime.now(UTC).isoformat()
    file.write_text(json.dumps(session))
    assert flow("--input", "3", "--resume").code == 10
    assert operation not in find_rows(folder)
    assert not list_queues(folder)


def find_rows(folder: Path) -> set[str]:
    """Ids in every table of the embedded store."""
    tables = {
        "agent_paused_tasks": "logical_task_id",
        "agent_operations": "operation_id",
        "agent_checkpoints": "analysis_id",
    }
    with sqlite3.connect(folder / ".meshpoint/exec.db") as db:
        tables_with_rows = {
            row_id
            for table, key in tables.items()
            for (row_id,) in db.execute(f"SELECT {key} FROM {table}")
        }
    db.close()
    return tables_with_rows


def list_queues(folder: Path) -> list[str]:
    with sqlite3.connect(folder / ".meshpoint/exec.db") as db:
        names = [name for (name,) in db.execute("SELECT name FROM meshpoint_queue")]
    db.close()
    return names


def test_an_agent_that_preserves_its_operations_keeps_its_sessions(
    cli: Command, folder: Path
) -> None:
    repair_flow(folder, FLOW.replace('version="1"', 'version="1", preserve=True'))
    cli("exec", "tested_flow:flow", "--input", "3", "--session", "rome", "--ttl", "1s")
    session = json.loads((folder / ".meshpoint/sessions/rome.json").read_text())
    assert datetime.fromisoformat(session["expires_at"]) - datetime.now(UTC) > timedelta(
        days=30_000
    )


def test_sessions_are_listed_shown_and_removed(cli: Command, flow: Command) -> None:
    assert cli("sessions", "list").out == "no sessions\n"
    flow("--input", "3", "--session", "rome")
    listed = cli("sessions", "list")
    assert [
        expected_text in listed.out
        for expected_text in ("rome", "tested_flow:flow", "failed", "in 7 d")
    ] == [True] * 4
    shown = cli("sessions", "show", "rome")
    assert "fetch completed, login completed, rate failed" in shown.out
    details = cli("sessions", "show", "rome", "--json").json
    assert (details["status"], details["attempts"][0]["error"]) == (
        "failed",
        "RuntimeError: no rate today",
    )
    assert cli("sessions", "rm", "rome").out == "deleted session rome\n"
    for command in ("show", "rm"):
        assert (removed := cli("sessions", command, "rome")).code == 10
        assert removed.err.count("\n") == 1


def test_removing_a_session_keeps_those_with_the_same_name_prefix(
    flow: Command, cli: Command, folder: Path
) -> None:
    flow("--input", "3", "--session", "rome")
    flow("--input", "3", "--session", "rome-2")
    assert cli("sessions", "rm", "rome").code == 0
    assert {name.partition(".")[0] for name in list_queues(folder)} == {"exec-rome-2"}
    assert [status for _, status, _ in flow("--session", "rome-2").steps] == [
        "reused",
        "reused",
        "failed",
    ]


def test_an_unrecorded_end_is_recorded_by_the_next_process(flow: Command, folder: Path) -> None:
    """The process was killed after it committed the operation's end, but before the session's."""
    repair_flow(folder)
    assert flow("--input", "3", "--session", "rome").code == 0
    file = folder / ".meshpoint/sessions/rome.json"
    session = json.loads(file.read_text())
    session["attempts"][0] |= {"ended": None, "ending": None, "steps": []}
    file.write_text(json.dumps(session))
    done = flow("--input", "3", "--resume")
    assert (done.code, done.json["output"], done.json["attempt"]) == (0, 4, 2)
    assert done.steps[0] == ("fetch", "reused", "the operation had already completed")
    assert read_effects(folder) == ["fetch", "login", "rate"]


def test_a_forged_session_file_stops_no_other_session(flow: Command, folder: Path) -> None:
    assert flow("--input", "3", "--session", "rome").code == 4
    file = folder / ".meshpoint/sessions/rome.json"
    fields = {**json.loads(file.read_text()), "id": "../..", "expires_at": "2000-01-01T00:00:00Z"}
    file.with_name("x.json").write_text(json.dumps(fields))
    file.with_name("...lock").touch()
    again = flow("--session", "rome")
    assert (again.code, again.json["attempt"]) == (4, 2)
    assert again.err.count("warning: session x cannot be read: ") == 1
    assert (folder / "tested_flow.py").exists()
    assert file.exists()


def test_an_attempt_killed_before_its_operation_began_can_be_resumed(
    flow: Command, folder: Path
) -> None:
    sessions = SessionStore(folder / ".meshpoint")
    spec = SessionSpec(
        entrypoint="tested_flow:flow",
        agent=AgentName("flow"),
        input=ExecInput(3),
        ttl=timedelta(days=1),
    )
    with sessions.create(spec) as locked_session:
        locked_session.begin_attempt()
    resumed = flow("--input", "3", "--resume")
    assert (resumed.code, resumed.json["attempt"]) == (4, 2)
    assert read_effects(folder) == ["fetch", "login", "rate"]


def test_a_version_without_migration_is_refused_before_anything_runs(
    flow: Command, folder: Path
) -> None:
    flow("--input", "3", "--session", "rome")
    repair_flow(folder, REPAIRED.replace('version="1"', 'version="2"'))
    refused = flow("--session", "rome")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "no migration leads from 1 to 2" in refused.err
    assert read_effects(folder) == ["fetch", "login", "rate"]
    repair_flow(folder)
    assert flow("--session", "rome").json["attempt"] == 3


def test_an_export_with_outputs_can_be_resumed_elsewhere(flow: Command, folder: Path) -> None:
    exported = flow("--input", "3", "--export", "kept.json", "--include-outputs")
    assert (
        "warning: 1 secret value was removed from the exported outputs, which may still contain "
        "personal" in exported.err
    )
    assert json.loads((folder / "kept.json").read_text()) == exported.json["checkpoint"]
    assert "s3cret" not in exported.out
    repair_flow(folder)
    done = flow("--input", "3", "--resume-from", "kept.json", "--home", "elsewhere")
    assert (done.code, done.json["output"], done.json["attempt"]) == (0, 4, 1)
    assert done.steps == [
        ("fetch", "reused", None),
        ("login", "completed", "its output was exported without its secrets"),
        ("rate", "completed", None),
    ]
    assert done.json["operation_id"] != exported.json["operation_id"]


def test_an_export_without_outputs_uses_those_in_the_store(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--export", "kept.json")
    repair_flow(folder)
    done = flow("--input", "3", "--resume-from", "kept.json")
    assert [status for _, status, _ in done.steps] == ["reused", "reused", "completed"]
    assert read_effects(folder) == ["fetch", "login", "rate", "rate"]
    elsewhere = flow("--input", "3", "--resume-from", "kept.json", "--home", "elsewhere")
    assert elsewhere.steps == [
        ("fetch", "completed", "its output is not in the file"),
        ("login", "completed", "after 'fetch', which runs again"),
        ("rate", "completed", None),
    ]


def test_a_resume_takes_secrets_from_the_store(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--export", "kept.json", "--include-outputs")
    repair_flow(folder)
    done = flow("--input", "3", "--resume-from", "kept.json")
    assert [status for _, status, _ in done.steps] == ["reused", "reused", "completed"]


def test_an_import_reruns_changed_steps(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--export", "kept.json")
    repair_flow(folder, REPAIRED.replace("return n + 1", "return n + 2"))
    done = flow("--input", "3", "--resume-from", "kept.json")
    assert done.steps[:2] == [
        ("fetch", "completed", "its function has changed"),
        ("login", "completed", "after 'fetch', which runs again"),
    ]
    other = flow("--input", "4", "--resume-from", "kept.json")
    assert "the input differs from the exported one" in other.err


def test_an_imported_session_can_be_resumed_again(flow: Command, folder: Path) -> None:
    flow("--input", "3", "--export", "kept.json", "--include-outputs")
    resumed_again = flow("--input", "3", "--resume-from", "kept.json", "--home", "elsewhere")
    assert (resumed_again.code, [status for _, status, _ in resumed_again.steps]) == (
        4,
        ["reused", "completed", "failed"],
    )
    repair_flow(folder)
    done = flow("--input", "3", "--resume", "--home", "elsewhere")
    assert [status for _, status, _ in done.steps] == ["reused", "reused", "completed"]
    assert done.json["session"] == resumed_again.json["session"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON, or truncated"),
        (lambda text: text.replace("completed", "failed", 1), "was edited"),
        (lambda text: text.replace("checkpoint/1", "checkpoint/2"), "written by a later release"),
        (lambda text: "{}", "is not a checkpoint"),
    ],
    ids=["truncated", "edited", "newer", "other"],
)
def test_an_invalid_file_is_refused_in_one_line_and_creates_no_session(
    flow: Command, folder: Path, make: Callable[[str], str], problem: str
) -> None:
    flow("--input", "3", "--export", "kept.json")
    (folder / "kept.json").write_text(make((folder / "kept.json").read_text()))
    refused = flow("--input", "3", "--resume-from", "kept.json")
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert problem in refused.err
    assert len(list(folder.glob(".meshpoint/sessions/*.json"))) == 1


def test_a_file_of_another_agent_or_version_is_refused(
    flow: Command, cli: Command, folder: Path
) -> None:
    flow("--input", "3", "--export", "kept.json")
    other = cli("exec", "tested_flow:plain", "--input", "ada", "--resume-from", "kept.json")
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "is a checkpoint of agent 'flow'" in other.err
    repair_flow(folder, REPAIRED.replace('version="1"', 'version="2"'))
    later = flow("--input", "3", "--resume-from", "kept.json")
    assert (later.code, later.err.count("\n")) == (1, 1)
    assert len(list(folder.glob(".meshpoint/sessions/*.json"))) == 1


def test_a_completed_run_is_not_exported(flow: Command, folder: Path) -> None:
    repair_flow(folder)
    done = flow("--input", "3", "--export", "kept.json")
    assert "nothing is written to kept.json" in done.err
    assert not (folder / "kept.json").exists()


def test_configured_secret_keys_are_omitted(
    flow: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHPOINT_AGENT__SECRET_KEYS", '["user"]')
    exported = flow("--input", "3", "--include-outputs", "--secret-key", "nothing")
    assert exported.json["checkpoint"]["removed"] == [
        "/subtasks/1/output/user",
        "/subtasks/1/output/key",
    ]
