"""The store's model, driven on each adapter: on SQL in lockstep with the store in memory.

Every run is the same, so that a failure seen once is seen again; it is printed as the steps that led to it. `make
model` runs the long form: `MESHPOINT_MODEL_EXAMPLES` says how many runs each store gets then, with seeds that are new
each time. A failing run is then reduced to few steps, which may take minutes, and printed with what repeats it.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from machines.lockstep import Lockstep
from machines.machine import StoreMachine
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.sql import SqlStore
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import TIMINGS

_EXAMPLES = int(os.environ.get("MESHPOINT_MODEL_EXAMPLES", "0"))
_NAMESPACES = count(1)


class MemoryMachine(StoreMachine):
    """The store in memory, against the ledger alone."""

    def open_store(self) -> CheckpointStore:
        return InProcessStore(self.clock, timings=TIMINGS)


def sql_machine(url: str) -> type[StoreMachine]:
    """Machines that drive one database, each in a namespace of its own, beside a store in memory."""

    class SqlMachine(StoreMachine):
        def open_store(self) -> CheckpointStore:
            store = SqlStore(
                url,
                namespace=f"machine-{next(_NAMESPACES)}",
                dispatch_lease=TIMINGS.dispatch_lease,
                tombstone_ttl=TIMINGS.tombstone_ttl,
                incompatible_limit=TIMINGS.incompatible_limit,
                checkpoint_ttl=TIMINGS.checkpoint_ttl,
                checkpoint_history=TIMINGS.checkpoint_history,
                checkpoint_archive=TIMINGS.checkpoint_archive,
                pool_size=1,
                clock=self.clock,
            )
            return Lockstep(store, InProcessStore(self.clock, timings=TIMINGS))

    return SqlMachine


def drive(machine: type[StoreMachine], *, examples: int, steps: int) -> None:
    """Run so many machines for so many steps; in the long form as many as the environment says."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=not _EXAMPLES,
            max_examples=_EXAMPLES or examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if _EXAMPLES else [Phase.generate],
            print_blob=bool(_EXAMPLES),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_store_in_memory_keeps_its_promises() -> None:
    drive(MemoryMachine, examples=80, steps=40)


def test_the_store_on_sqlite_keeps_its_promises(tmp_path: Path) -> None:
    drive(sql_machine(f"sqlite:///{tmp_path}/tasks.db"), examples=40, steps=30)


def test_the_store_on_postgres_keeps_its_promises(postgres_url: str) -> None:
    drive(sql_machine(postgres_url), examples=15, steps=30)
