"""One travel agent for every framework: a scripted model, peers, and tools of its own.

The model's script depends only on the messages, so any replica can continue it.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from pydantic import BaseModel, JsonValue

from meshpoint import Peer
from meshpoint.frameworks.base import FrameworkAgent


class Trip(BaseModel):
    city: str
    days: int = 2


class Quote(BaseModel):
    price: int


flights = Peer("flights", Trip, Quote, description="Finds a flight.", timeout=60)
hotels = Peer("hotels", Trip, Quote)
weather = Peer("weather", str, str)


TOKENS = 7
"""The output tokens of each answer of the model."""


@dataclass(frozen=True, slots=True)
class Use:
    """A call of a tool, by the model."""

    tool: str
    arguments: Mapping[str, JsonValue]
    id: str


@dataclass(frozen=True, slots=True)
class Says:
    """The model's text, or its calls of tools."""

    text: str = ""
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What the model has received for a call."""

    id: str
    tool: str
    text: str


Script = Callable[[int, Sequence[Result]], Says]
"""From the number of the model's earlier answers, and all results so far, to its next answer."""


@dataclass
class Journey:
    """A script, and what happened.

    `tools` are the agent's own tools, by name; each is called with its arguments. `pause` runs in
    each request to the model, and `meet` in each call of `visas`. `offered` are the descriptions
    of the tools in the latest request.
    """

    script: Script
    tools: Mapping[str, Callable[..., str]] = field(default_factory=dict)
    model_calls: list[int] = field(default_factory=list)
    seen: list[Result] = field(default_factory=list)
    tool_calls: Counter[str] = field(default_factory=Counter)
    offered: dict[str, str] = field(default_factory=dict)
    pause: Callable[[], Awaitable[None]] | None = None
    meet: Callable[[], Awaitable[None]] | None = None

    def answer(self, answers: int, results: Sequence[Result]) -> Says:
        """The model's next answer."""
        self.model_calls.append(answers + 1)
        self.seen = list(results)
        return self.script(answers, results)

    def use(self, tool: str, *arguments: Any) -> str:
        """Run a tool of the agent."""
        self.tool_calls[tool] += 1
        return self.tools[tool](*arguments)


class Framework(Protocol):
    """A framework under test."""

    def build(self, journey: Journey, **options: Any) -> FrameworkAgent[Trip, str]:
        """The travel agent. `options` are passed to `durable`, except `request_limit`.

        Its own tools are `visas(country: str)`, `clock()` and `book(offer: int)`; `book` requires
        approval.
        """

    def raw(self, journey: Journey) -> Any:
        """The agent by itself, as an entrypoint may name it."""

    def add_field(self, state: bytes) -> bytes:
        """The state with a field in its first message that only a later version knows."""


FRAMEWORKS = {
    "pydantic_ai": "pydantic_ai",
    "google_adk": "google.adk",
    "langgraph": "langgraph",
    "openai_agents": "agents",
    "agent_framework": "agent_framework",
    "strands": "strands",
}
"""The module that each framework installs, by the name of its adapter."""


def load_framework(name: str) -> Framework:
    """The framework with this name; the test is skipped if it is not installed."""
    pytest.importorskip(FRAMEWORKS[name])
    framework: Framework = importlib.import_module(f"with_{name}").FRAMEWORK
    return framework


def two_pauses(answers: int, results: Sequence[Result]) -> Says:
    """Four answers: two peers and a tool, a tool, a peer, the plan."""
    match answers:
        case 0:
            return Says(
                uses=(
                    Use("flights", {"city": "Rome", "days": 3}, "call-f"),
                    Use("clock", {}, "call-c"),
                    Use("weather", {"request": "Rome"}, "call-w"),
                )
            )
        case 1:
            return Says(uses=(Use("visas", {"country": "Italy"}, "call-v"),))
        case 2:
            return Says(uses=(Use("hotels", {"city": "Rome"}, "call-h"),))
    return Says(text=" | ".join(f"{each.tool}: {each.text}" for each in results))


TOOLS: dict[str, Callable[..., str]] = {
    "visas": lambda country: f"none for {country}",
    "clock": lambda: "noon",
    "book": lambda offer: f"booked {offer}",
}
