"""Connect to a mesh from outside it."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshpoint.client.mesh import Mesh
from meshpoint.client.transport import Transport
from meshpoint.errors import MeshpointError
from meshpoint.model.messages import validate_agent_name

if TYPE_CHECKING:
    from meshpoint.settings import MeshSettings


class Connecting:
    """A connection that is not open yet. Use it once: `async with`, or `await` and `aclose`."""

    def __init__(self, settings: MeshSettings, name: str) -> None:
        self._settings, self._name = settings, validate_agent_name(name)
        self._mesh: Mesh | None = None

    def __await__(self) -> Generator[Any, Any, Mesh]:
        return self._open().__await__()

    async def __aenter__(self) -> Mesh:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mesh is not None:
            await self._mesh.aclose()

    async def _open(self) -> Mesh:
        from meshpoint.wiring import current_traceparent, make_broker

        if self._mesh is not None:
            raise MeshpointError("this connection was opened before: call connect() again")
        transport = Transport(
            make_broker(self._settings), self._name, current_traceparent=current_traceparent
        )
        await transport.open()
        self._mesh = Mesh(transport)
        return self._mesh


def connect(
    url: str | None = None,
    /,
    *,
    config: str | Path | None = None,
    namespace: str | None = None,
    name: str = "client",
) -> Connecting:
    """Connect to a mesh, once per process.

        async with meshpoint.connect("amqp://…", namespace="demo") as mesh:
            plan = await mesh.call(travel, Trip(city="Rome"))

    Or `mesh = await meshpoint.connect(…)`, and `await mesh.aclose()` at the end. Without `url` and
    `config`, the variable `MESHPOINT_MESH__BROKER_URL` names the broker.

    Args:
        url: URL of the broker; overrides the file.
        config: YAML file of the mesh, the same as for `meshpoint run`.
        namespace: Namespace of the mesh; overrides the file.
        name: The name under which requests are sent. Only this name may repeat or cancel them.

    Raises:
        ConfigurationError: No broker is named, or the settings cannot work.
        BrokerUnavailable: The broker does not answer. Raised when the connection opens.
    """
    from meshpoint.settings.choosing import OptionNames, require_mesh

    options = OptionNames(
        config="connect()",
        broker_url="connect(url)",
        namespace="connect(namespace=)",
        fix='pass a URL or config="mesh.yaml", or set MESHPOINT_MESH__BROKER_URL',
    )
    file = None if config is None else Path(config)
    return connect_to(require_mesh(file, url, namespace, options), name)


def connect_to(settings: MeshSettings, name: str = "client") -> Connecting:
    """Like `connect`, with settings that are loaded already."""
    return Connecting(settings, name)
