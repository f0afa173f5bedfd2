"""Every public name has a docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
from itertools import pairwise

import pytest

import meshpoint


def attribute_docstrings(module_name: str) -> dict[str, str]:
    """The strings under a module's assignments, since constants and aliases have no `__doc__`."""
    body = ast.parse(inspect.getsource(importlib.import_module(module_name))).body
    found: dict[str, str] = {}
    for statement, following in pairwise(body):
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [getattr(statement, "target", None)]
        )
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found |= {
                target.id: str(following.value.value)
                for target in targets
                if isinstance(target, ast.Name)
            }
    return found


def defining_module(name: str) -> str:
    """The module from which the package imports `name`."""
    for statement in ast.parse(inspect.getsource(meshpoint)).body:
        if isinstance(statement, ast.ImportFrom) and name in {
            alias.name for alias in statement.names
        }:
            assert statement.module is not None
            return statement.module
    raise AssertionError(f"{name} is not imported by the package")


@pytest.mark.parametrize("name", meshpoint.__all__)
def test_public_names_have_docstrings(name: str) -> None:
    public = getattr(meshpoint, name)
    if inspect.isclass(public) or inspect.isfunction(public):
        documented = vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
        assert documented, f"{name} has no docstring"
        assert not documented.startswith(f"{name}("), f"{name} has only dataclass's docstring"
    else:
        assert attribute_docstrings(defining_module(name)).get(name), (
            f"{name} has no docstring below it"
        )


def test_imported_names_are_public() -> None:
    imported = {
        alias.name
        for statement in ast.parse(inspect.getsource(meshpoint)).body
        if isinstance(statement, ast.ImportFrom) and statement.module != "__future__"
        for alias in statement.names
    }
    assert imported == set(meshpoint.__all__)
    assert len(meshpoint.__all__) == len(set(meshpoint.__all__))
