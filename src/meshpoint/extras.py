"""Optional libraries: the extra that installs each, and the error if one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from meshpoint.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Feature:
    """A part of Meshpoint that needs optional libraries.

    Args:
        name: Subject of the error message.
        extra: The extra that installs the libraries.
        libraries: Name of each library on the package index, by the name of its module.
    """

    name: str
    extra: str
    libraries: Mapping[str, str]

    def require(self, key: str) -> None:
        """Check that the libraries are installed, without importing them.

        Args:
            key: The setting or the module that needs them.

        Raises:
            ConfigurationError: A library is missing. The message has the pip command that installs
                it.
        """
        for module, library in self.libraries.items():
            if not _is_installed(module):
                raise ConfigurationError(
                    key,
                    f"{self.name} needs the package {library}",
                    f"run: {self.install_command}",
                )

    @property
    def install_command(self) -> str:
        """The command that installs the libraries."""
        return f"pip install 'meshpoint[{self.extra}]'"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it
        return False


RABBITMQ = Feature(
    "RabbitMQ",
    "rabbitmq",
    {"aio_pika": "aio-pika", "aiormq": "aiormq", "pamqp": "pamqp", "yarl": "yarl"},
)
POSTGRESQL = Feature("PostgreSQL", "postgresql", {"asyncpg": "asyncpg"})
REDIS = Feature("Redis", "redis", {"redis": "redis"})
TELEMETRY = Feature(
    "telemetry",
    "telemetry",
    {"opentelemetry.metrics": "opentelemetry-api", "prometheus_client": "prometheus-client"},
)
DASHBOARD = Feature(
    "the dashboard",
    "dashboard",
    {"jinja2": "jinja2", "starlette": "starlette", "uvicorn": "uvicorn"},
)
COMMAND_LINE = Feature(
    "the command line", "cli", {"typer": "typer", "rich": "rich", "yaml": "pyyaml"}
)
ENCRYPTION = Feature("encryption", "encryption", {"cryptography": "cryptography"})
YAML = Feature("a YAML file", "cli", {"yaml": "pyyaml"})
PYDANTIC_AI = Feature("Pydantic AI", "pydantic-ai", {"pydantic_ai": "pydantic-ai-slim"})
GOOGLE_ADK = Feature("Google ADK", "google-adk", {"google.adk": "google-adk"})
AGENT_FRAMEWORK = Feature(
    "Microsoft Agent Framework",
    "agent-framework",
    {"agent_framework": "agent-framework-core"},
)
LANGGRAPH = Feature("LangGraph", "langgraph", {"langchain": "langchain", "langgraph": "langgraph"})
STRANDS = Feature("Strands", "strands", {"strands": "strands-agents"})
OPENAI_AGENTS = Feature("the OpenAI Agents SDK", "openai-agents", {"agents.run": "openai-agents"})
FRAMEWORKS = (PYDANTIC_AI, GOOGLE_ADK, LANGGRAPH, AGENT_FRAMEWORK, STRANDS, OPENAI_AGENTS)
"""The agent frameworks that Meshpoint has adapters for."""
_PYTEST = {"pytest": "pytest", "pytest_asyncio": "pytest-asyncio"}
CONFORMANCE = Feature("a conformance suite", "testing", _PYTEST)
MESH_FIXTURE = Feature("a fixture", "testing", _PYTEST)
