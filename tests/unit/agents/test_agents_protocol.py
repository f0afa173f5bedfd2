"""The agent protocol, and how an entrypoint resolves to an agent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_samples import create_context, travel

from meshpoint import (
    ConfigurationError,
    Done,
    DurableAgent,
    Outcomes,
    Paused,
    TaskExecutionContext,
    load_agent,
)
from meshpoint.ports.agent import readable_formats

MODULE = """
from typing import Any
from meshpoint import Done, StatefulAgent, TaskExecutionContext, agent

@agent("travel")
async def travel(ctx: TaskExecutionContext, days: int) -> int:
    return days

class Stateful(StatefulAgent[int, int, int]):
    name = "stateful"
    async def on_request(self, ctx, request):
        return self.done(request)

class Unfinished(StatefulAgent[int, int, int]):
    name = "unfinished"

class Broken(StatefulAgent[int, int, int]):
    name = "broken"
    def __init__(self): raise ConnectionError("no model server")
    async def on_request(self, ctx, request): ...

class Plain:
    name = "plain"
    state_format = "plain/1"
    async def start(self, ctx, request): return Done(request)
    async def resume(self, ctx, state, outcomes): return Done(None)

class Sync(Plain):
    def start(self, ctx, request): return Done(request)

class Spaced(Plain):
    name = "a name"

plain, sync, spaced = Plain(), Sync(), Spaced()
number = 7
async def function(ctx, request): ...
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with an agent and with modules that cannot be imported."""
    package = tmp_path / "some_agents"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text(MODULE)
    (package / "needy.py").write_text("import nowhere_to_be_found.at_all")
    (package / "failing.py").write_text("1 / 0")
    (package / "misconfigured.py").write_text(
        "from meshpoint import agent\n@agent('an x')\nasync def x(ctx, y): ..."
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "some_agents"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("attribute", "name"), [("travel", "travel"), ("Stateful", "stateful"), ("plain", "plain")]
)
async def test_agents_of_every_kind_are_found(attribute: str, name: str) -> None:
    found = load_agent(f"some_agents.good:{attribute}")
    assert isinstance(found, DurableAgent)
    assert found.name == name
    assert await found.start(create_context(), 5) == Done(5)


@pytest.mark.parametrize(
    ("entrypoint", "problem", "fix"),
    [
        ("some_agents.good", "is not an entrypoint", "package.module:attribute"),
        (":travel", "is not an entrypoint", "package.module:attribute"),
        (".good:travel", "is not an entrypoint", "package.module:attribute"),
        ("some_agents.god:travel", "no module named 'some_agents.god'", "PYTHONPATH"),
        ("no_agents.good:travel", "no module named 'no_agents'", "PYTHONPATH"),
        (
            "some_agents.needy:travel",
            "some_agents.needy imports 'nowhere_to_be_found'",
            "install what provides",
        ),
        (
            "some_agents.failing:x",
            "failed with ZeroDivisionError",
            "python -c 'import some_agents.failing'",
        ),
        ("some_agents.good:travle", "has no 'travle'", "write some_agents.good:travel"),
        ("some_agents.good:zzz", "has no 'zzz'", "write some_agents.good:travel"),
        ("some_agents.good:Plain", "is a class", "name an instance"),
        (
            "some_agents.good:Unfinished",
            "cannot be instantiated without arguments",
            "complete the class",
        ),
        (
            "some_agents.good:Broken",
            "failed with ConnectionError: no model server",
            "name an instance",
        ),
        (
            "some_agents.good:number",
            "is not an agent: its type is int",
            "name, state_format, start, resume",
        ),
        (
            "some_agents.good:function",
            "is not an agent: its type is function",
            'put the decorator @agent("function") on',
        ),
        ("some_agents.good:sync", "start is not an async method", "async def start"),
    ],
)
def test_an_object_that_is_not_an_agent_is_refused_with_the_reason(
    entrypoint: str, problem: str, fix: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_agent(entrypoint)
    assert caught.value.key == "agent.entrypoint"
    assert problem in caught.value.problem
    assert fix in caught.value.fix


def test_an_error_raised_by_the_module_is_not_hidden() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^agent\.name: 'an x' is not a valid agent name"
    ):
        load_agent("some_agents.misconfigured:x")
    with pytest.raises(ConfigurationError, match=r"agent\.name"):
        load_agent("some_agents.good:spaced")


class Echo:
    """The smallest valid agent."""

    name = "echo"
    state_format = "echo/2"

    async def start(self, ctx: TaskExecutionContext, request: str) -> Paused | Done[str]:
        return Done(request)

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[str]:
        return Done(state.decode())


class LongLivedEcho(Echo):
    readable_formats = frozenset({"echo/1"})


def test_an_agent_reads_its_own_format_and_those_it_declares() -> None:
    echo: DurableAgent[str, str] = Echo()
    assert readable_formats(echo) == {"echo/2", "echo/2+log", "echo/2+waits", "echo/2+waits+log"}
    assert readable_formats(LongLivedEcho()) >= {"echo/1", "echo/1+log", "echo/2"}
    assert readable_formats(travel) >= {"travel/function/3", "travel/function/3+log"}
