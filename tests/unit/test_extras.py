"""Optional libraries: the core works without them, and errors give the pip command."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import meshpoint
from code_blocks import code_blocks
from hidden_imports import run_without
from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.extras import Feature

ROOT = Path(__file__).resolve().parents[2]
FEATURES = [feature_ for feature_ in vars(extras).values() if isinstance(feature_, Feature)]
OPTIONAL = {module for feature in FEATURES for module in feature.libraries} | {"uvloop"}
WITHOUT_CHECK = {"uvloop"}
"""Installed by an extra, although Meshpoint works without it."""
FRAMEWORKS = {
    "agent-framework",
    "google-adk",
    "langgraph",
    "openai-agents",
    "pydantic-ai",
    "strands",
}
"""Extras that `all` leaves out: a replica uses at most one framework."""
MAIN = "from meshpoint.cli import main; main({arguments})"
RUN_EACH = """
import json, traceback

errors = {{}}
for code in {codes!r}:
    try:
        exec(code, {{}})
    except Exception as error:
        errors[code] = traceback.format_exception_only(error)[-1].rstrip()
print(json.dumps(errors))
"""


def first_example() -> str:
    return code_blocks((ROOT / "README.md").read_text(), "python")[0]


def test_the_first_example_needs_no_optional_library() -> None:
    done = run_without(OPTIONAL, first_example())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_core_imports_no_optional_library() -> None:
    code = (
        "\nimport sys, meshpoint.exec.attempt, meshpoint.operations, "
        "meshpoint.adapters.sql.migrations\n"
    )
    shown = f"print('loaded:', *({OPTIONAL} & sys.modules.keys()))"
    done = run_without([], first_example() + code + shown)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "loaded:"


NEEDS: list[tuple[Feature, str, str]] = [
    (
        extras.RABBITMQ,
        "from meshpoint.settings import MeshSettings; MeshSettings(broker_url='amqp://h/')",
        "mesh.broker_url",
    ),
    (
        extras.POSTGRESQL,
        "from meshpoint.operations import Operations; Operations('postgresql://h/d')",
        "db_url",
    ),
    (
        extras.POSTGRESQL,
        "from meshpoint.adapters.sql import migrations; migrations.check('postgresql://h/d')",
        "database",
    ),
    *(
        (
            extras.REDIS,
            "from meshpoint.settings import AgentSettings\n"
            f"AgentSettings(name='a', entrypoint='m:a', {setting}='redis://h/')",
            f"agent.{setting}",
        )
        for setting in ("checkpoint_cache_url", "memory_url", "memory_snapshot_url")
    ),
    (
        extras.TELEMETRY,
        "from meshpoint.extras import TELEMETRY; TELEMETRY.require('--metrics-port')",
        "--metrics-port",
    ),
    (extras.DASHBOARD, "import meshpoint.dashboard", "meshpoint.dashboard"),
    (extras.YAML, "from meshpoint.settings import load; load(['mesh.yaml'])", "mesh.yaml"),
    (
        extras.CONFORMANCE,
        "import meshpoint.testing.conformance.store",
        "meshpoint.testing.conformance",
    ),
    (
        extras.PYDANTIC_AI,
        "import meshpoint.frameworks.pydantic_ai",
        "meshpoint.frameworks.pydantic_ai",
    ),
    (
        extras.GOOGLE_ADK,
        "import meshpoint.frameworks.google_adk",
        "meshpoint.frameworks.google_adk",
    ),
    (
        extras.LANGGRAPH,
        "import meshpoint.frameworks.langgraph",
        "meshpoint.frameworks.langgraph",
    ),
    (
        extras.OPENAI_AGENTS,
        "import meshpoint.frameworks.openai_agents",
        "meshpoint.frameworks.openai_agents",
    ),
    (
        extras.AGENT_FRAMEWORK,
        "import meshpoint.frameworks.agent_framework",
        "meshpoint.frameworks.agent_framework",
    ),
    (
        extras.STRANDS,
        "import meshpoint.frameworks.strands",
        "meshpoint.frameworks.strands",
    ),
    (
        extras.MESH_FIXTURE,
        "from meshpoint.testing import TestMesh, mesh_fixture; mesh_fixture()",
        "mesh_fixture",
    ),
]
"""Features with code that needs a library, and the key that the error names."""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The last line of the error of each code in `NEEDS`, which run in one process."""
    codes = [code for _, code, _ in NEEDS]
    done = run_without(OPTIONAL, RUN_EACH.format(codes=codes))
    assert (done.returncode, done.stderr) == (0, "")
    lines: dict[str, str] = json.loads(done.stdout)
    return lines


@pytest.mark.parametrize(("feature", "code", "key"), NEEDS)
def test_a_missing_library_is_named_when_it_is_needed(
    errors: dict[str, str], feature: Feature, code: str, key: str
) -> None:
    first = next(iter(feature.libraries.values()))
    line = (
        f"{key}: {feature.name} needs the package {first}; "
        f"run: pip install 'meshpoint[{feature.extra}]'"
    )
    assert errors[code] == f"meshpoint.errors.ConfigurationError: {line}"


@pytest.mark.parametrize(
    ("missing", "arguments", "line"),
    [
        (
            extras.COMMAND_LINE,
            ["--version"],
            "meshpoint: the command line needs the package typer; {cli}",
        ),
        (
            extras.RABBITMQ,
            ["send", "a", "1", "--broker", "amqp://h/"],
            "mesh.broker_url: RabbitMQ needs the package aio-pika; {rabbitmq}",
        ),
        (
            extras.TELEMETRY,
            ["run", "config/travel.yaml", "--metrics-port", "9464"],
            "--metrics-port: telemetry needs the package opentelemetry-api; {telemetry}",
        ),
        (
            extras.DASHBOARD,
            ["dashboard", "config/travel.yaml"],
            "meshpoint dashboard: the dashboard needs the package jinja2; {dashboard}",
        ),
        (
            extras.POSTGRESQL,
            ["db", "check", "--db", "postgresql://h/d"],
            "--db: PostgreSQL needs the package asyncpg; {postgresql}",
        ),
    ],
)
def test_a_command_without_its_library_prints_one_line(
    missing: Feature, arguments: list[str], line: str
) -> None:
    done = run_without(missing.libraries, MAIN.format(arguments=arguments))
    pip = {missing.extra: f"run: pip install 'meshpoint[{missing.extra}]'"}
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {line.format(**pip)}\n"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.name)
def test_each_missing_library_is_named(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, library in feature.libraries.items():
        monkeypatch.setattr(
            extras, "find_spec", lambda name, missing=module: None if name == missing else object()
        )
        with pytest.raises(
            ConfigurationError, match=f"^key: {feature.name} needs the package {library}; "
        ):
            feature.require("key")


def test_the_extras_install_the_libraries_that_are_checked() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = {
        extra: {Requirement(line).name for line in lines} for extra, lines in declared.items()
    }
    (all_extra,) = (Requirement(line) for line in declared["all"])
    checked: dict[str, set[str]] = {}
    for feature in FEATURES:
        checked.setdefault(feature.extra, set()).update(feature.libraries.values())
    assert all_extra.extras == installed.keys() - {"all", "testing", *FRAMEWORKS}
    assert {
        extra: names - WITHOUT_CHECK for extra, names in installed.items() if extra != "all"
    } == checked


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert meshpoint.__version__ == version("meshpoint")
    done = run_without([], MAIN.format(arguments=["--version"]))
    assert done.stdout == f"meshpoint {meshpoint.__version__}\n"
