"""Runs next to an installed wheel: uses a feature, or checks the error that names its extra.

`test_adapter.py`, a suite for an adapter, is in the working directory.
"""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import meshpoint
from meshpoint.errors import ConfigurationError

MESHPOINT = str(Path(sys.executable).with_name("meshpoint"))


def rabbitmq() -> str:
    from meshpoint.settings import MeshSettings
    from meshpoint.wiring import make_broker

    return type(make_broker(MeshSettings(broker_url="amqp://localhost/"))).__name__


def postgresql() -> str:
    from meshpoint.settings import StoreSettings
    from meshpoint.wiring import make_store

    store = StoreSettings.at("postgresql://localhost/mesh", key="--db")
    return type(make_store(store, "probe")).__name__


def redis() -> str:
    from meshpoint.settings import AgentSettings
    from meshpoint.wiring import make_working_memory

    durable = AgentSettings(
        name="a",
        entrypoint="m:a",
        stateless_checkpointing=True,
        session_service="sql",
        memory_url="redis://localhost/",
    )
    return type(make_working_memory(durable, "probe")).__name__


def encryption() -> str:
    from meshpoint.settings import MeshSettings
    from meshpoint.wiring import make_sealer

    mesh = MeshSettings(encryption_keys=(base64.b64encode(b"k" * 32).decode(),))
    sealer = make_sealer(mesh.key_ring, "mesh.encryption_keys")
    assert sealer is not None
    return sealer.open(sealer.seal(b"sealed", ("probe", "")), ("probe", "")).decode()


def telemetry() -> str:
    from meshpoint.extras import TELEMETRY

    TELEMETRY.require("--metrics-port")
    from meshpoint.adapters.telemetry.metrics import METRICS, MetricsObserver
    from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter

    meter = PrometheusMeter()
    MetricsObserver([meter])
    return f"{len(METRICS)} metrics, {meter.render().count(b'# TYPE')} shown"


def dashboard() -> str:
    from importlib.resources import files

    from meshpoint.dashboard import Role, TokenAccess, User
    from meshpoint.dashboard.showing import make_environment

    TokenAccess({"probe-probe-probe-probe": User("ada", Role.VIEW)})
    static = files("meshpoint.dashboard").joinpath("static")
    names = [each.name for each in static.iterdir()]
    pages = make_environment().list_templates()
    return f"{len(pages)} templates, {sum(name.endswith('.LICENSE') for name in names)} licences"


def dashboard_import() -> str:
    import meshpoint.dashboard

    return meshpoint.dashboard.__name__


def yaml() -> str:
    from meshpoint.settings import load

    file = Path("probe.yaml")
    file.write_text("mesh: {namespace: probe, broker_url: 'memory://'}\n")
    return f"namespace {load([file]).mesh.namespace}"


def command_line() -> str:
    url = "sqlite:///probe.db"
    commands = (
        ["--version"],
        ["db", "upgrade", "--db", url],
        ["db", "check", "--db", url],
        ["demo", "--json"],
    )
    output = [run_command(MESHPOINT, *command) for command in commands]
    return f"{output[0]}; db upgrade, db check and demo exit with 0"


def conformance() -> str:
    options = ("-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-q")
    return run_command(sys.executable, "-m", "pytest", *options, "test_adapter.py").splitlines()[
        -1
    ]


def conformance_import() -> str:
    import meshpoint.testing.conformance.broker

    return meshpoint.testing.conformance.broker.__name__


def pydantic_ai() -> str:
    from pydantic_ai import Agent

    from meshpoint import Peer
    from meshpoint.frameworks.pydantic_ai import durable

    wrapped = durable(Agent("test", name="travel"), peers=[Peer("flights", str, str)])
    return f"{wrapped!r} in {wrapped.state_format}"


def pydantic_ai_import() -> str:
    import meshpoint.frameworks.pydantic_ai

    return meshpoint.frameworks.pydantic_ai.__name__


def google_adk() -> str:
    from google.adk.agents import LlmAgent

    from meshpoint import Peer
    from meshpoint.frameworks.google_adk import durable

    wrapped = durable(LlmAgent(name="travel"), peers=[Peer("flights", str, str)])
    return f"{wrapped!r} in {wrapped.state_format}"


def google_adk_import() -> str:
    import meshpoint.frameworks.google_adk

    return meshpoint.frameworks.google_adk.__name__


def langgraph() -> str:
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import FakeListChatModel

    from meshpoint import Peer
    from meshpoint.frameworks.langgraph import MeshpointDurability, durable

    model = FakeListChatModel(responses=[])
    planner = create_agent(model, middleware=[MeshpointDurability()], name="travel")
    wrapped = durable(planner, peers=[Peer("flights", str, str)])
    return f"{wrapped!r} in {wrapped.state_format}"


def langgraph_import() -> str:
    import meshpoint.frameworks.langgraph

    return meshpoint.frameworks.langgraph.__name__


def agent_framework() -> str:
    from typing import Any

    from agent_framework import (
        Agent,
        BaseChatClient,
        ChatMiddlewareLayer,
        FunctionInvocationLayer,
    )

    from meshpoint import Peer
    from meshpoint.frameworks.agent_framework import durable

    class Client(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], BaseChatClient[Any]):
        def _inner_get_response(self, **options: Any) -> Any:
            raise NotImplementedError

    wrapped = durable(Agent(Client(), name="travel"), peers=[Peer("flights", str, str)])
    return f"{wrapped!r} in {wrapped.state_format}"


def agent_framework_import() -> str:
    import meshpoint.frameworks.agent_framework

    return meshpoint.frameworks.agent_framework.__name__


def strands() -> str:
    from strands import Agent

    from meshpoint import Peer
    from meshpoint.frameworks.strands import durable

    wrapped = durable(Agent, name="travel", peers=[Peer("flights", str, str)])
    return f"{wrapped!r} in {wrapped.state_format}"


def strands_import() -> str:
    import meshpoint.frameworks.strands

    return meshpoint.frameworks.strands.__name__


def openai_agents() -> str:
    from agents import Agent

    from meshpoint import Peer
    from meshpoint.frameworks.openai_agents import durable

    wrapped = durable(Agent("travel"), peers=[Peer("flights", str, str)])
    return f"{wrapped!r} in {wrapped.state_format}"


def openai_agents_import() -> str:
    import meshpoint.frameworks.openai_agents

    return meshpoint.frameworks.openai_agents.__name__


def run_command(*command: str) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)}: exit code {completed.returncode}\n"
            f"{completed.stdout}{completed.stderr}"
        )
    return completed.stdout.strip()


def error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except ConfigurationError as error:
        return str(error)
    raise SystemExit("expected an error")


def command_error() -> str:
    completed = subprocess.run(
        [MESHPOINT, "--version"], capture_output=True, text=True, check=False
    )
    if (completed.returncode, completed.stdout, completed.stderr.count("\n")) != (2, "", 1):
        raise SystemExit(f"exit code {completed.returncode}\n{completed.stdout}{completed.stderr}")
    return completed.stderr.strip()


USES: dict[str, Callable[[], str]] = {
    "RabbitMQ": rabbitmq,
    "PostgreSQL": postgresql,
    "Redis": redis,
    "encryption": encryption,
    "telemetry": telemetry,
    "a YAML file": yaml,
    "the command line": command_line,
    "the dashboard": dashboard,
    "a conformance suite": conformance,
    "Pydantic AI": pydantic_ai,
    "Google ADK": google_adk,
    "LangGraph": langgraph,
    "Microsoft Agent Framework": agent_framework,
    "Strands": strands,
    "the OpenAI Agents SDK": openai_agents,
}
MISSING_EXTRA_CHECKS: dict[str, Callable[[], str]] = {
    **{name: lambda use=use: error_of(use) for name, use in USES.items()},  # type: ignore[misc]  # the default of a lambda
    "the command line": command_error,
    "the dashboard": lambda: error_of(dashboard_import),
    "a conformance suite": lambda: error_of(conformance_import),
    "Pydantic AI": lambda: error_of(pydantic_ai_import),
    "Google ADK": lambda: error_of(google_adk_import),
    "LangGraph": lambda: error_of(langgraph_import),
    "Microsoft Agent Framework": lambda: error_of(agent_framework_import),
    "Strands": lambda: error_of(strands_import),
    "the OpenAI Agents SDK": lambda: error_of(openai_agents_import),
}

if __name__ == "__main__":
    way, feature = sys.argv[1:]
    if not Path(meshpoint.__file__).is_relative_to(sys.prefix):
        raise SystemExit(f"this is not the installed package: {meshpoint.__file__}")
    if way == "use":
        print(f"{feature}: {USES[feature]()}")
    else:
        line = MISSING_EXTRA_CHECKS[feature]()
        if "\n" in line or "pip install 'meshpoint[" not in line:
            raise SystemExit(line)
        print(f"without {feature}: {line}")
