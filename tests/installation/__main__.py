"""`make install-check`: use the wheel with each extra alone, then next to other frameworks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from code_blocks import code_blocks
from meshpoint.extras import (
    AGENT_FRAMEWORK,
    COMMAND_LINE,
    CONFORMANCE,
    DASHBOARD,
    ENCRYPTION,
    GOOGLE_ADK,
    LANGGRAPH,
    OPENAI_AGENTS,
    POSTGRESQL,
    PYDANTIC_AI,
    RABBITMQ,
    REDIS,
    STRANDS,
    TELEMETRY,
    YAML,
    Feature,
)

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("probe.py")
NEIGHBOURS = {"fastapi": "fastapi", "langgraph": "langgraph.graph", "pydantic-ai": "pydantic_ai"}
"""Other frameworks, and a module of each to import."""
FEATURES = (
    RABBITMQ,
    POSTGRESQL,
    REDIS,
    ENCRYPTION,
    TELEMETRY,
    COMMAND_LINE,
    YAML,
    DASHBOARD,
    CONFORMANCE,
    PYDANTIC_AI,
    GOOGLE_ADK,
    LANGGRAPH,
    AGENT_FRAMEWORK,
    STRANDS,
    OPENAI_AGENTS,
)
FEATURES_BY_EXTRA: dict[str, tuple[Feature, ...]] = {
    "core": (),
    "rabbitmq": (RABBITMQ,),
    "postgresql": (POSTGRESQL,),
    "redis": (REDIS,),
    "encryption": (ENCRYPTION,),
    "telemetry": (TELEMETRY,),
    "cli": (COMMAND_LINE, YAML),
    "dashboard": (DASHBOARD,),
    "testing": (CONFORMANCE,),
    "pydantic-ai": (PYDANTIC_AI,),
    "google-adk": (GOOGLE_ADK, YAML, ENCRYPTION),
    "langgraph": (LANGGRAPH, YAML),
    "agent-framework": (AGENT_FRAMEWORK, YAML),
    "strands": (STRANDS, YAML, ENCRYPTION),
    "openai-agents": (OPENAI_AGENTS, ENCRYPTION),
    "all": (*(RABBITMQ, POSTGRESQL, REDIS, ENCRYPTION, TELEMETRY, COMMAND_LINE, YAML, DASHBOARD),),
}
"""Features that each extra makes usable. Some frameworks install PyYAML and cryptography too."""


class CommandFailed(Exception):
    """A command failed; the message is its output."""


class Environment:
    """A clean virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder
        self._python = str(folder / "bin" / "python")

    def run(self, *arguments: str) -> str:
        """Run Python with `arguments`, and return its output.

        Raises:
            CommandFailed: The exit code is not 0.
        """
        # The working directory is the environment's own, so that the checkout is not importable.
        command = [self._python, *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        completed = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        if completed.returncode != 0:
            raise CommandFailed(
                f"{' '.join(arguments)[:200]}: exit code {completed.returncode}\n"
                f"{completed.stdout}{completed.stderr}"
            )
        return completed.stdout

    def install(self, *requirements: str) -> int:
        """Install `requirements`, check for conflicts, and return the number of packages."""
        pip = ("-m", "pip", "--disable-pip-version-check")
        self.run(*pip, "install", "--quiet", "--no-input", *requirements)
        self.run(*pip, "check")
        count = (
            "import importlib.metadata as m; "
            "print(len({d.name for d in m.distributions()} - {'pip', 'setuptools'}))"
        )
        return int(self.run("-c", count))

    def versions(self, *names: str) -> str:
        """Installed versions of `names`."""
        code = (
            "import sys, importlib.metadata as m; "
            "print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
        )
        return self.run("-c", code, *names).strip()


def example_on(page: str) -> str:
    """First Python block of a Markdown page."""
    return code_blocks((ROOT / page).read_text(encoding="utf-8"), "python")[0]


def check_extra(extra: str, wheel: Path, folder: Path, *, alone: bool) -> None:
    """Install `wheel` with `extra` and use it.

    Unless `alone`, repeat this next to other frameworks.
    """
    environment, example = Environment(folder), folder / "example.py"
    code = example_on("README.md")
    example.write_text(code)
    (folder / "test_adapter.py").write_text(example_on("docs/how-to/write-an-adapter.md"))
    requirement = f"{wheel}[{extra}]" if extra != "core" else str(wheel)
    packages = environment.install(requirement)
    print_progress(extra, f"{packages} packages, no conflicts")
    printed = environment.run("-W", "error", str(example)).strip()
    if not printed:
        raise CommandFailed("README's first example printed nothing")
    print_progress("", f"README's first example: {printed}")
    usable = {feature.name for feature in FEATURES_BY_EXTRA[extra]}
    for feature in FEATURES:
        check_function = "use" if feature.name in usable else "miss"
        print_progress("", environment.run(str(PROBE), check_function, feature.name).strip())
    if not alone:
        packages = environment.install(requirement, *NEIGHBOURS)
        print_progress(
            "", f"next to {environment.versions(*NEIGHBOURS)}: {packages} packages, no conflicts"
        )
        printed = environment.run("-c", f"import {', '.join(NEIGHBOURS.values())}\n{code}").strip()
        print_progress("", f"README's first example, with all of them imported: {printed}")
        for feature in FEATURES_BY_EXTRA[extra]:
            print_progress("", environment.run(str(PROBE), "use", feature.name).strip())


def print_progress(extra: str, line: str) -> None:
    """Print progress."""
    print(f"{extra:<11} {line}", flush=True)


def main() -> int:
    """Check the named extras, or all. Returns 1 if any fails."""
    parser = argparse.ArgumentParser(prog="make install-check", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "extras",
        nargs="*",
        metavar="EXTRA",
        help=f"of {', '.join(FEATURES_BY_EXTRA)}; default: all",
    )
    parser.add_argument("--alone", action="store_true", help="without other frameworks")
    known = parser.parse_args()
    if unknown := set(known.extras) - FEATURES_BY_EXTRA.keys():
        parser.error(f"unknown: {', '.join(unknown)}")
    failed = []
    for extra in known.extras or FEATURES_BY_EXTRA:
        with tempfile.TemporaryDirectory(prefix="meshpoint-") as folder:
            try:
                check_extra(extra, known.wheel.resolve(), Path(folder), alone=known.alone)
            except CommandFailed as error:
                failed.append(extra)
                print_progress(extra, f"FAILED: {error}")
    print(f"failed: {', '.join(failed)}" if failed else "every extra works", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
