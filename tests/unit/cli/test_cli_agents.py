"""`meshpoint agents list` and `agents show`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_result import run_main
from meshpoint import AgentCard, AgentReplica, AgentSkill, Context, FoundAgent, agent, wiring
from meshpoint.cli import agents
from meshpoint.model.events import Event, Step
from meshpoint.settings import AgentSettings, MeshSettings, Settings

IMPORTED_AT = datetime.now(UTC)
BROKER = ("--broker", "amqp://nowhere/", "--namespace", "demo")


def a_replica(number: int, version: str, app_version: str | None = "2026.11") -> AgentReplica:
    started_at = IMPORTED_AT - timedelta(hours=5 * number)
    return AgentReplica(
        f"01941f29-7c00-7000-8000-00000000000{number}", started_at, version, app_version
    )


FLIGHTS = FoundAgent(
    AgentCard(
        name="flights",
        description="Find flights between two airports, and tell the price of each of them.\n\n"
        "Knows all airlines\x1b[2J.",
        version="2",
        input_schema={
            "type": "object",
            "properties": {"city": {"type": "string", "title": "Ro\u202eme"}},
        },
        skills=(AgentSkill(id="quote", name="Quote", description="Tell the price."),),
    ),
    (a_replica(1, "2"), a_replica(2, "2"), a_replica(3, "1", None)),
)
ECHO = FoundAgent(AgentCard(name="echo", version="1"), (a_replica(4, "1"),))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[FoundAgent]:
    """The agents that answer, whose replicas started hours before the test."""
    since_import = datetime.now(UTC) - IMPORTED_AT
    answers = [
        replace(
            agent,
            replicas=tuple(
                replace(each, started_at=each.started_at + since_import) for each in agent.replicas
            ),
        )
        for agent in (ECHO, FLIGHTS)
    ]

    async def find(mesh: Any, names: list[str], wait: float) -> list[FoundAgent]:
        return [each for each in answers if not names or each.card.name in names]

    monkeypatch.setattr(agents, "_find", find)
    return answers


LIST = """
 agent     version   replicas   description
 ──────────────────────────────────────────────────────────────────────────────
 echo      1                1   -
 flights   2, 1             3   Find flights between two airports, and tell the
                                price of each of them.
"""


def test_agents_are_listed_in_80_columns(
    found: list[FoundAgent], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.cli.output._PIPE_WIDTH", 80)
    result = run_main(["agents", "list", *BROKER], capsys)
    assert result.code == 0
    lines = [line.rstrip() for line in result.out.splitlines()]
    assert "\n".join(lines).strip("\n") == LIST.strip("\n")
    assert max(map(len, lines)) <= 80


SHOW = """
 agent         flights
 ──────────────────────────────────────────────────────────────────────────────
 version       2, 1
 description   Find flights between two airports, and tell the price of each of
               them.

               Knows all airlines [2J.
 skill quote   Tell the price.


 replica                                version   up for   app version
 ─────────────────────────────────────────────────────────────────────
 01941f29-7c00-7000-8000-000000000001   2         5 h      2026.11
 01941f29-7c00-7000-8000-000000000002   2         10 h     2026.11
 01941f29-7c00-7000-8000-000000000003   1         15 h     -

input: {
  "type": "object",
  "properties": {
    "city": {
      "type": "string",
      "title": "Ro\\u202eme"
    }
  }
}
output: any JSON
"""


def test_an_agent_is_shown_in_80_columns(
    found: list[FoundAgent], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.cli.output._PIPE_WIDTH", 80)
    result = run_main(["agents", "show", "flights", *BROKER], capsys)
    assert result.code == 0
    lines = [line.rstrip() for line in result.out.splitlines()]
    assert "\n".join(lines).strip("\n") == SHOW.strip("\n")
    assert max(map(len, lines)) <= 80


def test_an_agent_as_json(found: list[FoundAgent], capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_main(["agents", "show", "flights", "--json", *BROKER], capsys).json
    assert AgentCard.model_validate(shown["card"]) == FLIGHTS.card
    assert [replica["version"] for replica in shown["replicas"]] == ["2", "2", "1"]
    listed = run_main(["agents", "list", "--json", *BROKER], capsys).json
    assert [each["card"]["name"] for each in listed] == ["echo", "flights"]
    assert listed[1] == shown


def test_an_agent_that_does_not_answer_is_an_error(
    found: list[FoundAgent], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_main(["agents", "show", "trains", *BROKER], capsys)
    assert (result.code, result.out) == (1, "")
    assert "no replica of 'trains' answered in 2 s: none is running" in result.err


def test_an_empty_mesh(found: list[FoundAgent], capsys: pytest.CaptureFixture[str]) -> None:
    found.clear()
    result = run_main(["agents", "list", *BROKER], capsys)
    assert (result.code, result.out, result.err) == (0, "", "no agent answered in 2 s\n")
    assert run_main(["agents", "list", "--json", *BROKER], capsys).json == []


def test_a_broker_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_main(["agents", "list"], capsys)
    assert result.code == 2
    assert "--broker URL" in result.err


@agent("echo", skills=[AgentSkill(id="echo", name="Echo")])
async def echo(ctx: Context, text: str) -> str:
    """Return the text."""
    return text


class _Started:
    """An observer that waits for a replica."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def emit(self, event: Event) -> None:
        if event.step is Step.STARTED:
            self.started.set()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a SQLite broker, on which another thread serves `echo`."""
    url = f"sqlite:///{tmp_path}/mesh.db"
    monkeypatch.setitem(sys.modules, "cli_agents_echo", SimpleNamespace(echo=echo))
    settings = Settings(
        mesh=MeshSettings(broker_url=url, namespace="demo"),
        agents=(AgentSettings(name="echo", entrypoint="cli_agents_echo:echo"),),
    )
    observer, control = _Started(), SimpleNamespace()

    async def serve() -> None:
        control.loop, control.stop = asyncio.get_running_loop(), asyncio.Event()
        await wiring.serve(settings, observer=observer, stop=control.stop)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert observer.started.wait(60)
        yield url
    finally:
        control.loop.call_soon_threadsafe(control.stop.set)
        thread.join()


def test_a_served_agent_answers(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--broker", served, "--namespace", "demo", "--wait", "30", "--json")
    listed = run_main(["agents", "list", *options], capsys).json
    assert [each["card"]["name"] for each in listed] == ["echo"]
    shown = run_main(["agents", "show", "echo", *options], capsys).json
    assert shown["card"]["description"] == "Return the text."
    assert shown["card"]["inputSchema"] == {"type": "string"}
    assert len(shown["replicas"]) == 1
