"""A connection to the mesh, from outside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, Unpack, overload

from meshpoint.agents.peer import Addressable, Peer, PeerCall, untyped_peer
from meshpoint.client.found_agents import FoundAgent
from meshpoint.client.requests import SendOptions, check_request, check_task_id
from meshpoint.client.task_handle import TaskHandle
from meshpoint.client.transport import Transport
from meshpoint.errors import InvalidInput, InvalidOption, NotJson
from meshpoint.model.calls import to_timedelta
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import truncate_reason, validate_agent_name
from meshpoint.model.retry_policy import Duration, duration_problem

In = TypeVar("In")
Out = TypeVar("Out")

RESULT_TTL = timedelta(days=7)
"""How long agents keep the outcomes of tasks that `Mesh.send` starts."""

_ANSWER: DeclaredType[Any] = DeclaredType(Any, "answer")
_ANSWER.name = "answer"


class Mesh:
    """A connection to the mesh for services, scripts and tests; from `meshpoint.connect`.

    One connection serves a whole process. It keeps in memory only the open tasks that have a
    handle or that someone awaits. After an outage of the broker it reconnects by itself.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"Mesh(name={self.name!r})"

    @property
    def name(self) -> str:
        """The name under which requests are sent."""
        return self._transport.name

    @overload
    async def send(
        self, agent: str, request: object, /, **options: Unpack[SendOptions]
    ) -> TaskHandle[Any]: ...

    @overload
    async def send(
        self, agent: Addressable[In, Out], request: In, /, **options: Unpack[SendOptions]
    ) -> TaskHandle[Out]: ...

    async def send(
        self,
        agent: Addressable[Any, Any] | str,
        request: object,
        /,
        **options: Unpack[SendOptions],
    ) -> TaskHandle[Any]:
        """Start a task. Returns when the broker has stored the request.

        An agent with a database keeps the outcome for 7 days after the end, for `Mesh.task`.

            task = await mesh.send(travel, Trip(city="Rome"), timeout=timedelta(hours=1))

        Args:
            agent: A `Peer`, an agent, or a name. With a name, the input is anything that can
                become JSON, and the result is JSON.
            request: The input, validated before it is sent.
            options: See `SendOptions`.

        Raises:
            InvalidInput: The input does not fit the declared type, or is too large for the broker.
            InvalidOption: An option is invalid or unknown.
            NotJson: `metadata` is not JSON.
            UnknownAgent: No replica has ever served the agent in this namespace.
            QueueFull: The agent's request queue is full; try again later.
            SendInDoubt: The broker did not confirm the request. Repeating it with the same id and
                input is safe.
            TaskExists: A task with this id exists, with `if_exists="reject"`.
            MeshClosed: The connection was closed.
        """
        return await self._send(agent, request, options, result_ttl=RESULT_TTL)

    async def _send(
        self,
        agent: Addressable[Any, Any] | str,
        request: object,
        options: Mapping[str, Any],
        result_ttl: timedelta | None,
    ) -> TaskHandle[Any]:
        peer = _resolve_peer(agent)
        try:
            input_ = peer.write(request)
        except TypeMismatch as error:
            raise InvalidInput(f"input for {peer.name!r}: {error}") from error
        checked = check_request(AgentName(peer.name), input_, options, peer.timeout)
        kept = replace(checked, result_ttl=result_ttl)
        return TaskHandle(await self._transport.send(kept), peer, self._transport)

    @overload
    async def call(
        self, agent: str, request: object, /, **options: Unpack[SendOptions]
    ) -> Any: ...

    @overload
    async def call(
        self, agent: Addressable[In, Out], request: In, /, **options: Unpack[SendOptions]
    ) -> Out: ...

    async def call(
        self,
        agent: Addressable[Any, Any] | str,
        request: object,
        /,
        **options: Unpack[SendOptions],
    ) -> Any:
        """Start a task and return its result: like `send`, then `TaskHandle.result`.

        The outcome is not kept for other connections, unless the task has paused.

        Raises:
            TaskFailed: The task has no result. `TaskTimeout` and `TaskCancelled` are subclasses.
            MeshpointError: As for `send`.
        """
        task = await self._send(agent, request, options, result_ttl=None)
        return await task.result()

    async def complete(self, question_id: str, value: object, /) -> None:
        """Answer a question that a task asked with `ctx.wait_for`. `wait.id` is its id.

        An answer that arrives while the task is not waiting for it is kept for the next wait.
        Retries for ten seconds while the task has not asked the question.

        Raises:
            AnswerRefused: It was answered before, its task has ended, the value does not fit its
                type, or its agent accepts no answer from this sender.
            QuestionNotOpen: It was not asked, or no replica of its agent has replied.
            NotJson: `value` is not JSON.
            UnknownAgent: No replica has ever served its agent in this namespace.
            BrokerUnavailable: The broker did not confirm the answer. Repeating it is safe.
            MeshClosed: The connection was closed.
        """
        try:
            json = _ANSWER.write(value)
        except TypeMismatch as error:
            raise NotJson(str(error)) from error
        await self._transport.complete(question_id, json)

    async def reject(self, question_id: str, reason: str, /) -> None:
        """Refuse to answer a question: the wait for it fails in the agent.

        It raises `PeerFailed` with `reason`, of which at most 500 characters are kept. Its
        `outcome.kind` is "error".

        Raises:
            MeshpointError: As for `complete`.
        """
        await self._transport.reject(question_id, truncate_reason(reason))

    @overload
    def task(self, agent: str, task_id: str, /) -> TaskHandle[Any]: ...

    @overload
    def task(self, agent: Addressable[In, Out], task_id: str, /) -> TaskHandle[Out]: ...

    def task(
        self, agent: Addressable[Any, Any] | str, task_id: str | None = None, /
    ) -> TaskHandle[Any]:
        """Attach to a task that was sent under this connection's name, from any process.

            plan = await mesh.task(travel, "order-17").result()

        Nothing is sent until the handle is used. The result of a task that `send` started is
        available for 7 days after its end.

        Args:
            agent: As for `send`.
            task_id: Id of the task.

        Raises:
            InvalidOption: The id is invalid.
            MeshClosed: The connection was closed.
        """
        if task_id is None:
            raise TypeError(f'task() needs the agent: mesh.task("travel", "{agent}")')
        peer = _resolve_peer(agent)
        name, id_ = AgentName(peer.name), check_task_id(task_id)
        return TaskHandle(self._transport.attach(name, id_), peer, self._transport)

    async def find_agents(self, *names: str, wait: Duration = 2.0) -> list[FoundAgent]:
        """Ask the agents of the mesh for their cards. Returns the answers, sorted by name.

        Agents without a running replica do not answer, nor do agents on earlier releases.

        Args:
            names: Ask only these agents.
            wait: Maximum time to wait for answers. It ends earlier if no more seem to come.

        Raises:
            ConfigurationError: A name is not a valid agent name.
            InvalidOption: `wait` is not a duration.
            BrokerUnavailable: The broker does not answer.
            MeshClosed: The connection was closed.
        """
        if (problem := duration_problem(wait, "wait")) is not None:
            raise InvalidOption("; ".join(problem))
        seconds = to_timedelta(wait, "wait").total_seconds()
        return await self._transport.find_agents(list(map(validate_agent_name, names)), seconds)

    async def aclose(self) -> None:
        """Disconnect. Open tasks continue, and waits for them raise `MeshClosed`."""
        await self._transport.close()


def _resolve_peer(agent: object) -> Peer[Any, Any]:
    if isinstance(agent, str):
        return untyped_peer(agent)
    if isinstance(peer := getattr(agent, "peer", None), Peer):
        return peer
    if isinstance(agent, PeerCall):
        raise TypeError(
            f"a call of {agent.peer!r} is for agents; write mesh.call(peer, input) with the peer "
            "and its input"
        )
    raise TypeError(
        f"{type(agent).__name__} is not an agent: pass a Peer, an agent or the name of one"
    )
