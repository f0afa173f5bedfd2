"""The contract between Meshpoint and an agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Outcomes
from meshpoint.model.subtasks import Migration

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


@runtime_checkable
class DurableAgent(Protocol[In_contra, Out_co]):
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

    async def start(self, ctx: TaskExecutionContext, request: In_contra) -> Paused | Done[Out_co]:
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

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Paused | Done[Out_co]:
        """Run the next segment of a task whose join is complete.

        Must be a pure function of `state` and `outcomes`: after a crash it runs again with the
        same values.

        Args:
            ctx: the context restored from `to_checkpoint_dict`. Token usage includes the peers'.
            state: `Paused.state`, byte for byte.
            outcomes: exactly one outcome per call, in call order. A call that failed, or that was
                closed by the join, is a `Failed`; it raises no exception.

        Raises:
            IncompatibleState: this release cannot read `state`. Other replicas are offered the
                task; after a time limit it is parked for an operator. It is never destroyed.
        """


@runtime_checkable
class ReadsOlderStates(Protocol):
    """Optional protocol for agents that can resume states in formats other than their own."""

    @property
    def readable_formats(self) -> frozenset[str]:
        """All formats that `resume` can read, including `state_format`."""


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
    """

    subtasks: tuple[str, ...] = ()
    version: str | None = None
    migrations: Sequence[Migration] = ()
    type: str = "agent"
    exclusive: bool = False
    preserve: bool = False


@runtime_checkable
class Plans(Protocol):
    """Optional protocol for agents that describe their operations."""

    @property
    def plan(self) -> Plan: ...


def plan_of(agent: DurableAgent[Any, Any]) -> Plan:
    """The plan that `agent` declares, or an empty `Plan`."""
    return agent.plan if isinstance(agent, Plans) else Plan()


def readable_formats(agent: DurableAgent[Any, Any]) -> frozenset[str]:
    """All state formats that `agent` can resume from: its own and the older ones it declares."""
    declared = agent.readable_formats if isinstance(agent, ReadsOlderStates) else frozenset[str]()
    return declared | {agent.state_format}
