"""What only ADK has: sub-agents, apps, agents as tools, the session's state, and its callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel, PrivateAttr
from scenario import Quote, hotels, weather

pytest.importorskip("google.adk")

from google.adk.agents import BaseAgent, LlmAgent, ParallelAgent, SequentialAgent
from google.adk.apps import App
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from with_google_adk import results_of

from meshpoint import (
    ConfigurationError,
    Failed,
    MeshpointError,
    Ok,
    Peer,
    QuestionUpdate,
    TaskExecutionContext,
)
from meshpoint.frameworks import APPROVAL, Approval
from meshpoint.frameworks.google_adk import durable
from meshpoint.model.ids import TaskId
from meshpoint.testing import TestMesh

travel = Peer("travel", str, str)


class Spoken(BaseLlm):
    """A model that says what a function of its request returns."""

    model: str = "spoken"
    _say: Callable[[LlmRequest], Sequence[types.Part]] = PrivateAttr()
    _requests: list[LlmRequest] = PrivateAttr(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self._requests.append(llm_request.model_copy(deep=False))
        parts = list(self._say(llm_request))
        usage = types.GenerateContentResponseUsageMetadata(candidates_token_count=7)
        yield LlmResponse(content=types.Content(role="model", parts=parts), usage_metadata=usage)


def spoken(say: Callable[[LlmRequest], Sequence[types.Part]], name: str = "spoken") -> Spoken:
    model = Spoken(model=name)
    model._say = say
    return model


def requests_of(agent: LlmAgent) -> list[LlmRequest]:
    """The requests to the model of an agent."""
    assert isinstance(agent.model, Spoken)
    return agent.model._requests


def call(name: str, /, id: str | None = None, **arguments: Any) -> types.Part:
    return types.Part(function_call=types.FunctionCall(name=name, args=arguments, id=id))


def text(said: str) -> types.Part:
    return types.Part(text=said)


def answers(request: LlmRequest) -> list[str]:
    return [f"{each.tool}={each.text}" for each in results_of(request)]


def stubs(mesh: TestMesh) -> None:
    mesh.stub(weather).returns("sunny")
    mesh.stub(hotels).returns(Quote(price=80))


def ask_weather_then_tell(request: LlmRequest) -> list[types.Part]:
    got = [each for each in answers(request) if each.startswith("weather")]
    return [text(f"it is {got[-1]}")] if got else [call("weather", request="Rome")]


async def test_a_sub_agent_that_took_over_waits_for_a_peer() -> None:
    guide = LlmAgent(
        name="guide",
        description="Knows the weather.",
        model=spoken(ask_weather_then_tell, "small"),
    )
    root = LlmAgent(
        name="travel",
        model=spoken(lambda _: [call("transfer_to_agent", agent_name="guide")], "large"),
        sub_agents=[guide],
    )
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
        assert mesh.stub(weather).requests == ["Rome"]
    assert isinstance(outcome, Ok), outcome
    assert outcome.value == "it is weather=sunny"
    assert {m: t.output for m, t in outcome.usage.by_model.items()} == {"large": 7, "small": 14}


async def test_a_single_turn_sub_agent_waits_for_a_peer() -> None:
    guide = LlmAgent(
        name="guide",
        description="Knows the weather.",
        mode="single_turn",
        model=spoken(ask_weather_then_tell),
    )

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(got[-1])] if got else [call("guide", id="g", request="weather in Rome")]

    root = LlmAgent(name="travel", model=spoken(say), sub_agents=[guide])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == "guide=it is weather=sunny"
        assert mesh.stub(weather).requests == ["Rome"]
    assert len(requests_of(guide)) == 2


async def test_agents_in_sequence() -> None:
    first = LlmAgent(name="first", model=spoken(ask_weather_then_tell), output_key="forecast")
    second = LlmAgent(
        name="second",
        instruction="Use {forecast}.",
        model=spoken(lambda r: [text(str(r.config.system_instruction))]),
    )
    with pytest.warns(DeprecationWarning, match="in favor of Workflow"):
        root = SequentialAgent(name="travel", sub_agents=[first, second])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        result = await mesh.call(travel, "Rome?")
    assert "Use it is weather=sunny." in result


async def test_two_agents_that_wait_in_parallel_are_refused() -> None:
    agents: list[BaseAgent] = [
        LlmAgent(name=name, model=spoken(ask_weather_then_tell)) for name in ("a", "b")
    ]
    with pytest.warns(DeprecationWarning, match="in favor of Workflow"):
        root = ParallelAgent(name="travel", sub_agents=agents)
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "let only one wait" in outcome.message, outcome.message


@pytest.mark.filterwarnings("ignore:The `plugins` argument:DeprecationWarning")  # ADK's own use
@pytest.mark.parametrize("record", range(1, 6))
async def test_agents_as_tools_pay_no_model_twice(record: int) -> None:
    """Five steps are recorded, and the replica dies after one, two or all of them."""

    def guide_says(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(got[-1])] if got else [call("visas", country="Italy")]

    def visas(country: str) -> str:
        return f"none for {country}"

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(" ".join(got))] if got else [call("guide", request="a")]

    guide = LlmAgent(name="guide", model=spoken(guide_says), tools=[visas])
    root = LlmAgent(name="travel", model=spoken(say), tools=[AgentTool(guide)])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        mesh.crash(after="record", times=record)
        assert await mesh.call(travel, "Rome?") == "guide=visas=none for Italy"
    assert [len(requests_of(each)) for each in (root, guide)] == [2, 2]
    assert "weather" not in requests_of(guide)[0].tools_dict  # it could not wait


@pytest.mark.filterwarnings("ignore:The `plugins` argument:DeprecationWarning")  # ADK's own use
async def test_agents_as_tools_run_in_parallel() -> None:
    both = asyncio.Barrier(2)

    async def visas(country: str) -> str:
        await both.wait()
        return f"none for {country}"

    def guide_says(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(got[-1])] if got else [call("visas", country="Italy")]

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(" ".join(got))] if got else [call("guide", request=each) for each in "ab"]

    guide = LlmAgent(name="guide", model=spoken(guide_says), tools=[visas])
    root = LlmAgent(name="travel", model=spoken(say), tools=[AgentTool(guide)])
    async with TestMesh(durable(root, stream=False)) as mesh:
        result = await mesh.call(travel, "Rome?")
    assert result == "guide=visas=none for Italy guide=visas=none for Italy"


async def test_an_app_keeps_its_plugins_and_the_session_its_state() -> None:
    seen = list[str]()

    class Audit(BasePlugin):
        async def before_tool_callback(
            self, *, tool: Any, tool_args: Any, tool_context: Any
        ) -> None:
            seen.append(tool.name)

    def remember(city: str, tool_context: ToolContext) -> str:
        tool_context.state["city"] = city
        return "done"

    def say(request: LlmRequest) -> list[types.Part]:
        match answers(request):
            case []:
                return [call("remember", city="Rome")]
            case [_]:
                return [call("weather", request="Rome")]
        return [text(str(request.config.system_instruction))]

    root = LlmAgent(
        name="root", instruction="{user_name} is in {city?}.", model=spoken(say), tools=[remember]
    )
    app = App(name="travel", root_agent=root, plugins=[Audit("audit")])
    wrapped = durable(app, peers=[weather], stream=False, state=lambda ctx: {"user_name": "Ada"})
    for at in ("record", "checkpoint", "resume"):
        async with TestMesh(wrapped) as mesh:
            stubs(mesh)
            mesh.crash(after=at)
            assert "Ada is in Rome." in await mesh.call(travel, "Rome?")
    assert {"remember", "weather"} == set(seen)


async def test_tasks_do_not_share_the_state_that_they_begin_with() -> None:
    start: dict[str, Any] = {"noted": []}

    def note(tool_context: ToolContext) -> str:
        noted = tool_context.state["noted"]
        noted.append(1)
        return str(len(noted))

    def say(request: LlmRequest) -> list[types.Part]:
        return [text(results_of(request)[0].text)] if answers(request) else [call("note")]

    root = LlmAgent(name="travel", model=spoken(say), tools=[note])
    async with TestMesh(durable(root, stream=False, state=lambda ctx: start)) as mesh:
        assert [await mesh.call(travel, each) for each in "ab"] == ["1", "1"]


async def test_a_long_running_tool_asks_a_question() -> None:
    def sign(document: str) -> None:
        """Has a document signed."""

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(got[-1])] if got else [call("sign", document="visa")]

    root = LlmAgent(name="travel", model=spoken(say), tools=[LongRunningFunctionTool(sign)])
    async with TestMesh(durable(root, stream=False)) as mesh:
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                assert update.prompt == 'Run sign with {"document": "visa"}?'
                await mesh.complete(update.question_id, "signed")
        assert await task.result() == "sign=signed"


async def test_results_of_approved_tools_are_in_call_order() -> None:
    def book(offer: int) -> str:
        return f"booked {offer}"

    def clock() -> str:
        return "noon"

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        if got:
            return [text(" ".join(got))]
        return [call("book", offer=1), call("weather", request="Rome"), call("clock")]

    root = LlmAgent(
        name="travel",
        model=spoken(say),
        tools=[FunctionTool(book, require_confirmation=True), clock],
    )
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        task = await mesh.send(travel, "Rome?")
        async for update in task.updates():
            if isinstance(update, QuestionUpdate):
                await task.complete(APPROVAL, Approval(approved=True))
        assert await task.result() == "book=booked 1 weather=sunny clock=noon"


class Plan(BaseModel):
    city: str
    price: int


async def test_the_output_has_the_type_of_the_schema() -> None:
    def says(said: str) -> LlmAgent:
        model = spoken(lambda _: [text(said)])
        return LlmAgent(name="travel", model=model, output_schema=Plan)

    agents = [says('{"city": "Rome", "price": 7}'), says('{"city": "Rome"}')]
    with pytest.raises(ConfigurationError, match=r"has an output_schema; write output="):
        durable(agents[0])
    with pytest.raises(ConfigurationError, match="a str is not an agent or an App of ADK"):
        durable("gemini-flash")  # type: ignore[call-overload]  # the mistake
    good, bad = [durable(each, output=Plan, stream=False) for each in agents]
    async with TestMesh(good) as mesh:
        assert await mesh.call(good, "Rome?") == Plan(city="Rome", price=7)
    async with TestMesh(bad) as mesh:
        outcome = await (await mesh.send(bad, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "price: Field required" in outcome.message


async def test_an_error_of_the_model_fails_the_task() -> None:
    class Blocked(BaseLlm):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            yield LlmResponse(error_code="SAFETY", error_message="blocked")

    wrapped = durable(LlmAgent(name="travel", model=Blocked(model="blocked")))
    async with TestMesh(wrapped) as mesh:
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.message == "the model failed: SAFETY: blocked"


async def test_repeated_ids_of_a_model_are_told_apart() -> None:
    """Some models give two calls of a session the same id."""

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        if len(got) == 2:
            return [text(" ".join(got))]
        return [call("weather", id="same", request="Rome"), call("hotels", id="same", city="Rome")]

    root = LlmAgent(name="travel", model=spoken(say))
    async with TestMesh(durable(root, peers=[weather, hotels], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == 'weather=sunny hotels={"price":80}'


async def test_an_agent_does_not_see_the_ids_of_the_one_before() -> None:
    """ADK shows it the calls of other agents as text."""

    def asks(name: str, peer: str, **arguments: str) -> LlmAgent:
        def say(request: LlmRequest) -> list[types.Part]:
            got = answers(request)
            return [text(got[-1])] if got else [call(peer, id="same", **arguments)]

        return LlmAgent(name=name, model=spoken(say))

    agents: list[BaseAgent] = [
        asks("guide", "weather", request="Rome"),
        asks("clerk", "hotels", city="Rome"),
    ]
    with pytest.warns(DeprecationWarning, match="in favor of Workflow"):
        root = SequentialAgent(name="travel", sub_agents=agents)
    async with TestMesh(durable(root, peers=[weather, hotels], stream=False)) as mesh:
        stubs(mesh)
        assert await mesh.call(travel, "Rome?") == 'hotels={"price":80}'


async def test_a_tool_with_the_name_of_a_peer_is_refused() -> None:
    def weather_tool(request: str) -> str:
        return "rain"

    weather_tool.__name__ = "weather"
    root = LlmAgent(name="travel", model=spoken(ask_weather_then_tell), tools=[weather_tool])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        outcome = await (await mesh.send(travel, "Rome?")).outcome()
    assert isinstance(outcome, Failed)
    assert "the agent has a tool and a peer called 'weather'; rename the tool" in outcome.message


async def test_outside_a_task_the_agent_is_as_before() -> None:
    root = LlmAgent(name="travel", model=spoken(lambda _: [text("hello")]), tools=[])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        assert await mesh.call(travel, "Rome?") == "hello"
    runner = InMemoryRunner(root)
    runs = runner.session_service
    session = await runs.create_session(app_name=runner.app_name, user_id="ada")
    message = types.UserContent("Rome?")
    running = runner.run_async(user_id="ada", session_id=session.id, new_message=message)
    (said,) = [event.content async for event in running]
    assert said is not None
    assert said.parts == [text("hello")]
    assert "weather" not in requests_of(root)[-1].tools_dict


async def test_an_error_of_ours_that_adk_swallows_settles_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ADK makes any error of a sub-agent with one turn a result for the model."""

    class Unavailable(MeshpointError):
        """The task cannot continue here."""

    def visas(country: str) -> str:
        return "none"

    guide = LlmAgent(
        name="guide",
        mode="single_turn",
        model=spoken(lambda _: [call("visas", id="v", country="Italy")]),
        tools=[visas],
    )

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(got[-1])] if got else [call("guide", id="g", request="visas")]

    root = LlmAgent(name="travel", model=spoken(say), sub_agents=[guide])
    task = TaskExecutionContext(TaskId("task"))
    step = task.step

    async def fail(name: str, *arguments: Any) -> Any:
        if name.startswith("tool"):
            raise Unavailable("later")
        return await step(name, *arguments)

    monkeypatch.setattr(TaskExecutionContext, "step", lambda _, *arguments: fail(*arguments))
    with pytest.raises(Unavailable, match="later"):
        await durable(root, stream=False).start(task, "Rome?")
    (got,) = answers(requests_of(root)[-1])
    assert got.startswith("guide=Error running sub-agent")


async def test_a_sub_agent_with_a_task_waits_for_a_peer() -> None:
    def guide_says(request: LlmRequest) -> list[types.Part]:
        got = [each for each in answers(request) if each.startswith("weather")]
        return [call("finish_task", result=got[-1])] if got else [call("weather", request="Rome")]

    def say(request: LlmRequest) -> list[types.Part]:
        got = answers(request)
        return [text(got[-1])] if got else [call("guide", id="g", request="weather in Rome")]

    guide = LlmAgent(
        name="guide", description="Knows the weather.", mode="task", model=spoken(guide_says)
    )
    root = LlmAgent(name="travel", model=spoken(say), sub_agents=[guide])
    async with TestMesh(durable(root, peers=[weather], stream=False)) as mesh:
        stubs(mesh)
        assert "weather=sunny" in await mesh.call(travel, "Rome?")
        assert mesh.stub(weather).requests == ["Rome"]
