"""`meshpoint dashboard`: who may reach it, and what it refuses to start with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import uvicorn

from command_result import CommandResult, run_main
from dashboard.scene import write_config

TOKEN = "t" * 32


class Server:
    """A server that begins and ends at once."""

    started = True
    config: uvicorn.Config

    def __init__(self, config: uvicorn.Config) -> None:
        Server.config = config

    def run(self) -> None:
        """Return at once."""


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs the command on a mesh, without a network."""
    monkeypatch.setattr(uvicorn, "Server", Server)
    config = write_config(tmp_path)

    def run_dashboard(*options: str) -> CommandResult:
        try:
            return run_main(["dashboard", str(config), *options], capsys)
        finally:
            Server.started = True

    return run_dashboard


def test_it_listens_on_this_host_without_tokens(run: Any) -> None:
    result = run()
    assert (result.code, result.err) == (0, "the dashboard is at http://127.0.0.1:8400/\n")
    assert (Server.config.host, Server.config.port) == ("127.0.0.1", 8400)
    assert not Server.config.proxy_headers, "a client would choose its own address"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "ops.example.com"])
def test_it_refuses_the_network_without_authentication(run: Any, host: str) -> None:
    result = run("--host", host)
    assert result.code == 2
    assert "anybody on the network could use the dashboard" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("host", ["::1", "127.0.0.2", "localhost"])
def test_every_address_of_this_host_is_local(run: Any, host: str) -> None:
    assert run("--host", host).code == 0


def test_tokens_open_it_to_the_network(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ada operate {TOKEN}\n")
    tokens.chmod(0o600)
    assert run("--host", "0.0.0.0", "--tokens", str(tokens)).code == 0
    monkeypatch.setenv("MESHPOINT_DASHBOARD_TOKENS", f"ada operate {TOKEN}")
    assert run("--host", "::").code == 0
    both = run("--user-header", "X-User", "--proxy", "10.0.0.5")
    assert (both.code, "used together with tokens" in both.err) == (2, True)


def test_a_proxy_is_named_by_its_address(run: Any) -> None:
    assert run("--host", "::", "--user-header", "X-User", "--proxy", "10.0.0.5").code == 0
    for options, problem in (
        (("--user-header", "X-User"), "but not the proxy that sets it"),
        (("--user-header", "X-User", "--proxy", "proxy"), "does not appear to be an IPv4"),
        (("--proxy", "10.0.0.5"), "needs --user-header"),
        (("--operator", "ada"), "needs --user-header"),
    ):
        result = run("--host", "::", *options)
        assert result.code == 2
        assert problem in result.err


def test_what_cannot_work_is_refused(run: Any, tmp_path: Path) -> None:
    assert "needs --tls-key" in run("--tls-cert", "cert.pem").err
    assert "is not the address of a trace" in run("--trace-url", "javascript:{trace_id}").err
    Server.started = False
    result = run("--port", "80")
    assert (result.code, "80 cannot be used" in result.err) == (2, True)
