"""Every file, module, class, function and logger that a page names exists."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer

from meshpoint.adapters.telemetry.metrics import METRICS
from meshpoint.adapters.telemetry.otel_meter import instrument_name
from meshpoint.cli.app import app

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "meshpoint"
DOCS = ROOT / "docs"
SOURCES = [
    ROOT / "config" / "alerts.yml",
    *(
        path
        for folder in ("src", "tests", "benchmarks", "alembic", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ),
]
PAGES = [
    path
    for folder in (".", "docs/**", "examples/**", ".github/**")
    for path in ROOT.glob(f"{folder}/*.md")
]
ENTRIES = {
    path.relative_to(ROOT): re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.M)
    for path in (DOCS / "reference" / "api").glob("*.md")
}
PUBLIC = [import_module(name) for name in ("meshpoint", "meshpoint.errors", "meshpoint.local")]
INSTANCES = {"ctx": "TaskExecutionContext", "ctx.memory": "AgentMemory", "steps": "Steps"}
FOREIGN = {
    "working_dir",  # Docker Compose
    "consumer_timeout",  # RabbitMQ
    "purge_queue",  # RabbitMQ
    "include_detailed_errors",  # Agent Framework
    "max_duration_seconds",  # Agent Framework
    "max_consecutive_errors_per_request",  # Agent Framework
    "get_session_config",  # Google ADK
    "ShellTool",  # OpenAI Agents SDK
    "ComputerTool",  # OpenAI Agents SDK
    "mcp_servers",  # OpenAI Agents SDK
    "OPENAI_AGENTS_DISABLE_TRACING",  # OpenAI Agents SDK
    "tracing_disabled",  # OpenAI Agents SDK
    "TestCheapest",  # defined on the page
    "pg_read_all_stats",  # PostgreSQL
    "max_over_time",  # Prometheus
    "MESHPOINT_PORT",  # an example of what is ignored
}
"""Names on the pages that belong to other programs or to the reader."""


@cache
def names_in_sources() -> frozenset[str]:
    return frozenset(
        word
        for path in SOURCES
        if path != Path(__file__)
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    )


@cache
def members_by_class() -> dict[str, set[str]]:
    """What the bodies of the package's classes define, by class name. Bases are included."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(_defined_in(node))
                names = re.findall(r"\w+", " ".join(map(ast.unparse, node.bases)))
                bases.setdefault(node.name, set()).update(names)
    return {name: set().union(*_inherited(name, members, bases)) for name in members}


def _inherited(
    name: str, members: dict[str, set[str]], bases: dict[str, set[str]]
) -> Iterator[set[str]]:
    yield members.get(name, set())
    for base in bases.get(name, set()) - {name}:
        yield from _inherited(base, members, bases)


def _defined_in(class_: ast.ClassDef) -> Iterator[str]:
    for node in class_.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name
    yield from re.findall(r"\bself\.(\w+)(?:: .+)? = ", ast.unparse(class_))


def code_spans(page: Path) -> list[str]:
    """The inline code of a page, without what it quotes from the source documents."""
    text = page.read_text(encoding="utf-8")
    if page.name == "from-the-source-documents.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    modules = {path.name for path in SOURCES}
    for span in code_spans(page):
        if not re.fullmatch(r"[\w./-]+(/|\.py(::\w+)?)", span):
            continue
        file = span.partition("::")[0]
        found = any((folder / file).exists() for folder in (PACKAGE, ROOT, page.parent))
        assert found or file in modules, span


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_name_on_a_page_exists(page: Path) -> None:
    spans = [span for span in code_spans(page) if not re.search(r"/|\.py\b", span)]
    for span in spans:
        if re.fullmatch(r"meshpoint(\.\w+)+", span) and span not in LOGGERS | TELEMETRY:
            resolve_name(span)
        for owner, member in re.findall(r"\b([A-Za-z]\w*(?:\.memory)?)\.(\w+)", span):
            class_ = INSTANCES.get(owner, owner)
            assert member in members_by_class().get(class_, {member}), span
        for name in re.findall(r"\b(?:[A-Z][a-z]+[A-Z]\w+|[A-Za-z]+_\w+)\b", span):
            setting = name.removeprefix("MESHPOINT_MESH__").removeprefix("MESHPOINT_").lower()
            assert {name, setting} & names_in_sources() or name in FOREIGN, span


def _loggers() -> set[str]:
    return {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'getLogger\("(meshpoint\.\w+)"\)', path.read_text())
    }


LOGGERS = _loggers()


def _telemetry_names() -> set[str]:
    """The names of instruments, and of attributes of spans, which look like modules."""
    quoted = {
        name
        for path in (PACKAGE / "adapters" / "telemetry").glob("*.py")
        for name in re.findall(r'"(meshpoint\.[a-z_.]+)"', path.read_text(encoding="utf-8"))
    }
    return quoted | {instrument_name(metric)[0] for metric in METRICS}


TELEMETRY = _telemetry_names()


def test_every_logger_is_documented_and_exists() -> None:
    page = (DOCS / "how-to" / "operate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`meshpoint\.[^|]+) \|", page, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(meshpoint\.\w+)`", row)}
    assert listed | {"meshpoint.events"} == LOGGERS


@pytest.mark.parametrize("page", ENTRIES, ids=str)
def test_every_entry_of_the_api_reference_exists(page: Path) -> None:
    assert ENTRIES[page]
    for entry in ENTRIES[page]:
        resolve_name(entry)


SHELL_LINES = [
    pytest.param(line, id=f"{page.stem}: {line[:60]}")
    for page in PAGES
    if page.stem != "cli"  # generated
    for block in re.findall(
        r"^ *```(?:sh|console)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M
    )
    for line in re.findall(r"^ *(meshpoint .+)$", block, re.M)
]


@pytest.mark.parametrize("line", SHELL_LINES)
def test_every_command_on_a_page_exists(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = re.split(r" #| \|", line)[0].split()[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for param in command.params for option in param.opts}
    assert {word for word in words if re.match(r"--?[a-z]", word)} <= options


def public_names() -> dict[str, Any]:
    """Each name that a public module exports: by `__all__` or, without one, by defining it."""
    return {
        f"{module.__name__}.{name}": member
        for module in PUBLIC
        for name, member in vars(module).items()
        if name in getattr(module, "__all__", ())
        or (getattr(member, "__module__", None) == module.__name__ and not name.startswith("_"))
    }


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_entry_and_a_docstring(name: str) -> None:
    member = public_names()[name]
    entries = [resolve_name(entry) for page in ENTRIES.values() for entry in page]
    assert any(member is entry for entry in entries) or any(
        inspect.ismodule(entry) and member.__module__ == entry.__name__ for entry in entries
    )
    if inspect.isclass(member) or inspect.isfunction(member):
        assert "__doc__" in vars(member) or inspect.isfunction(member)
        assert member.__doc__


def test_the_navigation_lists_every_page() -> None:
    assert not list(runpy.run_path(str(DOCS / "build.py"))["unlisted"]())
