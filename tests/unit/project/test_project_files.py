"""The project's configuration files agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
COMMANDS = {
    step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step
}


def test_the_workflow_tests_the_versions_that_are_declared() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    declared = [
        found[1] for classifier in classifiers if (found := re.search(r":: (3\.\d+)$", classifier))
    ]
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == declared


def test_the_workflow_runs_what_contributors_run() -> None:
    targets = {found[1] for command in COMMANDS if (found := re.match(r"make (\S+)", command))}
    assert targets == {"test", "lowest", "coverage", "docs", "install-check"}


def test_the_hooks_run_the_tools_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    checks = makefile.partition("\ncheck: ")[2].partition("\n\n")[0]
    tools = set(re.findall(r"\$\(BIN\)/(\S+)", checks))
    assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} == tools


def test_every_link_in_the_published_readme_is_absolute() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"\]\(docs/", readme)
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        readme = re.sub(rule["pattern"], rule["replacement"], readme)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", readme)
    assert all(link.startswith("https://") for _, link in links)
    hosts = {link.split("/")[2] for is_picture, link in links if is_picture}
    assert hosts == {"img.shields.io", "raw.githubusercontent.com"}
