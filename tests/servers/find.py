"""Finds the programs of PostgreSQL, RabbitMQ and Redis, and installs them where that is allowed."""

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
    return _found(
        "postgres", "postgresql", _postgres, "MESHPOINT_TEST_PG_URL=postgresql://user:password@host/postgres"
    )


def rabbit_programs() -> Path:
    """The folder of `rabbitmq-server` and `rabbitmqctl`.

    Raises:
        ServersMissing: not found, and not installable.
    """
    return _found("rabbitmq-server", "rabbitmq-server", _rabbit, "MESHPOINT_TEST_AMQP_URL=amqp://user:password@host/")


def redis_programs() -> Path:
    """The folder of `redis-server`.

    Raises:
        ServersMissing: not found, and not installable.
    """
    return _found("redis-server", "redis-server", _redis, "MESHPOINT_TEST_REDIS_URL=redis://host/0")


def _postgres() -> Iterator[Path]:
    def version(folder: Path) -> float:
        name = folder.parent.name
        return float(name) if name.replace(".", "").isdigit() else 0.0

    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=version, reverse=True)
    yield from _on_path("initdb")


def _rabbit() -> Iterator[Path]:
    # Debian's programs on PATH are wrappers that drop the environment
    yield Path("/usr/lib/rabbitmq/bin")
    yield from _on_path("rabbitmq-server")


def _redis() -> Iterator[Path]:
    yield from _on_path("redis-server")


def _on_path(program: str) -> Iterator[Path]:
    place = shutil.which(program)
    if place:
        yield Path(place).resolve().parent
        yield Path(place).parent


def _found(program: str, package: str, places: Callable[[], Iterator[Path]], variable: str) -> Path:
    def look() -> Path | None:
        return next((place for place in places() if (place / program).exists()), None)

    place = look()
    if place is None and _may_install():
        _install(package)
        place = look()
    if place is None:
        raise ServersMissing(
            f"{program} was not found. Install it (`sudo apt-get install {package}`, `brew install {package}`), "
            f"or name a server that the tests may use: {variable}. "
            'Without servers: `.venv/bin/python -m pytest -m "not servers"`.'
        )
    return place


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _install(package: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _nothing_started():
        for arguments in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", package]):
            done = subprocess.run(
                ["apt-get", *arguments], env=environment, capture_output=True, text=True, check=False
            )
    if done.returncode != 0:
        raise ServersMissing(f"apt-get install {package} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")


@contextmanager
def _nothing_started() -> Iterator[None]:
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
