"""State machines on each store; SQL stores run in lockstep with the in-process store.

Runs are deterministic, so a failure can be repeated; it is printed as the steps that led to it.
`make model` runs the long form: `MESHPOINT_MODEL_EXAMPLES` sets the number of runs per store, each
with a new seed. A failing run is then reduced to few steps, which may take minutes, and printed
with the code that repeats it.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from machines.lockstep import LockstepStore
from machines.store_machine import StoreMachine
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.sql import SqlStore
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import TIMINGS

_MIN_EXAMPLES = int(os.environ.get("MESHPOINT_MODEL_EXAMPLES", "0"))
_NAMESPACES = count(1)


class InProcessMachine(StoreMachine):
    """The in-process store, checked against the ledger alone."""

    def open_store(self) -> CheckpointStore:
        return InProcessStore(self.clock, timings=TIMINGS)


def sql_machine(url: str) -> type[StoreMachine]:
    """Machines on one database, each in its namespace, in lockstep with the in-process store."""

    class SqlMachine(StoreMachine):
        def open_store(self) -> CheckpointStore:
            store = SqlStore(
                url,
                namespace=f"machine-{next(_NAMESPACES)}",
                dispatch_lease=TIMINGS.dispatch_lease,
                tombstone_ttl=TIMINGS.tombstone_ttl,
                parked_limit=TIMINGS.parked_limit,
                checkpoint_ttl=TIMINGS.checkpoint_ttl,
                checkpoint_history=TIMINGS.checkpoint_history,
                checkpoint_archive=TIMINGS.checkpoint_archive,
                keep_security_context=TIMINGS.keep_security_context,
                pool_size=1,
                clock=self.clock,
            )
            lockstep = LockstepStore(store, InProcessStore(self.clock, timings=TIMINGS))
            return cast(CheckpointStore, lockstep)  # the machine uses no operations

    return SqlMachine


def run_machines(machine: type[StoreMachine], *, examples: int, steps: int) -> None:
    """Run `examples` machines of `steps` steps; the environment overrides the number of runs."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=not _MIN_EXAMPLES,
            max_examples=_MIN_EXAMPLES or examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if _MIN_EXAMPLES else [Phase.generate],
            print_blob=bool(_MIN_EXAMPLES),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_inprocess_store_matches_the_model() -> None:
    run_machines(InProcessMachine, examples=50, steps=40)


def test_the_sqlite_store_matches_the_model(tmp_path: Path) -> None:
    run_machines(sql_machine(f"sqlite:///{tmp_path}/tasks.db"), examples=25, steps=30)


def test_the_postgres_store_matches_the_model(postgres_url: str) -> None:
    run_machines(sql_machine(postgres_url), examples=10, steps=30)
