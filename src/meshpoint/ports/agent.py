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
    """An agent whose tasks can wait in a database and go on in any replica.

    Waiting is a return value: `Paused` hands over the calls and everything the agent wants to know when their
    outcomes are there. Between `start` and `resume` nothing of the task is in memory, and the two may run in
    different replicas, of different releases. One instance serves many tasks at once, so nothing of a task may be
    kept on `self`.

    A segment may run more than once: a replica may die before its result is committed. What a segment does to
    the outside must therefore bear repetition.
    """

    @property
    def name(self) -> str:
        """The agent's name in the mesh, which its peers call."""

    @property
    def state_format(self) -> str:
        """Names the form of `Paused.state`, such as "travel/1": stored beside it and compared before `resume`."""

    async def start(self, ctx: TaskExecutionContext, request: In_contra) -> Paused | Done[Out_co]:
        """Begin a task.

        Args:
            ctx: what is known of the task. What is set on it is kept over a pause.
            request: the input as it came, as JSON. An agent with a declared input validates it here.

        Returns:
            `Done` with an output that `pydantic_core.to_jsonable_python` accepts, or `Paused`.

        Raises:
            InvalidInput: the request does not fit; names the field.
            InvalidOutput: the output does not fit what the agent declares.
            Exception: the task fails, and the requester gets the message.
        """

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Paused | Done[Out_co]:
        """Go on with a task whose join is met.

        A pure function of `state` and `outcomes`: after a crash it runs again with the same ones.

        Args:
            ctx: what `to_checkpoint_dict` kept of the context; the tokens that the peers used are counted in.
            state: `Paused.state`, byte for byte.
            outcomes: exactly one outcome per call, in call order. A call that failed, or that the join closed, is
                a `Failed`; nothing is raised for it.

        Raises:
            IncompatibleState: this release cannot read `state`. The task is offered to other replicas, and after a
                limit parked for a person; it is never destroyed.
        """


@runtime_checkable
class ReadsOlderStates(Protocol):
    """Optional: an agent that resumes states written in other formats than its own."""

    @property
    def readable_formats(self) -> frozenset[str]:
        """Every format that `resume` can read, `state_format` included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an agent says of its operations.

    `subtasks` are those it expects to run, in order; others are counted when they begin. `version` is written into
    each checkpoint, and `migrations` lead from the versions of earlier ones to it. `type` is a word for people.
    `exclusive` refuses to resume an operation while another one of the agent is active. `preserve` exempts its
    checkpoints from every deletion.
    """

    subtasks: tuple[str, ...] = ()
    version: str | None = None
    migrations: Sequence[Migration] = ()
    type: str = "agent"
    exclusive: bool = False
    preserve: bool = False


@runtime_checkable
class Plans(Protocol):
    """Optional: an agent that says more of its operations than that they are some."""

    @property
    def plan(self) -> Plan: ...


def plan_of(agent: DurableAgent[Any, Any]) -> Plan:
    """What `agent` says of its operations."""
    return agent.plan if isinstance(agent, Plans) else Plan()


def readable_formats(agent: DurableAgent[Any, Any]) -> frozenset[str]:
    """The state formats `agent` can resume from: its own, and those it declares."""
    declared = agent.readable_formats if isinstance(agent, ReadsOlderStates) else frozenset[str]()
    return declared | {agent.state_format}
