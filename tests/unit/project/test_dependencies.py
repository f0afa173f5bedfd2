"""Dependency ranges in pyproject.toml, and the constraint files that pin both ends."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read_requirements(*lists: list[str]) -> list[Requirement]:
    """All requirements in `lists` on other projects; `all` refers to this project's own extras."""
    parsed = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


REQUIREMENTS = read_requirements(PROJECT["dependencies"], *EXTRAS.values())
TOOLS = {tool.name for tool in read_requirements(EXTRAS["testing"])}
"""Both constraint files pin the same version of these."""


def read_pins(file: str) -> dict[str, Version]:
    """The version pinned for each distribution in a constraint file."""
    lines = [
        line.partition("==") for line in (ROOT / file).read_text().splitlines() if "==" in line
    ]
    return {canonicalize_name(name): Version(version) for name, _, version in lines}


@pytest.mark.parametrize(
    "requirement",
    [each for each in REQUIREMENTS if each.name not in TOOLS],
    ids=lambda each: each.name,
)
def test_lowest_constraints_pin_the_lower_bound(requirement: Requirement) -> None:
    (bound,) = [constraint for constraint in requirement.specifier if constraint.operator == ">="]
    found = read_pins("constraints-lowest.txt")[canonicalize_name(requirement.name)]
    assert str(found).startswith(bound.version), (
        f"{requirement.name}: {found} is not the lower bound {bound.version}"
    )


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda each: each.name)
@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_constraints_satisfy_the_ranges(requirement: Requirement, file: str) -> None:
    assert requirement.specifier.contains(read_pins(file)[canonicalize_name(requirement.name)])
