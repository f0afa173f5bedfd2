"""A private PostgreSQL for tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from .locate import postgres_programs
from .process import PrivateServer, ServerFolder, free_port


class PostgresServer(PrivateServer):
    """A fresh cluster with fsync on, so that tests of lost commits are meaningful.

    `settings` are added to its own.
    """

    stop_signal = signal.SIGINT  # "fast": ends sessions
    abort_signal = signal.SIGQUIT  # "immediate": recovers at the next start

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = settings or {}
        self._programs = postgres_programs()
        super().__init__(ServerFolder("postgres", ("postgres", "nobody")))
        self.port = free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._data = self.folder.path / "data"
        initdb = [
            str(self._programs / "initdb"),
            "--pgdata",
            str(self._data),
            "--username=postgres",
            "--auth=trust",
        ]
        self.folder.run(
            [*initdb, "--no-sync", "--encoding=UTF8", "--locale=C"], self.environment()
        )

    def command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder.path),
            "max_connections": "500",
            "max_wal_size": "256MB",  # the folder may be in memory
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self._data), *options]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder.path),
            "LC_ALL": "C",
        }

    def is_ready(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return (
            self.running
            and bool(lines)
            and lines[0] == str(self._process_id)
            and lines[-1].strip() == "ready"
        )

    @property
    def _process_id(self) -> int:
        return self._process.pid if self._process else 0
