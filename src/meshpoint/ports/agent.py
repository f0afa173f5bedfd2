"""The contract between Meshpoint and an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from pydantic import JsonValue

from meshpoint.model.calls import Done, Paused
from meshpoint.model.cards import AgentCard
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Outcomes
from meshpoint.model.subtasks import Migration
from meshpoint.model.tasks import WAITS_SUFFIX, has_log, logged_format, waits_format

_In_contra = TypeVar("_In_contra", contravariant=True)
_Out_co = TypeVar("_Out_co", covariant=True)


@runtime_checkable
class DurableAgent(Protocol[_In_contra, _Out_co]):
    """An agent whose tasks can wait in a database and resume in any replica.

    Pausing is a return value: `Paused` carries the peer calls and the state that the agent needs
    to continue. Between `start` and `resume` the task uses no memory, and the two may run in
    different replicas, even with different releases. One instance serves many tasks concurrently,
    so never keep task data on `self`.

    A segment may run more than once, because its replica may die before the result is committed.
    Make its side effects idempotent.
    """

    @property
    def name(self) -> str:
        """The agent's name in the mesh, used by its peers to call it."""

    @property
    def state_format(self) -> str:
        """The format of `Paused.state`, such as "travel/1".

        It is stored with the state and checked before `resume`.
        """

    async def start(
        self, ctx: TaskExecutionContext, request: _In_contra
    ) -> Paused | Done[_Out_co]:
        """Run the first segment of a task.

        Args:
            ctx: the task's execution context. Values set on it survive pauses.
            request: the input as received, as JSON. An agent with a declared input type validates
                it here.

        Returns:
            `Done` with an output that `pydantic_core.to_jsonable_python` accepts, or `Paused`.

        Raises:
            InvalidInput: the request does not match the declared input; the message names the
                field.
            InvalidOutput: the output does not match the declared output.
            Exception: the task fails, and the requester receives the error's message.
        """

    async def resume(
        self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes
    ) -> Paused | Done[_Out_co]:
        """Run the next segment of a task whose join is complete.

        Must be a pure function of `state` and `outcomes`: after a crash it runs again with the
        same values.

        Args:
            ctx: the context restored from `to_checkpoint_dict`. Token usage includes the peers'.
            state: `Paused.state`, byte for byte.
            outcomes: exactly one outcome per call, in call order. A call that failed, or that was
                closed by the join, is a `Failed`; it raises no exception.

        Raises:
            IncompatibleState: this version cannot continue the task. It is parked until another
                version tries it, or a person offers it again.
        """


@runtime_checkable
class MergesArtifacts(Protocol):
    """Optional protocol for agents that may leave out the artifacts of their peers' results."""

    @property
    def merge_artifacts(self) -> bool:
        """Whether they are added to the agent's own outcome. Default: yes."""


@runtime_checkable
class ReadsOlderStates(Protocol):
    """Optional protocol for agents that can resume states in formats other than their own."""

    @property
    def readable_formats(self) -> frozenset[str]:
        """All formats that `resume` can read, including `state_format`."""


@runtime_checkable
class ChecksInput(Protocol):
    """Optional protocol for agents that can check a request before a task begins."""

    def check_input(self, request: object) -> None:
        """Check a request, without running it.

        Args:
            request: as for `DurableAgent.start`.

        Raises:
            InvalidInput: as for `DurableAgent.start`.
        """


@runtime_checkable
class ServesVersions(Protocol):
    """Optional protocol for an object that serves several versions of one agent."""

    @property
    def versions(self) -> Sequence[DurableAgent[Any, Any]]:
        """The versions. The first takes new tasks."""

    def version_for(self, state_format: str) -> DurableAgent[Any, Any]:
        """The version that reads `state_format`; the first if none does."""


@runtime_checkable
class ReadsLog(Protocol[_Out_co]):
    """Optional protocol for agents whose pauses carry `Paused.append`."""

    async def resume_with_log(
        self, ctx: TaskExecutionContext, state: bytes, log: Sequence[bytes], outcomes: Outcomes
    ) -> Paused | Done[_Out_co]:
        """Run the next segment; called instead of `DurableAgent.resume`.

        Must be a pure function of `state`, `log` and `outcomes`.

        Args:
            ctx: as for `resume`.
            state: `Paused.state` of the last pause, byte for byte.
            log: `Paused.append` of each pause since the last one without it, oldest first. Empty
                if the last pause had none.
            outcomes: as for `resume`.

        Raises:
            IncompatibleState: as for `resume`.
        """


ResumeFrom: TypeAlias = Literal["start", "last-pause"]
"""Where an operation resumes: from its request, or at its last pause."""

RESUME_FROM = "resume_from"
"""Its key in the `agent_config` of checkpoints, which other processes read. Absent for "start"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An agent's description of its operations.

    Attributes:
        subtasks: expected subtasks, in order. Others are counted from when they start.
        version: stored in each checkpoint.
        migrations: steps that convert checkpoints of earlier versions to `version`.
        type: a label for people.
        exclusive: refuse to resume an operation while another operation of this agent is active.
        preserve: never delete this agent's checkpoints.
        config: the agent's configuration, such as its model, stored in each checkpoint.
        resume_from: where a failed or cancelled operation resumes, unless a person says it.
    """

    subtasks: tuple[str, ...] = ()
    version: str | None = None
    migrations: Sequence[Migration] = ()
    type: str = "agent"
    exclusive: bool = False
    preserve: bool = False
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    resume_from: ResumeFrom = "start"


@runtime_checkable
class HasPlan(Protocol):
    """Optional protocol for agents that describe their operations."""

    @property
    def plan(self) -> Plan: ...


@runtime_checkable
class HasCard(Protocol):
    """Optional protocol for agents that write their own card.

    Other agents get one from their name, version, docstring, types and `skills`.
    """

    @property
    def card(self) -> AgentCard:
        """What the agent's replicas answer to peers that discover it."""


@runtime_checkable
class WrapsLibrary(Protocol):
    """Optional protocol for agents whose class is not all of their code.

    With another library or source, the agent counts as another version, which tries parked tasks.
    """

    source_module: str | None
    """Name of the module that defines the agent, set if an entrypoint names it there."""

    @property
    def library(self) -> str:
        """The installed version of the library that runs the agent."""


@runtime_checkable
class HasLifespan(Protocol):
    """Optional protocol for agents that hold resources once per replica, such as clients."""

    @property
    def state_format(self) -> str:
        """As in `DurableAgent`."""

    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Entered before the first task of the replica, and left after the last one.

        What it yields is `ctx.resources` in each task. If entering it fails, the replica does not
        start. It may be entered several times in one process, once per replica.
        """


@runtime_checkable
class DiscoversPeers(Protocol):
    """Optional protocol for agents that use peers by name, known from their cards."""

    @property
    def peer_patterns(self) -> Sequence[str]:
        """Names and patterns of the peers that it may use: `*` stands for any characters."""


def list_versions(agent: DurableAgent[Any, Any]) -> Sequence[DurableAgent[Any, Any]]:
    """The versions that `agent` serves: only itself, unless it is a `ServesVersions`."""
    return agent.versions if isinstance(agent, ServesVersions) else (agent,)


def select_version(agent: DurableAgent[Any, Any], state_format: str) -> DurableAgent[Any, Any]:
    """The version of `agent` for tasks in `state_format`; the first if none reads it."""
    return agent.version_for(state_format) if isinstance(agent, ServesVersions) else agent


def get_plan(agent: DurableAgent[Any, Any]) -> Plan:
    """The plan that `agent` declares, or an empty `Plan`."""
    return agent.plan if isinstance(agent, HasPlan) else Plan()


def readable_formats(agent: DurableAgent[Any, Any]) -> frozenset[str]:
    """All stored formats that `agent` can resume from.

    These are its own and the older ones it declares, and each of them with waits, and with a log.
    """
    declared = agent.readable_formats if isinstance(agent, ReadsOlderStates) else frozenset[str]()
    formats = declared | {agent.state_format}
    plain = {each for each in formats if not has_log(each) and not each.endswith(WAITS_SUFFIX)}
    formats |= {waits_format(each) for each in plain}
    return formats | {logged_format(each) for each in formats if not has_log(each)}
