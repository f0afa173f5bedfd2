"""Model requests and tools of ADK as steps, and peers as its tools."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

from google.adk.agents import BaseAgent, LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.events import EventActions
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools._node_tool import NodeTool
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json, to_jsonable_python

from meshpoint.errors import AgentFailed, InvalidInput
from meshpoint.frameworks.arguments import refuse_arguments, storable_arguments
from meshpoint.frameworks.budget import check_budget, count_request
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.progress import show_text
from meshpoint.frameworks.steps import METADATA_KEY, record_step, recording_context, step_name
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.declared_type import first_problem
from meshpoint.model.usage import Tokens

_ORIGINAL = "_meshpoint_original"
"""Attribute of a recorded model or tool that holds the original."""
_PART = "$part"
"""Key that marks a part with media in a recorded result."""
_ToolT = TypeVar("_ToolT", BaseTool, BaseToolset)
_RESPONSES: TypeAdapter[list[LlmResponse]] = TypeAdapter(list[LlmResponse])

_scope: ContextVar[tuple[str, ...]] = ContextVar("meshpoint_google_adk_scope", default=())
"""The calls of agents as tools that the running code is part of."""


class Recorder(BasePlugin):
    """Records one run of an agent.

    ADK shows each agent to its plugins when it starts, however it is reached. ADK has a copy of
    the agent for each run, whose model and tools are replaced here.

    Args:
        peers: The peers.
        session_id: Id of the task's session. Agents as tools have others, and cannot wait.
        root: The agent whose requests to the model have the plain name "model".
        offered_to: Names of the agents that may call peers.
        stream: Whether to send the text of the model to the task's callers.
        requests: The requests to models before this run.
        max_requests: Maximum requests of the whole task. 0 or less: any number.
        used_ids: The ids of the calls in the session. A request may not show all of them.

    Attributes:
        requests: The requests to models so far.
        offered: The peers that a model was offered last, by the names of their tools.
        shown: The validated arguments of calls that wait for approval, by the ids of the calls.
        approved: The arguments that a person has approved, by the ids of the calls.
        refused: Messages for the model, by the ids of calls that a person has refused.
    """

    def __init__(
        self,
        peers: PeerTools,
        *,
        session_id: str,
        root: str,
        offered_to: frozenset[str],
        stream: bool,
        requests: int,
        max_requests: int,
        used_ids: Iterable[str],
    ) -> None:
        super().__init__("meshpoint")
        self.requests, self._max_requests = requests, max_requests
        self._session_id, self._root, self._offered_to = session_id, root, offered_to
        self._peers, self._stream = peers, stream
        self._offering, self._used_ids = asyncio.Lock(), set(used_ids)
        self.offered: Mapping[str, PeerTool] = peers.known
        self.shown: dict[str, dict[str, JsonValue]] = {}
        self.approved: dict[str, dict[str, JsonValue]] = {}
        self.refused: dict[str, str] = {}

    async def before_agent_callback(
        self, *, agent: BaseAgent, callback_context: CallbackContext
    ) -> None:
        """Replace the model and the tools of an agent that starts."""
        if isinstance(agent, LlmAgent):
            agent.model = self._record_model(agent.canonical_model, agent.name)
            agent.tools = [self._record_tools(each) for each in agent.tools]

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Count the request, and offer the peers.

        Raises:
            AgentFailed: The limit of requests is reached, or the budget.
            BudgetReached: A person must allow more.
            ConfigurationError: A typed peer has the name of another tool.
        """
        task = recording_context()
        if task is None:
            return
        check_budget()
        if 0 < self._max_requests <= self.requests:
            raise AgentFailed(f"the limit of {self._max_requests} requests to models is reached")
        self.requests += 1
        can_wait = callback_context.session.id == self._session_id
        if not can_wait or callback_context.agent_name not in self._offered_to:
            return
        own = llm_request.tools_dict
        self._peers.check_names(own)
        async with self._offering:  # agents may run in parallel
            self.offered = await self._peers.offer(task, own.__contains__)
        llm_request.append_tools([_Peer(each) for each in self.offered.values()])

    async def after_tool_callback(
        self,
        *,
        tool: BaseTool,
        tool_args: dict[str, Any],
        tool_context: ToolContext,
        result: dict[str, Any],
    ) -> dict[str, Any] | None:
        """Give the model the reason why a person has refused a call."""
        message = self.refused.get(tool_context.function_call_id or "")
        return None if message is None else {"error": message}

    def _record_model(self, model: BaseLlm, agent: str) -> BaseLlm:
        original: BaseLlm = model.__dict__.get(_ORIGINAL, model)
        name = () if agent == self._root else (agent,)

        async def generate(
            llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            task, scope = recording_context(), _scope.get()
            if task is None:
                async for response in original.generate_content_async(llm_request, stream=stream):
                    yield response
                return

            async def request() -> JsonValue:
                shows = self._stream and not scope
                responses = await _request(task, original, llm_request, shows)
                _set_ids(responses, self._used_ids, f"adk-{agent}-{number}")
                for call in (each for it in responses for each in it.get_function_calls()):
                    call.args = storable_arguments(call.args)
                return _dump_responses(responses)

            number = self.requests

            _sort_results(llm_request.contents)
            recorded = await record_step(task, step_name("model", *scope, *name), request)
            for response in _RESPONSES.validate_json(to_json(recorded)):
                self._used_ids.update(call.id for call in response.get_function_calls() if call.id)
                yield response

        # ADK checks the class of a model, so this one keeps it.
        recorded = model.model_copy()
        recorded.__dict__.update({_ORIGINAL: original, "generate_content_async": generate})
        return recorded

    def _record_tools(self, tools: Any) -> Any:
        """Replace a tool, a function or a toolset."""
        original = getattr(tools, _ORIGINAL, tools)
        if isinstance(original, BaseToolset):
            return self._record_toolset(original)
        if isinstance(original, BaseTool):
            return self._record_tool(original)
        return self._record_tool(FunctionTool(original)) if callable(original) else original

    def _record_toolset(self, toolset: BaseToolset) -> BaseToolset:
        async def get_tools(*arguments: Any, **options: Any) -> list[BaseTool]:
            return [
                self._record_tool(each) for each in await toolset.get_tools(*arguments, **options)
            ]

        return _replace(toolset, get_tools=get_tools)

    def _record_tool(self, tool: BaseTool) -> BaseTool:
        if (tool.custom_metadata or {}).get(METADATA_KEY) is False:
            return tool
        if isinstance(tool, AgentTool | NodeTool):
            return _replace(tool, run_async=partial(_run_agent, tool))
        recorded = _RecordedTool(tool, self)
        return _replace(
            tool, run_async=recorded.run, check_require_confirmation=recorded.needs_approval
        )


def _replace(tool: _ToolT, **methods: Any) -> _ToolT:
    """A copy of a tool or a toolset with other methods."""
    replaced = copy.copy(tool)
    vars(replaced).update({_ORIGINAL: tool, **methods})
    return replaced


class _Peer(BaseTool):
    """A peer as a tool. A call with arguments that fit stays open."""

    def __init__(self, peer: PeerTool) -> None:
        super().__init__(name=peer.name, description=peer.description, is_long_running=True)
        self._peer = peer

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name,
            description=self.description,
            parameters_json_schema=self._peer.schema,
        )

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        """Check the arguments. An error goes back to the model."""
        if (problem := refuse_arguments(args)) is not None:
            return {"error": problem}
        try:
            self._peer.check(args)
        except InvalidInput as error:
            return {"error": str(error)}
        return None


async def _run_agent(tool: BaseTool, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
    """Run an agent that is a tool. Its own requests and tools are steps."""
    token = _scope.set((*_scope.get(), tool_context.function_call_id or tool.name))
    try:
        return await tool.run_async(args=args, tool_context=tool_context)
    finally:
        _scope.reset(token)


class _RecordedTool:
    """Runs a tool as a step, with what it does to the session."""

    def __init__(self, tool: BaseTool, recorder: Recorder) -> None:
        self._tool, self._recorder = tool, recorder

    async def needs_approval(self, args: dict[str, Any], tool_context: ToolContext) -> bool:
        """Whether a person must approve the call. The arguments must fit."""
        if refuse_arguments(args) is not None:
            return False
        if not await self._tool.check_require_confirmation(args, tool_context):
            return False
        if (call := tool_context.function_call_id) is not None:
            with suppress(ValidationError):
                self._recorder.shown[call] = _validate(self._tool, args)
        return call in self._recorder.shown

    async def run(self, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
        """Run the tool, or return its recorded result."""
        task, call = recording_context(), tool_context.function_call_id or ""
        if task is None:
            return await self._tool.run_async(args=args, tool_context=tool_context)
        if (problem := refuse_arguments(args)) is not None:
            return {"error": problem}
        if call in self._recorder.approved:
            args = dict(self._recorder.approved[call])
        elif await self._tool.check_require_confirmation(args, tool_context):
            try:  # it does not wait for approval, so the arguments do not fit
                _validate(self._tool, args)
            except ValidationError as error:
                return {"error": f"invalid arguments: {first_problem(error)}"}
        has_run = False

        async def run() -> JsonValue:
            nonlocal has_run
            has_run = True
            result = await self._tool.run_async(args=args, tool_context=tool_context)
            actions = tool_context.actions.model_dump(
                mode="json", by_alias=True, exclude_none=True, exclude_defaults=True
            )
            return {"result": _dump_result(result), "actions": actions}

        name = step_name("tool", *_scope.get(), self._tool.name, call)
        recorded: Any = await record_step(task, name, run)
        if not has_run:
            _repeat_actions(recorded["actions"], tool_context)
        return _read_result(recorded["result"])


def _repeat_actions(recorded: JsonValue, tool_context: ToolContext) -> None:
    actions = EventActions.model_validate_json(to_json(recorded))
    tool_context.state.update(actions.state_delta)
    for name in actions.model_fields_set - {"state_delta"}:
        setattr(tool_context.actions, name, getattr(actions, name))


def _dump_result(result: Any) -> JsonValue:
    """Convert a tool's result to JSON. ADK takes parts with media out of the containers."""
    if isinstance(result, types.Part):
        return {_PART: result.model_dump(mode="json", exclude_none=True)}
    if isinstance(result, dict):
        return {str(key): _dump_result(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [_dump_result(each) for each in result]
    dumped: JsonValue = to_jsonable_python(result)
    return dumped


def _read_result(recorded: JsonValue) -> Any:
    if isinstance(recorded, list):
        return [_read_result(each) for each in recorded]
    if not isinstance(recorded, dict):
        return recorded
    if recorded.keys() == {_PART}:
        return types.Part.model_validate_json(to_json(recorded[_PART]))
    return {key: _read_result(value) for key, value in recorded.items()}


@lru_cache
def _parameter_type(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(get_type_hints(function)[name])
    except Exception:  # ADK accepts any annotation
        return TypeAdapter(Any)


def _validate(tool: BaseTool, args: Mapping[str, Any]) -> dict[str, JsonValue]:
    """The arguments of a function as its parameters read them, as JSON.

    Raises:
        ValidationError: They do not fit.
    """
    if not isinstance(tool, FunctionTool):
        return dict(args)
    adapters = {name: _parameter_type(tool.func, name) for name in args}
    read = {name: adapter.validate_python(args[name]) for name, adapter in adapters.items()}
    shown: dict[str, JsonValue] = to_jsonable_python(read, round_trip=True)
    # What JSON does not keep, such as a secret, is shown as the model wrote it.
    for name, adapter in adapters.items():
        try:
            is_kept = bool(adapter.validate_python(shown[name]) == read[name])
        except ValidationError:
            is_kept = False
        if not is_kept:
            shown[name] = args[name]
    return shown


async def _request(
    task: TaskExecutionContext, model: BaseLlm, request: LlmRequest, shows_text: bool
) -> list[LlmResponse]:
    """Ask a model. The responses have no fragments."""
    responses = []
    usage, version, has_shown = None, None, False
    async for response in model.generate_content_async(request, stream=shows_text):
        usage, version = response.usage_metadata or usage, response.model_version or version
        if shows_text and (response.partial or not has_shown):
            has_shown = await _show_text(task, response) or has_shown
        if not response.partial:
            responses.append(response)
    tokens = Tokens()
    if usage is not None:
        tokens = Tokens(
            input=usage.prompt_token_count or 0,
            output=(usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
            cached=usage.cached_content_token_count or 0,
        )
    count_request(task, version or model.model, tokens)
    return responses


def _set_ids(responses: Sequence[LlmResponse], used: Collection[str], prefix: str) -> None:
    """Give new ids to calls without an id, and to calls that repeat an id in `used` or here.

    ADK does not send ids with its prefix, "adk-", to a model.
    """
    taken = set(used)
    calls = (call for response in responses for call in response.get_function_calls())
    for index, call in enumerate(calls):
        if not call.id or call.id in taken:
            call.id = f"{prefix}-{index}"
            while call.id in taken:  # a model may have chosen this one
                call.id += "-"
        taken.add(call.id)


async def _show_text(task: TaskExecutionContext, response: LlmResponse) -> bool:
    parts = (response.content.parts if response.content else None) or ()
    text = "".join(part.text for part in parts if part.text and not part.thought)
    await show_text(task, text)
    return bool(text)


def _dump_responses(responses: list[LlmResponse]) -> JsonValue:
    dumped: JsonValue = _RESPONSES.dump_python(
        responses, mode="json", by_alias=True, exclude_none=True
    )
    return dumped


def _sort_results(contents: Sequence[types.Content]) -> None:
    """Put the results of each turn into call order. ADK adds results of approved tools last."""
    for turn, answer in pairwise(contents):
        calls = [part.function_call for part in turn.parts or () if part.function_call]
        results = [part for part in answer.parts or () if part.function_response]
        if not calls or len(results) != len(answer.parts or ()):
            continue
        places: dict[str | None, int] = {}
        for place, call in enumerate(calls):
            places.setdefault(call.id or call.name, place)

        def place_of(part: types.Part, places: Mapping[str | None, int] = places) -> int:
            response = part.function_response
            assert response is not None
            return places.get(response.id or response.name, len(places))

        answer.parts = sorted(results, key=place_of)
