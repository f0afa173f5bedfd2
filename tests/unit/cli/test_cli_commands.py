"""Commands against stubs: arguments in, lines and exit codes out."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import JsonValue

import meshpoint
from command_result import Command, run_main
from meshpoint import (
    ArtifactUpdate,
    Ended,
    QuestionUpdate,
    StatusUpdate,
    TextDelta,
    Update,
    wiring,
)
from meshpoint.adapters.sql.tables import REVISION
from meshpoint.cli import sources
from meshpoint.cli.follow import UpdatePrinter
from meshpoint.cli.output import format_duration
from meshpoint.cli.send import parse_input
from meshpoint.errors import (
    BrokerUnavailable,
    CommitInDoubt,
    ConfigurationError,
    MeshpointError,
    QueueFull,
    TooManyFollowers,
)
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.mailbox import Mailbox
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import (
    CallState,
    CallSummary,
    ListPosition,
    Reply,
    Requester,
    TaskFilter,
    TaskState,
    TaskSummary,
)
from meshpoint.model.transitions import Cancel, CancelRequested, ExistingTask
from meshpoint.settings import MeshSettings, Settings
from meshpoint.settings.agent import StoreSettings
from meshpoint.settings.urls import redact_url
from meshpoint.wiring import MetricsAddress

CONFIG = """
mesh: {namespace: demo, broker_url: 'sqlite:///mesh.db'}
agents:
- {name: travel, entrypoint: 'm:a', session_service: sql, session_db_url: 'sqlite:///tasks.db'}
- {name: flights, entrypoint: 'm:b', session_service: sql, session_db_url: 'sqlite:///tasks.db'}
- {name: echo, entrypoint: 'm:c'}
"""
NOW = datetime.now(UTC)
WAITING = TaskSummary(
    TaskId("t-1"),
    AgentName("travel"),
    TaskState.WAITING,
    generation=1,
    fence=1,
    attempt=0,
    owner=None,
    completed=2,
    expected=3,
    # coarse, because real time passes while tests run
    checkpointed_at=NOW - timedelta(days=5, hours=1),
    wake_at=NOW + timedelta(days=3, hours=12),
)
CALL = CallSummary(
    TaskId("s-1"),
    "flight",
    AgentName("flights"),
    1,
    CallState.DONE,
    "ok",
    NOW,
    NOW + timedelta(minutes=9),
)


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MESHPOINT_MESH__BROKER_URL", "amqp://variable/")
    (tmp_path / "mesh.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "tasks.db").touch()

    return lambda *arguments: run_main(arguments, capsys)


@dataclass
class FakeMesh:
    """Stub of the composition root, the client and the store."""

    outcome: Outcome = field(default_factory=lambda: Ok[JsonValue]({"total": 3}))
    error: Exception | None = None
    is_silent: bool = False
    is_displaced: bool = False
    question: QuestionUpdate | None = None
    tasks: list[TaskSummary] = field(default_factory=lambda: [WAITING])
    existing: dict[TaskId, ExistingTask] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    opened: int = 0
    closed: int = 0

    def make_broker(self, mesh: MeshSettings) -> MeshSettings:
        self.seen["mesh"] = mesh
        return mesh

    async def sweep_once(self, settings: Settings) -> dict[str, int]:
        return {"expired": len(settings.agents), "taken": 0}

    async def serve(
        self,
        settings: Settings,
        *,
        observer: object = None,
        stop: asyncio.Event | None = None,
        metrics: MetricsAddress | None = None,
    ) -> None:
        assert stop is not None
        self.seen["metrics"] = metrics
        self.seen["served"] = [agent.name for agent in settings.agents]
        if self.error:
            raise self.error

    def connect_to(self, mesh: MeshSettings) -> FakeMesh:
        self.seen["mesh"] = mesh
        return self

    def transport(self, broker: object) -> FakeMesh:
        return self

    async def __aenter__(self) -> FakeMesh:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def send(
        self, agent: str, value: JsonValue, *, task_id: TaskId, timeout: timedelta | None = None
    ) -> SimpleNamespace:
        self.seen["sent"] = (agent, value, timeout)
        self.seen["task_id"] = task_id
        if self.error:
            raise self.error
        return SimpleNamespace(id=task_id, outcome=self.wait_outcome, updates=self.updates)

    async def wait_outcome(self) -> Outcome:
        if self.is_silent:
            await asyncio.Event().wait()
        return self.outcome

    async def updates(self) -> AsyncIterator[Update]:
        yield StatusUpdate(id="1", at=NOW, state="working", message={"percent": 40})
        yield StatusUpdate(id="2", at=NOW, state="submitted", message="queued")
        if self.question is not None:
            yield self.question
        if self.is_displaced:
            raise TooManyFollowers("travel", self.seen["task_id"])
        outcome = await self.wait_outcome()
        if isinstance(outcome, Ok):
            for artifact in outcome.artifacts:
                yield ArtifactUpdate(id="3", at=NOW, artifact=artifact)
        yield Ended(id="end", at=NOW, outcome=outcome)

    async def cancel(self, agent: str, task_id: str) -> None:
        self.seen["cancelled"] = (agent, task_id)

    async def lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, ExistingTask]:
        return {
            task_id: self.existing[task_id] for task_id in task_ids if task_id in self.existing
        }

    async def tasks_of(
        self,
        *,
        agent: str | None,
        states: Sequence[TaskState],
        where: TaskFilter,
        limit: int,
        after: ListPosition | None,
    ) -> list[TaskSummary]:
        self.seen["filter"] = (agent, list(states), limit)
        return self.tasks

    async def stored_request(self, task_id: TaskId) -> bytes | None:
        return None

    async def mailbox(self, task_id: TaskId) -> Mailbox:
        return Mailbox()

    async def cancel_in_store(self, cancels: Sequence[Cancel]) -> list[CancelRequested]:
        self.seen["ended"] = [(cancel.agent, cancel.task_id, cancel.sender) for cancel in cancels]
        return [CancelRequested(None) for _ in cancels]

    async def task(self, task_id: str) -> tuple[TaskSummary, list[CallSummary]] | None:
        return next(((task, [CALL]) for task in self.tasks if task.task_id == task_id), None)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> FakeMesh:
    mesh = FakeMesh()

    @asynccontextmanager
    async def open_store(
        store: StoreSettings, namespace: str, timeline: object = None
    ) -> AsyncIterator[object]:
        mesh.seen.setdefault("databases", []).append((store.url, namespace))
        mesh.opened += 1
        yield SimpleNamespace(
            tasks=mesh.tasks_of,
            task=mesh.task,
            lookup=mesh.lookup,
            cancel=mesh.cancel_in_store,
            stored_request=mesh.stored_request,
            mailbox=mesh.mailbox,
        )
        mesh.closed += 1

    stubs = {"make_broker": mesh.make_broker, "open_store": open_store}
    stubs |= {"serve": mesh.serve, "sweep_once": mesh.sweep_once}
    stub_module(monkeypatch, "wiring", **vars(wiring) | stubs)
    monkeypatch.setattr("meshpoint.connecting.connect_to", mesh.connect_to)
    monkeypatch.setattr("meshpoint.client.transport.Transport", mesh.transport)
    return mesh


def stub_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    module = ModuleType(f"meshpoint.{name}")
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(meshpoint, name, module, raising=False)


def test_help_and_version_import_no_heavy_modules() -> None:
    heavy_modules = "{'rich', 'sqlalchemy', 'aiormq', 'yaml', 'alembic'}"
    code = (
        "import sys, meshpoint.cli.app; "
        f"sys.exit(str(found) if (found := {heavy_modules} & sys.modules.keys()) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command",
    [["run"], ["send"], ["sweep"], ["demo"], *(["tasks", c] for c in ("list", "show", "cancel"))]
    + [["db", c] for c in ("upgrade", "check", "sql")],
    ids=" ".join,
)
def test_the_help_of_each_command_shows_examples(cli: Command, command: list[str]) -> None:
    shown = cli(*command, "--help")
    assert shown.code == 0
    assert f"Examples:\n    meshpoint {' '.join(command)}" in shown.out


def test_the_version_is_printed(cli: Command) -> None:
    assert cli("--version").out.startswith("meshpoint ")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigurationError("agent.name", "is wrong", "change it"),
            2,
            "agent.name: is wrong; change it",
        ),
        (
            BrokerUnavailable("nothing at\n127.0.0.1"),
            3,
            "the broker does not answer: nothing at 127.0.0.1; "
            "check that it is running and that mesh.broker_url is correct",
        ),
        (
            CommitInDoubt("no COMMIT"),
            3,
            "the database does not answer: no COMMIT; "
            "check that it is running and that its URL is correct",
        ),
        (
            QueueFull("the queue of agent 'travel' is full; wait"),
            3,
            "the queue of agent 'travel' is full; wait",
        ),
        (MeshpointError("no agent named travel\nanywhere"), 1, "no agent named travel anywhere"),
        (MeshpointError("\x1b[2Jagent\u202e"), 1, r"\x1b[2Jagent\u202e"),
        (MeshpointError("x" * 10_001), 1, "x" * 10_000 + "… (1 character left out)"),
    ],
)
def test_errors_are_one_line_without_colour_and_an_exit_code(
    cli: Command, mesh: FakeMesh, error: MeshpointError, code: int, line: str
) -> None:
    mesh.error = error
    result = cli("send", "travel", "x")
    assert (result.code, result.out) == (code, "")
    assert result.err == f"error: {line}\n"


@pytest.mark.parametrize(
    "command", [["send", "travel"], ["tasks", "show"], ["checkpoints", "show"], ["run"]]
)
def test_arguments_that_are_not_text_are_refused_in_one_line(
    cli: Command, mesh: FakeMesh, command: list[str]
) -> None:
    result = cli(*command, "\udcff")
    assert (result.code, result.out) == (2, "")
    assert (
        result.err
        == "error: the command line: '\\udcff' is not UTF-8 text; encode all arguments as UTF-8\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["tasks", "list", "--config", "mesh.yaml", "--limit", str(2**63)],
        ["checkpoints", "list", "--db", "sqlite:///tasks.db", "--limit", str(2**63)],
        ["run", "mesh.yaml", "--replicas", "9" * 400],
    ],
)
def test_numbers_out_of_range_are_refused(
    cli: Command, mesh: FakeMesh, command: list[str]
) -> None:
    assert cli(*command).code == 2
    assert not mesh.seen


def test_an_export_to_a_name_that_is_too_long_is_refused_before_the_run(cli: Command) -> None:
    result = cli("exec", "json:loads", "--input", "1", "--export", "x" * 5000)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.endswith("name a file in an existing folder\n")


def test_interrupting_exits_with_130(
    cli: Command, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshpoint.connecting.connect_to", interrupt)
    assert cli("send", "travel", "x").code == 130


def test_send_prints_the_value_as_json(cli: Command, mesh: FakeMesh) -> None:
    answered = cli("send", "travel", '{"city": "Rome"}', "--config", "mesh.yaml")
    assert (answered.code, answered.json) == (0, {"total": 3})
    assert mesh.seen["sent"] == ("travel", {"city": "Rome"}, None)
    assert mesh.seen["mesh"].namespace == "demo"


def test_send_prints_text_as_it_is(cli: Command, mesh: FakeMesh) -> None:
    mesh.outcome = Ok("[bold]Rome[/bold]: fine")
    assert cli("send", "travel", "hello").out == "[bold]Rome[/bold]: fine\n"
    assert mesh.seen["sent"][1] == "hello"


def test_send_reads_standard_input(
    cli: Command, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[1, 2]")))
    cli("send", "travel", "-")
    assert mesh.seen["sent"][1] == [1, 2]


def test_send_ignores_a_byte_order_mark(
    cli: Command, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf[1, 2]")))
    cli("send", "travel", "-")
    assert mesh.seen["sent"][1] == [1, 2]


def test_a_table_prints_no_terminal_escape_codes(cli: Command, mesh: FakeMesh) -> None:
    mesh.tasks = [replace(WAITING, state=TaskState.FAILED, dead_reason="odd\x1b[31m")]
    shown = cli("tasks", "show", "t-1", "--config", "mesh.yaml")
    assert r"odd\x1b[31m" in shown.out
    assert "\x1b" not in shown.out


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("NaN", "NaN"), ("a {", "a {"), ('"7"', "7"), ("", "")]
)
def test_input_is_json_or_text(text: str, value: object) -> None:
    assert parse_input(text) == value


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("{'city': 'Rome'}", "line 1 column 2 (char 1)"),
        ('\n [1, "a"', "line 2 column 9 (char 9)"),
        ('{"days": NaN}', "NaN is not a JSON value"),
    ],
)
def test_input_that_only_starts_as_json_is_refused(
    cli: Command, mesh: FakeMesh, text: str, position: str
) -> None:
    result = cli("send", "travel", text)
    assert (result.code, result.out, result.err.count("\n"), "sent" in mesh.seen) == (
        2,
        "",
        1,
        False,
    )
    assert result.err.startswith("error: INPUT: is not valid JSON: ")
    assert f"{position}; correct it" in result.err


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\udc00": 1}', "[" * 300 + "]" * 300])
@pytest.mark.parametrize("command", [["send", "travel"], ["exec", "json:loads", "--input"]])
def test_input_that_cannot_be_sent_is_refused(
    cli: Command, mesh: FakeMesh, command: list[str], text: str
) -> None:
    result = cli(*command, text)
    assert (result.code, result.err.count("\n"), "sent" in mesh.seen) == (2, 1, False)


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        (FailureKind.ERROR, 4, "failed"),
        (FailureKind.TIMEOUT, 4, "failed"),
        (FailureKind.CANCELLED, 5, "cancelled"),
    ],
)
def test_send_exits_with_a_code_for_each_failure(
    cli: Command, mesh: FakeMesh, kind: FailureKind, code: int, status: str
) -> None:
    mesh.outcome = Failed(kind, "no seats")
    result = cli("send", "travel", "x")
    assert (result.code, result.out, result.err) == (
        code,
        "",
        f"error: task {mesh.seen['task_id']} {status} ({kind}): no seats\n",
    )
    result = cli("send", "travel", "x", "--json")
    assert (result.code, result.json["status"], result.json["message"]) == (
        code,
        status,
        "no seats",
    )


def test_send_without_an_answer_in_time_exits_with_6(cli: Command, mesh: FakeMesh) -> None:
    mesh.is_silent = True
    result = cli("send", "travel", "x", "--wait", "0")
    assert (result.code, result.out) == (6, "")
    assert "no answer from travel" in result.err
    assert mesh.seen["task_id"] in result.err
    output = cli("send", "travel", "x", "--wait", "0", "--json").json
    assert output == {"task_id": mesh.seen["task_id"], "status": "no_answer"}


def test_send_follows_a_task(cli: Command, mesh: FakeMesh) -> None:
    mesh.outcome = Ok({"total": 3}, ({"artifactId": "a"},))
    result = cli("send", "travel", "x", "--follow")
    assert (result.code, result.json) == (0, {"total": 3})
    assert result.err.splitlines() == [
        f"task {mesh.seen['task_id']}",
        'working: {"percent": 40}',
        "submitted: queued",
        'artifact: {"artifactId": "a"}',
    ]


def test_a_followed_task_shows_peers_text_and_repetitions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = UpdatePrinter(as_json=False, database_options="--db URL")
    rail: dict[str, Any] = {"at": NOW, "path": ("rail", "seats")}
    for update in (
        StatusUpdate(id="1", state="working", message="looking", **rail),
        TextDelta(id="2", at=NOW, text="by "),
        TextDelta(id="3", at=NOW, text="tra"),
        TextDelta(id="4", text="seat\x1b 7", **rail),
        TextDelta(id="5", at=NOW, text="in\nand bus"),
        TextDelta(id="6", at=NOW, text="by train", reset=True),
        ArtifactUpdate(id="7", artifact={"artifactId": "seat"}, **rail),
        TextDelta(id="8", at=NOW, text="!"),
        QuestionUpdate(
            id="9",
            at=NOW,
            task_id="order 17",
            name="approval",
            question_id="WyJh",
            prompt="Buy\x1b it?",
            answer_schema={},
        ),
    ):
        printer.print(update)
    printer.end_text()
    assert capsys.readouterr().err.splitlines() == [
        "rail > seats: working: looking",
        "text: by tra",
        "rail > seats: text: seat\\x1b 7",
        "text: in",
        "and bus",
        "started again: what follows may repeat earlier updates",
        "text: by train",
        'rail > seats: artifact: {"artifactId": "seat"}',
        "text: !",
        "question approval: Buy\\x1b it?",
        "answer it with: meshpoint tasks complete 'order 17' WyJh VALUE --db URL",
    ]


MESH_ONLY = "mesh: {broker_url: 'memory://'}\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--config", "mesh.yaml"], "--config mesh.yaml"),
        (
            ["-c", "my mesh.yaml", "--namespace", "test"],
            "--config 'my mesh.yaml' --namespace test",
        ),
        (["--config", "client.yaml"], "--db URL"),
        (["--broker", "memory://", "--namespace", "test"], "--db URL --namespace test"),
    ],
)
def test_a_printed_command_names_the_database_of_the_question(
    cli: Command, mesh: FakeMesh, tmp_path: Path, options: list[str], expected: str
) -> None:
    (tmp_path / "my mesh.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "client.yaml").write_text(MESH_ONLY, encoding="utf-8")
    mesh.question = QuestionUpdate(
        id="9", at=NOW, task_id="t-1", name="approval", question_id="WyJh", answer_schema={}
    )
    result = cli("send", "travel", "x", "--follow", *options)
    assert result.code == 0
    command = "meshpoint tasks complete t-1 WyJh VALUE"
    assert f"answer it with: {command} {expected}" in result.err.splitlines()


def test_each_line_of_a_followed_task_can_be_json(cli: Command, mesh: FakeMesh) -> None:
    mesh.outcome = Failed(FailureKind.ERROR, "no seats")
    result = cli("send", "travel", "x", "--follow", "--json")
    sent, first, second, last = map(json.loads, result.out.splitlines())
    assert sent == {"kind": "sent", "task_id": mesh.seen["task_id"]}
    assert (first["kind"], first["state"], first["message"]) == (
        "status",
        "working",
        {"percent": 40},
    )
    assert second["message"] == "queued"
    assert (result.code, last["kind"], last["task_id"]) == (4, "ended", mesh.seen["task_id"])
    outcome = last["outcome"]
    assert (outcome["status"], outcome["kind"]) == ("failed", "error")
    assert outcome["message"] == "no seats"


@pytest.mark.parametrize("options", [[], ["--json"], ["--follow"]])
def test_an_interrupted_send_names_the_task(
    cli: Command, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def interrupt(main: Coroutine[Any, Any, Any]) -> None:
        main.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupt)
    monkeypatch.setattr("meshpoint.model.ids.new_id", lambda: "order-17")
    assert "task order-17 may still complete\n" in cli("send", "travel", "x", *options).err


def test_a_followed_task_with_too_many_followers_is_awaited(cli: Command, mesh: FakeMesh) -> None:
    mesh.is_displaced = True
    mesh.outcome = Ok({"total": 3})
    result = cli("send", "travel", "x", "--follow")
    assert (result.code, result.json) == (0, {"total": 3})
    assert "four newer connections follow the task" in result.err


def test_a_followed_task_without_an_answer_in_time_exits_with_6(
    cli: Command, mesh: FakeMesh
) -> None:
    mesh.is_silent = True
    result = cli("send", "travel", "x", "--follow", "--wait", "0.01", "--json")
    *updates, last = map(json.loads, result.out.splitlines())
    assert [update["kind"] for update in updates] == ["sent", "status", "status"]
    assert (result.code, last["kind"]) == (6, "no_answer")


def test_a_task_is_followed_or_left_alone(cli: Command, mesh: FakeMesh) -> None:
    result = cli("send", "travel", "x", "--follow", "--no-wait")
    assert (result.code, mesh.seen) == (2, {})


def test_send_without_waiting_prints_the_task(cli: Command, mesh: FakeMesh) -> None:
    result = cli("send", "travel", "x", "--no-wait", "--timeout", "90")
    assert (result.code, result.out) == (0, mesh.seen["task_id"] + "\n")
    assert mesh.seen["sent"] == ("travel", "x", timedelta(seconds=90))


def test_send_accepts_the_broker_as_an_option(cli: Command, mesh: FakeMesh) -> None:
    cli(
        "send",
        "travel",
        "x",
        "--config",
        "mesh.yaml",
        "--broker",
        "amqp://h/",
        "--namespace",
        "other",
    )
    assert (mesh.seen["mesh"].broker_url, mesh.seen["mesh"].namespace) == ("amqp://h/", "other")


SENDING = [["send", "travel", "x"], ["tasks", "cancel", "t-1", "--agent", "travel"]]


@pytest.mark.parametrize("command", SENDING, ids=" ".join)
@pytest.mark.parametrize("options", [[], ["--namespace", "demo"]], ids=" ".join)
def test_a_missing_mesh_option_is_reported(
    cli: Command,
    mesh: FakeMesh,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    options: list[str],
) -> None:
    monkeypatch.delenv("MESHPOINT_MESH__BROKER_URL")
    result = cli(*command, *options)
    assert (result.code, result.out, mesh.seen) == (2, "", {})
    assert result.err == "error: --config: no mesh is named; use --config FILE or --broker URL\n"


@pytest.mark.parametrize("command", SENDING, ids=" ".join)
def test_an_environment_variable_can_name_the_mesh(
    cli: Command, mesh: FakeMesh, command: list[str]
) -> None:
    assert cli(*command).code == 0
    assert mesh.seen["mesh"].broker_url == "amqp://variable/"


@pytest.mark.parametrize("option", ["--wait", "--timeout"])
@pytest.mark.parametrize("seconds", ["1e30", "inf", "-1"])
def test_send_refuses_durations_out_of_range(
    cli: Command, mesh: FakeMesh, option: str, seconds: str
) -> None:
    result = cli("send", "a", "1", option, seconds)
    assert result.code == 2
    assert f"Invalid value for '{option}'" in result.err
    assert not mesh.seen


def test_send_refuses_wait_with_no_wait(cli: Command, mesh: FakeMesh) -> None:
    assert cli("send", "travel", "x", "--wait", "1", "--no-wait").code == 2
    assert not mesh.seen


def test_tasks_are_listed_as_a_table(cli: Command, mesh: FakeMesh) -> None:
    listed = cli(
        "tasks",
        "list",
        "--config",
        "mesh.yaml",
        "--agent",
        "travel",
        "--state",
        "waiting",
        "--limit",
        "5",
    )
    assert listed.code == 0
    row = next(line for line in listed.out.splitlines() if line.split()[:1] == ["t-1"])
    assert row.split() == [
        "t-1",
        "travel",
        "waiting",
        "2",
        "of",
        "3",
        "-",
        "5",
        "d",
        "in",
        "3",
        "d",
        "-",
    ]
    assert mesh.seen["filter"] == ("travel", [TaskState.WAITING], 5)


def test_an_empty_list_of_tasks_says_so(cli: Command, mesh: FakeMesh) -> None:
    mesh.tasks = []
    assert cli("tasks", "list", "--config", "mesh.yaml").out == "no tasks in namespace demo\n"
    assert (
        cli("tasks", "list", "--config", "mesh.yaml", "--state", "failed").out
        == "no such tasks in namespace demo\n"
    )
    assert (
        cli("tasks", "list", "--db", "sqlite:///tasks.db").out
        == "no tasks in namespace meshpoint\n"
    )
    assert cli("tasks", "list", "--config", "mesh.yaml", "--json").json == []


def test_a_database_shared_by_agents_is_read_once_and_closed(
    cli: Command, mesh: FakeMesh, tmp_path: Path
) -> None:
    cli("tasks", "list", "--config", "mesh.yaml")
    assert mesh.seen["databases"] == [(f"sqlite:///{tmp_path}/tasks.db", "demo")]
    assert (mesh.opened, mesh.closed) == (1, 1)


def test_tasks_are_listed_as_json_from_a_named_database(cli: Command, mesh: FakeMesh) -> None:
    mesh.tasks = [
        replace(WAITING, task_id=TaskId("old"), checkpointed_at=NOW - timedelta(days=9)),
        WAITING,
    ]
    listed = cli("tasks", "list", "--db", "postgresql://h/mesh", "--json")
    assert [task["task_id"] for task in listed.json] == ["t-1", "old"], (
        "the newest task comes first"
    )
    assert listed.json[0]["checkpointed_at"] == WAITING.checkpointed_at.isoformat()
    assert mesh.seen["databases"] == [("postgresql://h/mesh", "meshpoint")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--config: no database is named; use --config FILE or --db URL"),
        (["--db", "mysql://h/d"], "--db: MySQL is not supported"),
        (
            ["--db", "sqlite:///a.db", "--state", "asleep"],
            "--state: 'asleep' is not a valid TaskState; use one of run",
        ),
    ],
)
def test_a_missing_database_option_is_reported(
    cli: Command, mesh: FakeMesh, arguments: list[str], said: str
) -> None:
    result = cli("tasks", "list", *arguments)
    assert result.code == 2
    assert said in result.err


def test_listing_creates_no_file(cli: Command, mesh: FakeMesh, tmp_path: Path) -> None:
    result = cli("tasks", "list", "--db", "sqlite:///typo.db")
    assert (
        result.code,
        result.err.startswith(f"error: the file {tmp_path}/typo.db does not exist"),
    ) == (1, True)
    assert mesh.opened == 0


LONG_NUMBER = "a" * 300
"""A name too long for any file system."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["tasks", "list", "--db", f"sqlite:////tmp/{LONG_NUMBER}/mesh.db"],
        ["sessions", "list", "--home", f"/tmp/{LONG_NUMBER}"],
        ["send", "travel", "1", "--broker", f"sqlite:////tmp/{LONG_NUMBER}/mesh.db"],
    ],
    ids=["tasks", "sessions", "send"],
)
def test_an_invalid_path_is_reported_in_one_line(cli: Command, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code in {1, 2}
    assert result.err.startswith("error: ")
    assert "File name too long" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/root/x"), ValueError("not\na number")]
)
def test_an_unexpected_error_is_reported_in_one_line(
    cli: Command, mesh: FakeMesh, error: Exception
) -> None:
    mesh.error = error
    result = cli("send", "travel", "1", "--config", "mesh.yaml")
    assert result.code == 1
    assert result.err.startswith(f"error: {type(error).__name__}: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_ascii_only_terminal_still_gets_the_output(
    cli: Command, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    mesh.tasks = [replace(WAITING, agent=AgentName("caf\xe9"))]
    assert cli("tasks", "list", "--db", "sqlite:///tasks.db", *options).code == 0
    out.seek(0)
    text = out.read()
    assert "caf\\xe9" in text or json.loads(text)[0]["agent"] == "caf\xe9"


def test_a_configuration_without_databases_cannot_list_tasks(
    cli: Command, mesh: FakeMesh, tmp_path: Path
) -> None:
    (tmp_path / "mesh.yaml").write_text("agent: {name: a, entrypoint: 'm:a'}", encoding="utf-8")
    result = cli("tasks", "list", "--config", "mesh.yaml")
    assert (result.code, "add session_service: sql" in result.err) == (2, True)


def test_a_file_without_agents_can_name_the_database_of_the_mesh(tmp_path: Path) -> None:
    config = tmp_path / "mesh.yaml"
    config.write_text("mesh: {database_url: 'sqlite:////data/tasks.db'}", encoding="utf-8")
    assert [each.url for each in sources.load_databases(config, None)] == [
        "sqlite:////data/tasks.db"
    ]


def test_a_task_is_shown_with_its_calls(cli: Command, mesh: FakeMesh) -> None:
    mesh.tasks = [replace(WAITING, dead_reason="died 5 times", rescues=3)]
    shown = cli("tasks", "show", "t-1", "--config", "mesh.yaml")
    assert shown.code == 0
    for part in ("waiting 2 of 3", "flight", "flights", "ok", "s-1", "died 5 times", "lost   3"):
        assert part in shown.out
    assert (
        cli("tasks", "show", "t-1", "--config", "mesh.yaml", "--json").json["calls"][0]["call_id"]
        == "flight"
    )


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Failed(FailureKind.ERROR, "no seat is left"), "no seat is left"),
        (Failed(FailureKind.CANCELLED, "cancelled on request"), "cancelled on request"),
        (Ok("MP101"), None),
    ],
)
def test_a_task_that_has_ended_is_shown_with_the_reason(
    cli: Command, mesh: FakeMesh, outcome: Outcome, reason: str | None
) -> None:
    result = replace(
        WAITING, state=TaskState.COMPLETED if isinstance(outcome, Ok) else TaskState.FAILED
    )
    reply = Reply(
        result.agent,
        result.task_id,
        result.state,
        encode_reply(result.task_id, None, outcome),
        Requester(),
    )
    mesh.tasks, mesh.existing = (
        [result],
        {result.task_id: ExistingTask(result.task_id, result.agent, result.state, reply)},
    )
    assert cli("tasks", "show", "t-1", "--config", "mesh.yaml", "--json").json["reason"] == reason
    shown = cli("tasks", "show", "t-1", "--config", "mesh.yaml").out
    assert [
        line.split(maxsplit=1)[1].strip()
        for line in shown.splitlines()
        if line.split()[:1] == ["failure"]
    ] == ([] if isinstance(outcome, Ok) else [f"{outcome.kind}: {reason}"])


def test_a_missing_task_is_an_error(cli: Command, mesh: FakeMesh) -> None:
    result = cli("tasks", "show", "t-0", "--config", "mesh.yaml")
    assert (result.code, result.err.startswith("error: there is no task t-0 in the database")) == (
        1,
        True,
    )
    assert (mesh.opened, mesh.closed) == (1, 1)


def test_a_cancel_is_sent_to_the_agent_named_in_the_database(cli: Command, mesh: FakeMesh) -> None:
    result = cli("tasks", "cancel", "t-1", "--config", "mesh.yaml")
    assert (result.code, result.out) == (0, "asked travel to cancel t-1\n")
    assert mesh.seen["cancelled"] == ("travel", "t-1")
    assert mesh.seen["ended"] == [("travel", "t-1", None)]


def test_a_cancel_of_an_ended_task_is_refused(cli: Command, mesh: FakeMesh) -> None:
    mesh.tasks = [replace(WAITING, state=TaskState.COMPLETED)]
    result = cli("tasks", "cancel", "t-1", "--config", "mesh.yaml")
    assert (result.code, result.err) == (1, "error: task t-1 has already completed\n")
    assert "cancelled" not in mesh.seen


def test_a_cancel_with_its_agent_needs_no_database(cli: Command, mesh: FakeMesh) -> None:
    result = cli("tasks", "cancel", "t-7", "--agent", "echo", "--broker", "amqp://h/", "--json")
    assert (result.code, mesh.seen["cancelled"], mesh.opened) == (0, ("echo", "t-7"), 0)
    assert result.json == {"task_id": "t-7", "agent": "echo", "status": "cancel_sent"}


def test_a_database_is_checked_upgraded_and_checked_again(cli: Command, tmp_path: Path) -> None:
    shown = f"sqlite:///{tmp_path}/tasks.db"
    checked = cli("db", "check", "--config", "mesh.yaml")
    assert (checked.code, checked.out) == (2, "")
    assert checked.err.startswith(f"{shown}: has no tables, needs ")
    assert checked.err.endswith("; run: meshpoint db upgrade --config mesh.yaml\n")
    assert (
        cli("db", "upgrade", "--config", "mesh.yaml").out
        == f"{shown}: upgraded to revision {REVISION}\n"
    )
    assert (
        cli("db", "upgrade", "--config", "mesh.yaml").out
        == f"{shown}: already at revision {REVISION}\n"
    )
    assert (
        cli("db", "upgrade", "--db", "sqlite:///tasks.db", "--json").json["status"] == "up to date"
    )
    assert cli("db", "upgrade", "--db", "sqlite:///new.db", "--json").json["status"] == "upgraded"
    assert cli("db", "check", "--config", "mesh.yaml").code == 0
    output = cli("db", "check", "--db", "sqlite:///tasks.db", "--json").json
    assert (output["status"], output["revision"]) == ("up to date", output["newest"])


def test_a_database_is_downgraded_after_a_confirmation(cli: Command, tmp_path: Path) -> None:
    shown = f"sqlite:///{tmp_path}/tasks.db"
    cli("db", "upgrade", "--config", "mesh.yaml")
    declined = cli("db", "downgrade", "0004", "--config", "mesh.yaml")
    assert (declined.code, declined.out.strip()) == (1, "")
    assert f"{shown}: from revision {REVISION} to 0004" in declined.err
    printed = cli("db", "downgrade", "0004", "--sql", "--config", "mesh.yaml")
    assert "DROP TABLE agent_mesh_secrets" in printed.out
    assert cli("db", "check", "--config", "mesh.yaml").code == 0
    done = cli("db", "downgrade", "0004", "--yes", "--config", "mesh.yaml")
    assert (done.code, done.out) == (0, f"{shown}: downgraded to revision 0004\n")
    previous = cli("db", "downgrade", "--yes", "--config", "mesh.yaml", "--json")
    assert previous.json["revision"] == "0003"
    refused = cli("db", "downgrade", "0005", "--yes", "--config", "mesh.yaml")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_the_sql_of_an_upgrade_is_printed_and_not_run(cli: Command, tmp_path: Path) -> None:
    printed = cli("db", "sql", "--config", "mesh.yaml")
    assert (printed.code, "CREATE TABLE" in printed.out) == (0, True)
    assert "CREATE TABLE" in cli("db", "sql", "--db", "postgresql://h/mesh").out
    assert (tmp_path / "tasks.db").stat().st_size == 0


def test_a_database_that_does_not_answer_exits_with_3(cli: Command) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but without a listener
        result = cli(
            "db",
            "check",
            "--db",
            f"postgresql://u:secret@127.0.0.1:{closed.getsockname()[1]}/mesh",
        )
    assert (result.code, result.err.count("\n"), "secret" in result.err) == (3, 1, False)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@ss@h:5432/d", "postgresql://u@h:5432/d"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://h/d?user=u&password=p", "postgresql://h/d"),
        ("postgresql://u:p@h/d?password=p@p", "postgresql://u@h/d"),
        ("postgresql://h/d?password=p@p", "postgresql://…"),
        ("postgresql://u:p?p@h/d", "postgresql://…"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_a_password_is_never_printed(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_sweep_reports_what_it_did(cli: Command, mesh: FakeMesh) -> None:
    result = cli("sweep", "mesh.yaml")
    assert (result.code, "expired" in result.out, "taken" in result.out) == (0, True, False)
    assert cli("sweep", "mesh.yaml", "--json").json == {"expired": 3, "taken": 0}


def test_the_demo_command_passes_its_options_and_exit_code(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def run(**options: Any) -> int:
        seen.update(options)
        return 4

    monkeypatch.setattr("meshpoint.demo.run.run_demo", run)
    assert cli("demo", "--requests", "3", "--seed", "7", "--json").code == 4
    assert seen == {"broker_url": None, "db_url": None, "requests": 3, "seed": 7, "as_json": True}


def test_run_serves_all_agents_in_this_process(
    cli: Command, mesh: FakeMesh, tmp_path: Path
) -> None:
    result = cli("run", "mesh.yaml")
    assert (result.code, mesh.seen["served"]) == (0, ["travel", "flights", "echo"])
    assert sys.path[0] == str(tmp_path), "agents may be in the working directory"
    assert mesh.seen["metrics"] is None


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], MetricsAddress("127.0.0.1", 9464)),
        (["--metrics-host", "0.0.0.0"], MetricsAddress("0.0.0.0", 9464)),
    ],
)
def test_run_serves_metrics_only_on_this_machine_by_default(
    cli: Command, mesh: FakeMesh, arguments: list[str], address: MetricsAddress
) -> None:
    assert cli("run", "mesh.yaml", "--metrics-port", "9464", *arguments).code == 0
    assert mesh.seen["metrics"] == address


@pytest.mark.parametrize(
    ("arguments", "address", "interval"),
    [
        ([], MetricsAddress("127.0.0.1", 9464), 15),
        (
            ["--host", "0.0.0.0", "--port", "9000", "--interval", "60"],
            MetricsAddress("0.0.0.0", 9000),
            60,
        ),
    ],
)
def test_the_metrics_of_a_mesh_are_served_on_this_machine_by_default(
    cli: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    address: MetricsAddress,
    interval: int,
) -> None:
    seen: list[object] = []

    async def export(
        settings: Settings,
        address: MetricsAddress,
        *,
        interval: timedelta,
        stop: asyncio.Event,
    ) -> None:
        seen.extend([[each.name for each in settings.agents], address, interval])

    monkeypatch.setattr("meshpoint.wiring.export_metrics", export)
    assert cli("metrics", "mesh.yaml", *arguments).code == 0
    assert seen == [["travel", "flights", "echo"], address, timedelta(seconds=interval)]


def test_each_of_several_replicas_has_its_own_port(
    cli: Command, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def supervise(commands: list[list[str]]) -> int:
        mesh.seen["ports"] = [each[each.index("--metrics-port") + 1] for each in commands]
        return 0

    monkeypatch.setattr("meshpoint.cli.run._supervise", supervise)
    assert cli("run", "mesh.yaml", "--metrics-port", "9464", "-n", "3").code == 0
    assert mesh.seen["ports"] == ["9464", "9465", "9466"]


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("mesh: {namespace: demo}\n", [], "agents: none in mesh.yaml; add a section 'agent:'"),
        (
            "mesh: {broker_url: 'memory://'}\nagent: {name: a, entrypoint: 'm:a'}\n",
            ["-n", "2"],
            "processes cannot share",
        ),
        (
            "agent: {name: a, entrypoint: 'm:a'}\n",
            ["--log-level", "loud"],
            "--log-level: 'loud' is not a log level; use one of",
        ),
        (
            "agent: {name: a, entrypoint: 'm:a'}\n",
            ["--metrics-port", "65534", "-n", "3"],
            "--metrics-port: 3 replicas need the ports 65534 to 65536; use ports up to 65535",
        ),
    ],
)
def test_run_refuses_agents_that_cannot_be_served(
    cli: Command,
    mesh: FakeMesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.delenv("MESHPOINT_MESH__BROKER_URL")  # it would override the file
    (tmp_path / "mesh.yaml").write_text(content, encoding="utf-8")
    result = cli("run", "mesh.yaml", *arguments)
    assert (result.code, "served" in mesh.seen) == (2, False)
    assert said in result.err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"),
        (0.25, "250 ms"),
        (12, "12 s"),
        (119, "119 s"),
        (180, "3 min"),
        (7200, "2 h"),
        (172_800, "2 d"),
    ],
)
def test_durations_are_human_readable(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
