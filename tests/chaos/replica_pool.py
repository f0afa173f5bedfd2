"""Real replica processes. A replica that ends is replaced."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

from servers import Proxy

from .replica import PRELOADED_MODULES, ReplicaSpec, main

AGENTS = ("root", "middle", "leaf", "viper", "stubborn")
FAST_OPTIONS = {
    "stateless_checkpointing": True,
    "session_service": "sql",
    "lease_seconds": 2,
    "max_attempts": 1000,  # the faults, not the requests, cause the failures here
    "renew_interval_seconds": 0.5,
    "sweep_interval_seconds": 0.2,
    "settle_time_seconds": 1,
    "dispatch_lease_seconds": 1,
    "drain_timeout_seconds": 5,
    "checkpoint_retry_time_seconds": 2,
    "incompatible_pause_seconds": 0.5,  # also the pause after a working memory was unavailable
    "db_pool_size": 3,
}
"""Timings that make faults show within seconds."""


def make_configuration(
    namespace: str, redis_url: str, broker_url: str, db_url: str
) -> dict[str, Any]:
    """Configuration of a replica under chaos."""
    agent_options = {"session_db_url": db_url, "memory_url": redis_url, **FAST_OPTIONS}
    viper_options = {"max_attempts": 2}  # `viper` causes its own failures
    agents = [
        {
            "name": name,
            "entrypoint": f"chaos.agents:{name}",
            **agent_options,
            **(viper_options if name == "viper" else {}),
        }
        for name in AGENTS
    ]
    mesh = {"namespace": namespace, "broker_url": broker_url, "queue_lease_seconds": 5}
    return {"mesh": mesh, "agents": agents}


_FORK_CONTEXT = multiprocessing.get_context("forkserver")
_FORK_CONTEXT.set_forkserver_preload(PRELOADED_MODULES)
_FIRST_START_TIMEOUT = 120.0
"""Seconds until all replicas must serve, with all servers up."""
_MAX_DRAIN_SECONDS = 40.0
"""Seconds: four times what the configuration allows."""
LATE_DRAIN = "drain took too long"
"""Exit kind of a replica that had to be killed."""
_RESTART_PAUSE = 0.5
"""Seconds before a replica that did not get as far as serving is replaced."""


class ReplicasNotStarted(Exception):
    """The replicas did not start; carries their last output."""


@dataclass
class ReplicaSlot:
    """One place in the pool: its proxies and the process that fills it now."""

    number: int
    config: Path
    broker: Proxy
    database: Proxy
    process: ForkServerProcess | None = None
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    stop_signal: signal.Signals | None = None
    terminated_at: float = 0.0
    incarnation: int = 0

    @property
    def is_serving(self) -> bool:
        """Whether its process serves, so that a fault may strike it."""
        return self.serving.is_set() and not self.frozen and self.stop_signal is None

    def signal(self, number: signal.Signals) -> None:
        """Send `number` unless the process has ended; its supervisor may not know that yet."""
        if self.process is None or self.process.pid is None:
            return
        if number is signal.SIGTERM:
            self.terminated_at = time.monotonic()
        try:
            os.kill(self.process.pid, number)
        except ProcessLookupError:
            return
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self.stop_signal = self.stop_signal or number
            self.serving.clear()


MakeConfiguration = Callable[[str, str], dict[str, Any]]
"""Makes a replica's configuration from its broker URL and database URL."""


class ReplicaPool:
    """`size` replicas, each serving every agent. An async context manager."""

    def __init__(
        self,
        folder: Path,
        make_configuration: MakeConfiguration,
        broker_url: str,
        db_url: str,
        *,
        seed: int,
        size: int,
        target: Callable[[ReplicaSpec, Connection], None] = main,
    ) -> None:
        self._folder, self._make_configuration, self._seed, self._size, self._target = (
            folder,
            make_configuration,
            seed,
            size,
            target,
        )
        self._urls = broker_url, db_url
        self._agents = [each["name"] for each in make_configuration(broker_url, db_url)["agents"]]
        self._supervisor_tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._changed = asyncio.Event()
        self.slots: list[ReplicaSlot] = []
        self.exits: Counter[str] = Counter()
        self.duplicate_share = 0.03

    async def __aenter__(self) -> ReplicaPool:
        for number in range(self._size):
            broker, database = (
                await Proxy(self._urls[0]).__aenter__(),
                await Proxy(self._urls[1]).__aenter__(),
            )
            self.slots.append(
                ReplicaSlot(
                    number, self._write_configuration(number, broker, database), broker, database
                )
            )
        self._supervisor_tasks = [
            asyncio.create_task(self._supervise(slot)) for slot in self.slots
        ]
        try:
            async with asyncio.timeout(_FIRST_START_TIMEOUT):
                await asyncio.gather(*(post.serving.wait() for post in self.slots))
        except TimeoutError as error:
            await self.__aexit__()
            raise ReplicasNotStarted(
                f"not all replicas serve after {_FIRST_START_TIMEOUT:g} s: "
                f"{dict(self.exits)}{self._last_output()}"
            ) from error
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._ending = True
        self._kill_all()
        await asyncio.gather(*self._supervisor_tasks, return_exceptions=True)
        for slot in self.slots:
            await slot.broker.__aexit__(None, None, None)
            await slot.database.__aexit__(None, None, None)

    async def drain(self) -> None:
        """End every replica with SIGTERM.

        A replica that does not end is killed and counts as a failed drain.
        """
        self._ending = True
        for slot in self.slots:
            slot.signal(signal.SIGTERM)
        _, pending = await asyncio.wait(self._supervisor_tasks, timeout=_MAX_DRAIN_SECONDS + 1)
        if pending:
            self._kill_all()
        await asyncio.gather(*self._supervisor_tasks)

    def _kill_all(self) -> None:
        for slot in self.slots:
            slot.signal(signal.SIGKILL)

    async def wait_for_serving(self) -> list[ReplicaSlot]:
        """Wait until at least one replica may be struck, and return all of them."""
        while not (serving := [slot for slot in self.slots if slot.is_serving]):
            self._changed.clear()
            await self._changed.wait()
        return serving

    def _last_output(self) -> str:
        logs = [
            path.read_text(errors="replace")[-500:] for path in sorted(self._folder.glob("*.log"))
        ]
        return "".join(f"\n{log}" for log in logs[-2:])

    def _write_configuration(self, number: int, broker: Proxy, database: Proxy) -> Path:
        broker_url, db_url = self._urls
        proxied_urls = [url if url.startswith("sqlite:") else proxy.url
                   for url, proxy in ((broker_url, broker), (db_url, database))]  # fmt: skip
        path = self._folder / f"replica-{number}.yaml"
        path.write_text(yaml.safe_dump(self._make_configuration(*proxied_urls)))
        return path

    async def _supervise(self, slot: ReplicaSlot) -> None:
        while not self._ending:
            was_serving = await self._run_replica(slot)
            if not was_serving and not self._ending:
                await asyncio.sleep(_RESTART_PAUSE)

    async def _run_replica(self, slot: ReplicaSlot) -> bool:
        """Run one process in this place until it ends; return whether it served every agent."""
        slot.incarnation += 1
        slot.stop_signal = None
        name = f"{slot.number}-{slot.incarnation:04}"
        order = ReplicaSpec(
            slot.config, self._folder, name, f"{self._seed} {name}", self.duplicate_share
        )
        reader, writer = _FORK_CONTEXT.Pipe()
        process = _FORK_CONTEXT.Process(target=self._target, args=(order, writer))
        await asyncio.to_thread(process.start)
        writer.close()
        slot.process = process
        was_serving = await self._listen(slot, reader)
        await _wait_until_readable(process.sentinel)
        process.join()
        slot.process = None
        self._record_exit(slot, name, process.exitcode or 0, was_serving)
        process.close()
        slot.frozen = False
        return was_serving

    async def _listen(self, slot: ReplicaSlot, reader: Connection) -> bool:
        """Read the process's pipe until it closes; return whether it served every agent."""
        agents = 0
        with reader:
            while True:
                await _wait_until_readable(reader.fileno())
                try:
                    reader.recv_bytes()
                except (EOFError, OSError):
                    break
                agents += 1
                if agents == len(self._agents) and slot.stop_signal is None:
                    slot.serving.set()
                    self._changed.set()
        slot.serving.clear()
        return agents == len(self._agents)

    def _record_exit(self, slot: ReplicaSlot, name: str, code: int, was_serving: bool) -> None:
        if slot.stop_signal is signal.SIGKILL:
            kind = "killed"
        elif (
            slot.stop_signal is signal.SIGTERM
            and time.monotonic() > slot.terminated_at + _MAX_DRAIN_SECONDS
        ):
            kind = LATE_DRAIN
        elif slot.stop_signal is signal.SIGTERM:
            kind = "drained" if code == 0 else f"drain ended with {code}"
        else:
            kind = "fell" if was_serving else "did not start"
        self.exits[kind] += 1
        with (self._folder / "exits").open("a") as file:
            file.write(f"{time.time():.3f} {name} {kind} {code}\n")


async def _wait_until_readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
