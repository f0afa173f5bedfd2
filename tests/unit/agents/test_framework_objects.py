"""Objects of agent frameworks as entrypoints."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from declared_adapters import declared_adapters
from hidden_imports import run_without
from meshpoint import agent
from meshpoint.agents import framework_objects
from meshpoint.agents.entrypoint import load_agent, load_versions
from meshpoint.errors import ConfigurationError
from meshpoint.extras import FRAMEWORKS

ROOT = Path(__file__).parents[3]


class Foreign:
    """An agent of a framework in this module."""

    def __init__(self, label: str) -> None:
        self.label = label


class Special(Foreign):
    """Defined elsewhere, by a user."""

    __module__ = "somewhere.else"


def wrap(found: object, name: str | None) -> Any:
    """The adapter of this module's framework."""
    if not isinstance(found, Foreign):
        return None

    @agent(name or found.label)
    async def wrapped(ctx: object, request: str) -> str:
        return request

    return wrapped


class Other:
    """Not an agent, although it is of the framework."""


planner, special, other = Foreign("planner"), Special("special"), Other()


def use_adapters(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    monkeypatch.setattr(framework_objects, "entry_points", lambda group: entries)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    value = f"{__name__}:wrap"
    use_adapters(
        monkeypatch,
        EntryPoint("elsewhere", "not.importable:wrap", framework_objects.GROUP),
        EntryPoint(__name__, value, framework_objects.GROUP),
    )


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize("attribute", ["planner", "special"])
def test_an_adapter_wraps_the_objects_of_its_framework(attribute: str) -> None:
    assert load_agent(f"{__name__}:{attribute}").name == attribute
    assert load_agent(f"{__name__}:{attribute}", "travel").name == "travel"
    assert load_versions([f"{__name__}:{attribute}"], "travel").name == "travel"


@pytest.mark.usefixtures("adapter")
def test_an_object_that_its_adapter_refuses_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"other' is not an agent: its type is Other"):
        load_agent(f"{__name__}:other")


def test_a_broken_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_adapters(monkeypatch, EntryPoint(__name__, "not.importable:wrap", framework_objects.GROUP))
    with pytest.raises(ConfigurationError, match=r"adapter 'not\.importable:wrap' cannot be load"):
        load_agent(f"{__name__}:planner")


@pytest.mark.usefixtures("adapter")
def test_an_error_of_an_adapter_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(planner, "label")
    with pytest.raises(
        ConfigurationError, match="cannot wrap a Foreign: AttributeError"
    ) as caught:
        load_agent(f"{__name__}:planner")
    assert "\n" not in str(caught.value)


def test_an_object_that_nobody_knows_is_told_what_can_be_installed() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_agent(f"{__name__}:other")
    assert "an agent of Pydantic AI (meshpoint[pydantic-ai])" in caught.value.fix
    assert "\n" not in str(caught.value)


def test_a_missing_framework_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import pydantic_ai\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + (
        "from meshpoint import load_agent\n"
        "try: load_agent('app:agent')\n"
        "except Exception as error: print(error)\n"
    )
    done = run_without({"pydantic_ai"}, code)
    assert "run: pip install 'meshpoint[pydantic-ai]'" in done.stdout, done.stderr


def test_no_framework_is_imported_for_other_objects(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("agent = object()\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + (
        "from meshpoint import load_agent\n"
        "try: load_agent('app:agent')\n"
        "except Exception as error: print(error)\n"
        "print('loaded' if 'pydantic_ai' in sys.modules else 'not loaded')\n"
    )
    done = run_without([], code)
    assert done.stdout.endswith("not loaded\n"), done.stderr


def test_every_adapter_is_declared() -> None:
    modules = {module for feature in FRAMEWORKS for module in feature.libraries}
    packages = {module.partition(".")[0] for module in modules}
    assert {entry.name.partition(".")[0] for entry in declared_adapters()} <= packages
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {each.extra for each in FRAMEWORKS} <= declared["optional-dependencies"].keys()


def test_a_framework_has_the_objects_of_its_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pydantic_ai_extras` is not part of `pydantic_ai`."""
    module = ModuleType("pydantic_ai_extras")
    thing = type("Thing", (), {"__module__": module.__name__})()
    module.__dict__["thing"] = thing
    monkeypatch.setitem(sys.modules, module.__name__, module)
    use_adapters(monkeypatch, *declared_adapters())
    with pytest.raises(ConfigurationError, match="is not an agent: its type is Thing"):
        load_agent("pydantic_ai_extras:thing")
