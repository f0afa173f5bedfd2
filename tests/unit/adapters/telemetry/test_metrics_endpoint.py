"""The HTTP endpoint: its pages, and requests that it does not trust."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from meshpoint.adapters.telemetry import endpoint as endpoint_module
from meshpoint.adapters.telemetry.endpoint import Endpoint
from meshpoint.adapters.telemetry.health import Health
from meshpoint.adapters.telemetry.metrics import MetricsObserver
from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter
from meshpoint.errors import ConfigurationError
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId

LOCALHOST = "127.0.0.1"
TRAVEL = AgentName("travel")


def event(step: Step, **detail: int) -> Event:
    return Event(step, Phase.INFO, TRAVEL, ReplicaId("r"), (), detail)


class Served:
    """An open endpoint, and a way to ask it."""

    def __init__(self, **options: float) -> None:
        self.meter, self.is_connected = PrometheusMeter(), True
        self.health = Health([TRAVEL], lambda: self.is_connected)
        self.endpoint = Endpoint(self.meter, self.health, **options)
        self.port = 0

    async def send(self, request: bytes) -> bytes:
        """Everything that the endpoint sends in response to `request`."""
        reader, writer = await asyncio.open_connection(LOCALHOST, self.port)
        writer.write(request)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        """The status and the body of a response."""
        answer = await self.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, body = answer.decode().partition("\r\n\r\n")
        return int(head.split(" ")[1]), body


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    served.port = await served.endpoint.open(LOCALHOST, 0)
    yield served
    await served.endpoint.close()


async def test_metrics_are_shown_in_the_format_of_prometheus(served: Served) -> None:
    observer = MetricsObserver([served.meter])
    observer.emit(event(Step.STARTED, slots=8))
    observer.emit(event(Step.TASK_COMPLETED))
    status, body = await served.get("/metrics")
    assert status == 200
    lines = body.splitlines()
    assert 'meshpoint_slots_free{agent="travel"} 8.0' in lines
    assert 'meshpoint_tasks_ended_total{agent="travel",outcome="completed"} 1.0' in lines
    assert not any("_created" in line for line in lines)


async def test_a_process_lives_before_it_is_ready(served: Served) -> None:
    assert await served.get("/healthz") == (200, '{"alive": true}\n')
    status, body = await served.get("/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "reason": "starting: travel"})
    served.health.emit(event(Step.STARTED))
    assert await served.get("/readyz") == (200, '{"ready": true}\n')
    served.is_connected = False
    status, body = await served.get("/readyz?verbose")
    assert (status, body.count("\n")) == (503, 1)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("POST /metrics HTTP/1.1", 405),
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/<script> HTTP/1.1", 404),
        ("GET http://x/metrics HTTP/1.1", 404),
        ("\x00\x01", 404),
        ("", 404),
    ],
)
async def test_nothing_of_a_request_is_repeated(
    served: Served, request_line: str, status: int
) -> None:
    answer = (await served.send(request_line.encode() + b"\r\nX-Y: <script>\r\n\r\n")).decode()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert "script" not in answer


async def test_a_head_request_has_no_body(served: Served) -> None:
    answer = await served.send(b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


async def test_a_large_request_is_not_read(served: Served) -> None:
    request = b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"
    assert await served.send(request) == b""
    assert (await served.get("/healthz"))[0] == 200


async def test_a_slow_request_ends() -> None:
    served = Served(timeout=0.01)
    served.port = await served.endpoint.open(LOCALHOST, 0)
    assert await served.send(b"GET /metrics") == b""
    await served.endpoint.close()


async def test_the_number_of_connections_is_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_MAX_CONNECTIONS", 1)
    reader, writer = await asyncio.open_connection(LOCALHOST, served.port)
    assert await served.send(b"GET /healthz HTTP/1.1\r\n\r\n") == b""  # accepted second
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_open_connections_end_with_the_endpoint() -> None:
    served = Served()
    served.port = await served.endpoint.open(LOCALHOST, 0)
    reader, writer = await asyncio.open_connection(LOCALHOST, served.port)
    await served.get("/healthz")  # accepted second
    await served.endpoint.close()
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError, match=r"Connect call failed|refused"):
        await asyncio.open_connection(LOCALHOST, served.port)


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server((LOCALHOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigurationError,
            match=rf"^--metrics-port: port {port} on 127\.0\.0\.1 is in use; choose another port$",
        ):
            await Served().endpoint.open(LOCALHOST, port)


async def test_no_host_does_not_mean_all_addresses() -> None:
    with pytest.raises(ConfigurationError, match=r"^--metrics-host: is empty; name an address"):
        await Served().endpoint.open("", 0)


async def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^--metrics-host: cannot listen on 192\.0\.2\.1"
    ):
        await Served().endpoint.open("192.0.2.1", 0)
