"""One agent in each framework, by itself and on Meshpoint: its model calls one tool N times.

By itself, the tool is a function. On Meshpoint it is a peer, and each call a pause. The fake
models are those of `tests/frameworks`, which must be on the import path.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from string import ascii_letters
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from benchmarks.rivals import job
from meshpoint import (
    Done,
    DurableAgent,
    Paused,
    Replies,
    StatefulAgent,
    TaskExecutionContext,
    agent,
)

NAME, PROMPT = "root", "Ask the peer."
_source = random.Random(3)


def _answer() -> str:
    """A new text as long as a rival's answer. A history of equal texts would compress well."""
    return "".join(_source.choices(ascii_letters, k=len(job.answer())))


@agent("peer")
async def peer(ctx: TaskExecutionContext, question: str) -> str:
    """Answers at once."""
    return _answer()


_OPTIONS: dict[str, Any] = {"name": NAME, "peers": [peer], "stream": False}


@dataclass(frozen=True, slots=True)
class FrameworkAgents:
    """The agent whose model makes a given number of calls: on Meshpoint, and a run without it."""

    durable: DurableAgent[Any, Any]
    run: Callable[[], Awaitable[str]]


def _journey(calls: int) -> Any:
    """The script of a model that makes `calls` calls, then answers."""
    scenario = import_module("scenario")

    def next_answer(answers: int, results: Sequence[Any]) -> Any:
        if len(results) < calls:
            use = scenario.Use("peer", {"request": job.QUESTION}, f"call-{len(results)}")
            return scenario.Says(uses=(use,))
        return scenario.Says(text=job.summary([each.text for each in results]))

    return scenario.Journey(next_answer)


def _tool_named_peer(decorate: Callable[[Any], Any]) -> Any:
    """The function that is the tool without Meshpoint, as a framework's decorator makes it one."""

    def peer(request: str) -> str:
        """Answers at once."""
        return _answer()

    return decorate(peer)


def _pydantic_ai(calls: int) -> FrameworkAgents:
    from pydantic_ai import Agent

    from meshpoint.frameworks.pydantic_ai import durable

    model = import_module("with_pydantic_ai").model_of(_journey(calls))
    bare = Agent(model, name=NAME, tools=[_tool_named_peer(lambda tool: tool)])

    async def run() -> str:
        return (await bare.run(PROMPT)).output

    return FrameworkAgents(durable(Agent(model, name=NAME), **_OPTIONS), run)


def _langgraph(calls: int) -> FrameworkAgents:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    from meshpoint.frameworks.langgraph import MeshpointDurability, durable

    model = import_module("with_langgraph").ScriptedModel(journey=_journey(calls))
    bare = create_agent(model, [_tool_named_peer(tool)], name=NAME)
    wrapped = create_agent(model, middleware=[MeshpointDurability()], name=NAME)

    async def run() -> str:
        given: Any = {"messages": [("user", PROMPT)]}
        ended: Any = await bare.ainvoke(given, {"recursion_limit": 3 * calls + 10})
        return str(ended["messages"][-1].text)

    return FrameworkAgents(durable(wrapped, output=str, **_OPTIONS), run)


def _google_adk(calls: int) -> FrameworkAgents:
    from google.adk.agents import LlmAgent
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    from meshpoint.frameworks.google_adk import durable

    model = import_module("with_google_adk").ScriptedModel.of(_journey(calls))
    bare = LlmAgent(name=NAME, model=model, tools=[_tool_named_peer(lambda tool: tool)])
    runner = InMemoryRunner(agent=bare, app_name="bench")

    async def run() -> str:
        session = await runner.session_service.create_session(
            app_name="bench", user_id="user", session_id=str(uuid4())
        )
        message = types.UserContent(parts=[types.Part(text=PROMPT)])
        text = ""
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=message
        ):
            text = "".join(
                part.text or "" for part in (event.content and event.content.parts) or ()
            )
        return text

    return FrameworkAgents(durable(LlmAgent(name=NAME, model=model), **_OPTIONS), run)


def _openai_agents(calls: int) -> FrameworkAgents:
    from agents import Agent, Runner, function_tool

    from meshpoint.frameworks.openai_agents import durable

    model = import_module("with_openai_agents").ScriptedModel(_journey(calls))
    bare = Agent(NAME, model=model, tools=[_tool_named_peer(function_tool)])

    async def run() -> str:
        result = await Runner.run(bare, PROMPT, max_turns=None)
        return str(result.final_output)

    wrapped: Any = durable(Agent(NAME, model=model), max_turns=None, **_OPTIONS)
    return FrameworkAgents(wrapped, run)


def _strands(calls: int) -> FrameworkAgents:
    from strands import Agent, tool
    from strands.agent.conversation_manager import NullConversationManager

    from meshpoint.frameworks.strands import durable

    model = import_module("with_strands").ScriptedModel(_journey(calls))
    tools = [_tool_named_peer(tool)]

    def build(**options: Any) -> Agent:
        return Agent(
            model,
            name=NAME,
            conversation_manager=NullConversationManager(),
            callback_handler=None,
            **options,
        )

    async def run() -> str:
        return str(await build(tools=tools).invoke_async(PROMPT))

    return FrameworkAgents(durable(build, **_OPTIONS), run)


def _agent_framework(calls: int) -> FrameworkAgents:
    from agent_framework import Agent, tool

    from meshpoint.frameworks.agent_framework import durable

    model = import_module("with_agent_framework").ScriptedModel(_journey(calls))
    bare: Any = Agent(model, name=NAME, tools=[_tool_named_peer(tool)])

    async def run() -> str:
        return str((await bare.run(PROMPT)).text)

    return FrameworkAgents(durable(Agent(model, name=NAME), **_OPTIONS), run)


MAKERS: Mapping[str, Callable[[int], FrameworkAgents]] = {
    "pydantic_ai": _pydantic_ai,
    "langgraph": _langgraph,
    "google_adk": _google_adk,
    "openai_agents": _openai_agents,
    "strands": _strands,
    "agent_framework": _agent_framework,
}
"""How to build the agents of each framework, by the name of its adapter."""


class _Answers(BaseModel):
    texts: list[str]


def plain_agent(calls: int) -> DurableAgent[Any, Any]:
    """An agent without a framework that makes `calls` calls, with a pause each."""

    class Plain(StatefulAgent[str, _Answers, str]):
        name = NAME

        async def on_request(self, ctx: TaskExecutionContext, prompt: str) -> Paused | Done[str]:
            return self._ask(_Answers(texts=[]))

        async def on_answer(
            self, ctx: TaskExecutionContext, memory: _Answers, replies: Replies
        ) -> Paused | Done[str]:
            return self._ask(_Answers(texts=[*memory.texts, replies.value("peer", peer.peer)]))

        def _ask(self, memory: _Answers) -> Paused | Done[str]:
            if len(memory.texts) == calls:
                return self.done(job.summary(memory.texts))
            return self.ask(memory, {"peer": peer.peer(job.QUESTION)}, then=self.on_answer)

    return Plain()
