"""The agent that every framework's adapter builds on."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import JsonValue, TypeAdapter

from meshpoint.agents.peer import Addressable, Peer, make_peer
from meshpoint.errors import (
    AgentMisbehaved,
    ConfigurationError,
    IncompatibleState,
    InvalidInput,
    PeerFailed,
)
from meshpoint.frameworks.approval import APPROVAL, Approval, describe_call
from meshpoint.frameworks.budget import BUDGET, Budget, Exceeded, SegmentBudget, use_budget
from meshpoint.frameworks.conversation import ConversationLog
from meshpoint.frameworks.history import History, ToolCall, ToolCallKind, Turn, lost_part
from meshpoint.frameworks.peers import PeerTool, PeerTools
from meshpoint.frameworks.steps import SwallowedErrors
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.current_context import running_context
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.messages import is_agent_name
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome, Outcomes
from meshpoint.model.questions import Question
from meshpoint.model.waitable import Waitable
from meshpoint.ports.agent import Plan
from meshpoint.ports.conversations import Conversations

In = TypeVar("In")
Out = TypeVar("Out")

MakeLifespan: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]
"""Returns the resources of one replica; see `HasLifespan`."""

OnPeerFailure: TypeAlias = Literal["tell_model", "fail"]
"""Whether a peer's failure becomes an error of its tool, for the model, or fails the task."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a tool call that the task has waited for.

    `value` is JSON, or an `Approval` for a tool that requires one.
    """

    call: ToolCall
    outcome: Ok[Any] | Failed


class ToolWaits:
    """Turns tool calls into waits of a task, and outcomes into answers."""

    def __init__(self, tools: PeerTools, on_peer_failure: OnPeerFailure) -> None:
        self._tools = tools
        self._fails = on_peer_failure == "fail"

    def limit(self, ctx: TaskExecutionContext, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Mark the calls beyond the limit of one pause as refused."""
        limit = ctx._runtime.max_fan_out
        if limit is None or len(calls) <= limit:
            return list(calls)
        return [*calls[:limit], *(replace(call, is_refused=True) for call in calls[limit:])]

    def build(
        self,
        ctx: TaskExecutionContext,
        calls: Sequence[ToolCall],
        tools: Mapping[str, PeerTool],
        waits: Mapping[str, Waitable[Any]] | None = None,
    ) -> list[Waitable[Any]]:
        """The waits for the calls that are not refused, in their order.

        `tools` are the offered peers, and `waits` the waits of the agent's own code.
        """
        own, sent = waits or {}, [call for call in calls if not call.is_refused]
        return [own.get(call.id) or self._build(ctx, call, tools) for call in sent]

    def _build(
        self, ctx: TaskExecutionContext, call: ToolCall, tools: Mapping[str, PeerTool]
    ) -> Waitable[Any]:
        if call.kind is ToolCallKind.PEER:
            return tools[call.tool].call(call.arguments)
        prompt = describe_call(call.tool, call.arguments)
        question = APPROVAL if call.kind is ToolCallKind.APPROVAL else tool_question(call.tool)
        return ctx.wait_for(question, prompt=prompt)

    def read_all(self, calls: Sequence[ToolCall], outcomes: Sequence[Outcome]) -> list[Answer]:
        """One answer for each of `calls`. Refused calls have no outcome.

        Raises:
            IncompatibleState, PeerFailed: As for `read`.
        """
        left = iter(outcomes)
        return [
            _refuse(call) if call.is_refused else self.read(call, next(left)) for call in calls
        ]

    def read(self, call: ToolCall, outcome: Outcome) -> Answer:
        """The answer to `call`.

        Raises:
            IncompatibleState: This version of the agent does not have the peer.
            PeerFailed: A peer failed, and such a failure fails the task.
        """
        if call.kind is ToolCallKind.APPROVAL:
            return Answer(call, APPROVAL.read_outcome(outcome))
        if call.kind in (ToolCallKind.QUESTION, ToolCallKind.WAIT):
            return Answer(call, outcome)
        read = self._read_peer(call, outcome)
        if isinstance(read, Failed):
            if self._fails:
                raise PeerFailed(call.peer or call.tool, read)
            return Answer(call, read)
        return Answer(call, outcome)  # for the model, as it was sent

    def _read_peer(self, call: ToolCall, outcome: Outcome) -> Ok[Any] | Failed:
        if (tool := self._tools.known.get(call.tool)) is not None:
            return tool.peer.read(outcome)
        if call.is_discovered or self._tools.patterns:  # and perhaps gone by now
            return outcome
        raise IncompatibleState(f"it waits for {call.tool!r}, which is no longer a peer")


def tool_question(tool: str) -> Question[Any]:
    """The question whose answer is the result of a tool."""
    try:
        return Question(tool, TypeAdapter(JsonValue))
    except ConfigurationError:  # tools may have names that questions cannot have
        return Question("tool", TypeAdapter(JsonValue))


def _refuse(call: ToolCall) -> Answer:
    text = "too many calls in one turn, so this one was not made: make it in the next turn"
    return Answer(call, Failed(FailureKind.INVALID, text))


def failure_text(failed: Failed) -> str:
    """The text of a failure, for the model."""
    return f"{failed.kind.value}: {failed.message}" if failed.message else failed.kind.value


def is_approved(answer: Answer) -> tuple[bool, str]:
    """Whether a tool may run, and the text for the model if it may not."""
    if isinstance(answer.outcome, Failed):
        return False, failure_text(answer.outcome)
    approval: Approval = answer.outcome.value
    return approval.approved, approval.message or "The call was not approved."


class FrameworkAgent(ABC, Generic[In, Out]):
    """An agent of a framework as a `DurableAgent`.

    A segment runs the framework until the model has answered, or until it has called tools whose
    results the task must wait for. All of these are one pause. The next segment continues from the
    stored messages, so nothing is replayed across pauses; within a segment, model requests and
    tools are steps.
    """

    framework: ClassVar[str]
    """Name of the framework, part of the state format."""
    library_name: ClassVar[str] = ""
    """Precedes the writers in errors, with a space; empty if `library` has the name."""
    wait_hint: ClassVar[str] = (
        "a tool cannot wait: list its peers in durable(peers=[…]), so that the model calls them; "
        "for people, use the approvals of the framework"
    )
    """The error of code that awaits a peer, a question or a sleep. An adapter may replace it."""
    name: str
    plan: Plan
    source_module: str | None = None
    """See `WrapsLibrary`."""

    def __init__(
        self,
        name: str,
        *,
        version: str,
        input: Any,
        output: Any,
        prompt: Callable[[In], Any] | None,
        peers: Sequence[Addressable[Any, Any] | str],
        on_peer_failure: OnPeerFailure,
        description: str | None,
        budget: Budget | None = None,
        lifespan: MakeLifespan | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        key = f"durable({name!r})"
        if on_peer_failure not in ("tell_model", "fail"):
            raise ConfigurationError(
                key, f"on_peer_failure is {on_peer_failure!r}", 'write "tell_model" or "fail"'
            )
        if not version:
            raise ConfigurationError(key, "version is empty", 'write version="1"')
        if not isinstance(version, str):
            raise ConfigurationError(key, f"version is {version!r}", 'write version="1"')
        if not (prompt is None or callable(prompt)):
            raise ConfigurationError(key, f"prompt is {prompt!r}", "write prompt=lambda trip: …")
        if not (budget is None or isinstance(budget, Budget)):
            raise ConfigurationError(key, f"budget is {budget!r}", "write Budget(requests=30)")
        if not (lifespan is None or callable(lifespan)):
            raise ConfigurationError(key, f"lifespan is {lifespan!r}", "pass the function")
        if prompt is None and input is not str:
            raise ConfigurationError(key, "input= needs prompt=", "write prompt=lambda trip: …")
        if not is_agent_name(name):
            fix = f'write name="{_similar_name(name)}": letters, digits, "_" and "-", 63 at most'
            raise ConfigurationError(key, "its name cannot be the name of a queue", fix)
        self.name = name
        self.version, self.description, self._prompt = version, description, prompt
        self.state_format = f"{self.name}/{self.framework}/{version}"
        self.plan = Plan(version=version, resume_from="last-pause")
        self._input: DeclaredType[Any] = DeclaredType(input, f"{key}, input")
        self._output: DeclaredType[Any] = DeclaredType(output, f"{key}, output")
        self.tools = PeerTools(peers, use_setting=True)
        self.waits = ToolWaits(self.tools, on_peer_failure)
        self.budget, self._lifespan = budget, lifespan
        self._conversations = ConversationLog(
            conversations, self.state_format, self.library_name, self.find_damage
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version={self.version!r})"

    @property
    def peer(self) -> Peer[In, Out]:
        """This agent as a typed `Peer`, for its callers."""
        return make_peer(self.name, self._input, self._output, self.description)

    @property
    def peer_patterns(self) -> Sequence[str]:
        """The names and patterns of the peers that it discovers; see `DiscoversPeers`."""
        return self.tools.patterns

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Any]:
        """Check the store of conversations, and hold what `lifespan=` of `durable` returns.

        See `HasLifespan`. An adapter may extend it, for example to warm up its framework.

        Raises:
            ConfigurationError: The store refuses, for example a wrong password.
        """
        await self._conversations.check()
        async with nullcontext() if self._lifespan is None else self._lifespan() as resources:
            yield resources

    def find_damage(self, message: JsonValue) -> str | None:
        """Why a message of a conversation is none of the framework's, or `None`.

        An adapter whose framework accepts any object checks more.
        """
        return None if isinstance(message, dict) else "is no object"

    @property
    @abstractmethod
    def library(self) -> str:
        """The installed version of the framework, stored with each pause."""

    def refuse_history(self, history: History, problem: str) -> IncompatibleState:
        """The error for a history that this version of the library cannot use."""
        writers = ", ".join(sorted(history.libraries))
        return IncompatibleState(
            f"the history was written by {self.library_name}{writers}; {self.library} {problem}"
        )

    def check_complete(self, history: History, dump_again: Callable[[], list[Any]]) -> None:
        """Check that the messages, as another version has read them, have lost no part.

        Raises:
            IncompatibleState: A part would be lost.
        """
        if history.libraries == {self.library}:
            return
        if (lost := lost_part(history.messages, dump_again())) is not None:
            raise self.refuse_history(history, f"would lose {lost}")

    @abstractmethod
    async def run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Done[Out] | Turn:
        """Run the framework until its agent is done, or waits.

        Args:
            ctx: The context of the task.
            prompt: What the task begins with. `None` if it resumes.
            history: What the last pause has stored. Before the first one, only the messages of the
                conversation that the task continues, if any. Before it returns `Done`, an adapter
                with `conversations` calls `history.end`.
            answers: One for each of `history.calls`, in call order. Without calls, the next
                request to the model is due.

        Raises:
            IncompatibleState: The installed version of the framework cannot read the history.
        """

    def check_input(self, request: object) -> None:
        """Check that `request` fits the declared input; see `ChecksInput`."""
        self._read_input(request)

    def _read_input(self, request: object) -> Any:
        try:
            return self._input.read(request)
        except TypeMismatch as error:
            raise InvalidInput(f"input of {self.name}: {error}") from error

    async def start(
        self, ctx: TaskExecutionContext, request: In | JsonValue
    ) -> Paused | Done[Out]:
        """Run the first segment; see `DurableAgent`."""
        received = self._read_input(request)
        prompt = received if self._prompt is None else self._prompt(received)
        if (subtasks := ctx._runtime.subtasks) is not None:
            await subtasks.ensure_operation()  # a failed task can then resume at its last pause
        history = History()
        await self._conversations.start(ctx, history)
        return await self._run(ctx, prompt, history, ())

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[Out]:
        """Run the next segment; see `DurableAgent`."""
        return await self.resume_with_log(ctx, state, (), outcomes)

    async def resume_with_log(
        self, ctx: TaskExecutionContext, state: bytes, log: Sequence[bytes], outcomes: Outcomes
    ) -> Paused | Done[Out]:
        """Run the next segment; see `ReadsLog`."""
        history = History.read(state, log)
        waits = [call.tool for call in history.calls if not call.is_refused]
        if len(waits) != len(outcomes):
            raise IncompatibleState(f"it waits for {waits}, but has outcomes for {[*outcomes]}")
        received = [*outcomes.values()]
        if [call.kind for call in history.calls] == [ToolCallKind.BUDGET]:
            _extend_budget(history, history.calls[0], received[0])
        await self._conversations.restore(ctx, history)
        answers = self.waits.read_all(history.calls, received)
        return await self._run(ctx, None, history, answers)

    async def _run(
        self, ctx: TaskExecutionContext, prompt: Any, history: History, answers: Sequence[Answer]
    ) -> Paused | Done[Out]:
        # A replica has set it already.
        token = None if running_context.get() is ctx else running_context.set(ctx)
        ctx._runtime.wait_hint = self.wait_hint
        try:
            with use_budget(self.budget, ctx, history.budget_times) as spent, SwallowedErrors():
                turn = await self.run(ctx, prompt, history, answers)
        finally:
            if token is not None:
                running_context.reset(token)
        if spent is not None and spent.reached is not None:
            return self._ask_for_more(ctx, history, turn, spent, spent.reached)
        if isinstance(turn, Done):
            await self._conversations.end(ctx, history, turn, self.library)
            return turn
        if not turn.calls:
            raise AgentMisbehaved(f"{self.framework}: a turn without calls")
        marked = [self._mark_discovered(call) for call in turn.calls]
        turn = replace(turn, calls=self.waits.limit(ctx, marked))
        waits = self.waits.build(ctx, turn.calls, turn.tools, turn.waits)
        sent = [call for call in turn.calls if not call.is_refused]
        calls: list[Call] = [
            wait.as_call(f"{call.tool}.{index}")
            for index, (call, wait) in enumerate(zip(sent, waits, strict=True))
        ]
        return history.pause(turn, calls, self.library)

    def _mark_discovered(self, call: ToolCall) -> ToolCall:
        is_known = call.kind is not ToolCallKind.PEER or call.tool in self.tools.known
        return call if is_known else replace(call, is_discovered=True)

    def _ask_for_more(
        self,
        ctx: TaskExecutionContext,
        history: History,
        turn: Turn | Done[Out],
        spent: SegmentBudget,
        reached: Exceeded,
    ) -> Paused:
        """Pause until a person has decided about the budget."""
        if isinstance(turn, Done) or turn.calls:  # the framework has swallowed the error
            raise reached.error()
        wait = budget_question(ctx, spent.budget, reached)
        call = ToolCall("", BUDGET.name, ToolCallKind.BUDGET, asdict(reached))
        turn = replace(turn, calls=[call])
        return history.pause(turn, [wait.as_call(f"{BUDGET.name}.0")], self.library)


def _similar_name(name: object) -> str:
    """A name that is possible in the mesh, such as "triage_agent" for "Triage Agent"."""
    return re.sub("[^a-z0-9]+", "_", str(name).lower()).strip("_")[:63] or "travel"


def _extend_budget(history: History, call: ToolCall, outcome: Outcome) -> None:
    """Raise the budget if a person has approved it."""
    exceeded = Exceeded(**call.arguments)  # type: ignore[arg-type]  # as `asdict` wrote them
    history.budget_times, history.calls = read_allowed(exceeded, outcome), []


def budget_question(
    ctx: TaskExecutionContext, budget: Budget, exceeded: Exceeded
) -> Waitable[Approval]:
    """The question whether a task may use more."""
    return ctx.wait_for(BUDGET, prompt=exceeded.prompt, timeout=budget.timeout, allow=budget.allow)


def read_allowed(exceeded: Exceeded, outcome: Outcome) -> int:
    """How often the limits count from now on.

    Raises:
        BudgetExceeded: The request to continue was refused, or timed out.
    """
    answer = BUDGET.read_outcome(outcome)
    if isinstance(answer, Failed):
        raise exceeded.error(f"nobody has allowed more: {failure_text(answer)}")
    if not answer.value.approved:
        raise exceeded.error(answer.value.message or "a person has not allowed more")
    return exceeded.needed
