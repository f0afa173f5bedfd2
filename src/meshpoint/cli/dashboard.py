"""`meshpoint dashboard`: serve the operators' pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli.output import print_note
from meshpoint.errors import ConfigurationError

if TYPE_CHECKING:
    from meshpoint.dashboard import Access

EXAMPLES = """\b
Examples:
  meshpoint dashboard travel.yaml
  meshpoint dashboard travel.yaml billing.yaml --read-only
  meshpoint dashboard travel.yaml --host 0.0.0.0 --tokens tokens.txt --allow-host ops.example.com \
--tls-cert cert.pem --tls-key key.pem
  meshpoint dashboard travel.yaml --host 0.0.0.0 --allow-host ops.example.com --https \
--user-header X-Forwarded-User --proxy 10.0.0.5 --operator ada
"""
TOKENS_VARIABLE = "MESHPOINT_DASHBOARD_TOKENS"
_SHUTDOWN_SECONDS = 3


def dashboard(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG...", help="YAML file of each mesh.")
    ],
    *,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, metavar="N", help="Port to listen on.")
    ] = 8400,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="People log in with the tokens in FILE: lines of NAME ROLE TOKEN, where ROLE is "
            f"view or operate. The variable {TOKENS_VARIABLE} may have the lines instead.",
        ),
    ] = None,
    user_header: Annotated[
        str | None,
        typer.Option(
            "--user-header",
            metavar="NAME",
            help="A proxy names the user in this header. Needs --proxy.",
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option("--proxy", metavar="IP", help="Address of that proxy; repeatable."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            "--operator",
            metavar="NAME",
            help="A user of the proxy who may change something; others may only view. Repeatable.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="All users may only view.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A host name by which browsers reach it, besides localhost; repeatable.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate for HTTPS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of the certificate.")
    ] = None,
    https: Annotated[
        bool, typer.Option("--https", help="Browsers reach it by HTTPS, through a proxy.")
    ] = False,
    trace_url: Annotated[
        str | None,
        typer.Option(
            "--trace-url", metavar="URL", help="Address of a trace, with {trace_id} in it."
        ),
    ] = None,
) -> None:
    """Serve pages that show what tasks wait for, and let people act on them.

    Without --tokens and --user-header, only users of this host may use it, and all of them may.
    """
    from meshpoint.extras import DASHBOARD

    DASHBOARD.require("meshpoint dashboard")
    import uvicorn

    from meshpoint.dashboard import Dashboard

    access = _choose_access(
        host, tokens, user_header, proxy or [], operator or [], read_only=read_only
    )
    if (tls_cert is None) != (tls_key is None):
        raise ConfigurationError("--tls-cert", "needs --tls-key", "give both, or neither")
    app = Dashboard(
        *configs,
        access=access,
        hosts=allow_host or [],
        secure=https or tls_cert is not None,
        trace_url=trace_url,
    )
    scheme = "http" if tls_cert is None else "https"
    shown = f"[{host}]" if ":" in host else host
    print_note(f"the dashboard is at {scheme}://{shown}:{port}/")
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
            proxy_headers=False,  # the address of the client decides whether it is the proxy
            server_header=False,
            access_log=False,
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )
    server.run()
    if not server.started:
        raise ConfigurationError(
            "--port", f"{port} cannot be used on {host}", "choose another port"
        )


def _choose_access(
    host: str,
    tokens: Path | None,
    user_header: str | None,
    proxies: list[str],
    operators: list[str],
    *,
    read_only: bool,
) -> Access:
    """Who may do what.

    Raises:
        ConfigurationError: People on the network would not be authenticated, or options conflict.
    """
    from meshpoint.dashboard import LocalAccess, ProxyAccess, Role, TokenAccess
    from meshpoint.dashboard.access import is_loopback
    from meshpoint.interventions import current_user

    lines = os.environ.get(TOKENS_VARIABLE)
    has_tokens = tokens is not None or bool(lines)
    if has_tokens and user_header is not None:
        fix = "let either tokens or a proxy authenticate people"
        raise ConfigurationError("--user-header", "is used together with tokens", fix)
    if user_header is None and (proxies or operators):
        option = "--proxy" if proxies else "--operator"
        raise ConfigurationError(option, "needs --user-header", "name the header of the proxy")
    if has_tokens:
        if tokens is not None:
            return TokenAccess.from_file(tokens, read_only=read_only)
        return TokenAccess.from_text(lines or "", TOKENS_VARIABLE, read_only=read_only)
    if user_header is not None:
        return ProxyAccess(user_header, proxies, [] if read_only else operators)
    if not is_loopback(host):
        problem = "anybody on the network could use the dashboard"
        fix = "add --tokens FILE, or --user-header NAME with --proxy IP, or use 127.0.0.1"
        raise ConfigurationError(f"--host {host}", problem, fix)
    return LocalAccess(current_user(), Role.VIEW if read_only else Role.OPERATE)
