"""A connection to the mesh, from outside it."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack, overload

from meshpoint.agents.peer import Addressable, Peer, PeerCall, untyped_peer
from meshpoint.client.requests import SendOptions, check_request
from meshpoint.client.task_handle import TaskHandle
from meshpoint.client.transport import Transport
from meshpoint.errors import InvalidInput
from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.ids import AgentName

In = TypeVar("In")
Out = TypeVar("Out")


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
            MeshClosed: The connection was closed.
        """
        peer = _resolve_peer(agent)
        try:
            input_ = peer.write(request)
        except TypeMismatch as error:
            raise InvalidInput(f"input for {peer.name!r}: {error}") from error
        checked = check_request(AgentName(peer.name), input_, options, peer.timeout)
        return TaskHandle(await self._transport.send(checked), peer, self._transport)

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
        """Start a task and return its result: `send`, then `TaskHandle.result`.

        Raises:
            TaskFailed: The task has no result. `TaskTimeout` and `TaskCancelled` are subclasses.
            MeshpointError: As for `send`.
        """
        task: TaskHandle[Any] = await self.send(agent, request, **options)
        return await task.result()

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
