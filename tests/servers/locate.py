"""Find the programs of PostgreSQL, RabbitMQ and Redis, or install them where allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLICY = Path("/usr/sbin/policy-rc.d")


class ServersMissing(Exception):
    """A server cannot be found or installed; the message says what to do."""


def postgres_programs() -> Path:
    """The folder of `postgres` and `initdb`.

    Raises:
        ServersMissing: not found, and not installable.
    """
    return _find_or_install(
        "postgres",
        "postgresql",
        _postgres_folders,
        "MESHPOINT_TEST_PG_URL=postgresql://user:password@host/postgres",
    )


def rabbit_programs() -> Path:
    """The folder of `rabbitmq-server` and `rabbitmqctl`.

    Raises:
        ServersMissing: not found, and not installable.
    """
    return _find_or_install(
        "rabbitmq-server",
        "rabbitmq-server",
        _rabbit_folders,
        "MESHPOINT_TEST_AMQP_URL=amqp://user:password@host/",
    )


def redis_programs() -> Path:
    """The folder of `redis-server`.

    Raises:
        ServersMissing: not found, and not installable.
    """
    return _find_or_install(
        "redis-server", "redis-server", _redis_folders, "MESHPOINT_TEST_REDIS_URL=redis://host/0"
    )


def _postgres_folders() -> Iterator[Path]:
    def version(folder: Path) -> float:
        name = folder.parent.name
        return float(name) if name.replace(".", "").isdigit() else 0.0

    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=version, reverse=True)
    yield from _folders_on_path("initdb")


def _rabbit_folders() -> Iterator[Path]:
    # Debian's programs on PATH are wrappers that drop the environment
    yield Path("/usr/lib/rabbitmq/bin")
    yield from _folders_on_path("rabbitmq-server")


def _redis_folders() -> Iterator[Path]:
    yield from _folders_on_path("redis-server")


def _folders_on_path(program: str) -> Iterator[Path]:
    folder = shutil.which(program)
    if folder:
        yield Path(folder).resolve().parent
        yield Path(folder).parent


def _find_or_install(
    program: str, package: str, candidates: Callable[[], Iterator[Path]], variable: str
) -> Path:
    def search() -> Path | None:
        return next((place for place in candidates() if (place / program).exists()), None)

    folder = search()
    if folder is None and _may_install():
        _install(package)
        folder = search()
    if folder is None:
        raise ServersMissing(
            f"{program} was not found. Install it (`sudo apt-get install {package}`, "
            f"`brew install {package}`), or name a server that the tests may use: {variable}. "
            'Without servers: `.venv/bin/python -m pytest -m "not servers"`.'
        )
    return folder


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _install(package: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _prevent_service_start():
        for arguments in (
            ["update", "-qq"],
            ["install", "-qq", "-y", "--no-install-recommends", package],
        ):
            completed = subprocess.run(
                ["apt-get", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
    if completed.returncode != 0:
        raise ServersMissing(
            f"apt-get install {package} failed:\n"
            f"{completed.stdout[-1000:]}{completed.stderr[-1000:]}"
        )


@contextmanager
def _prevent_service_start() -> Iterator[None]:
    """Keep the packages from starting servers on their default ports."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
