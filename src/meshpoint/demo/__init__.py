"""The demonstration: three replicas, two of them killed, every request answered once. `run` is all of it."""

from __future__ import annotations

__all__ = ["run"]


def run(
    *, broker_url: str | None = None, db_url: str | None = None, requests: int, seed: int | None, as_json: bool
) -> int:
    """Show the demonstration; 0 when its ledger is as it must be, else 1.

    Args:
        broker_url: RabbitMQ; None: a SQLite file that is gone afterwards.
        db_url: PostgreSQL, whose tables are made if they are missing; None: a SQLite file that is gone afterwards.
        requests: how many tasks to start.
        seed: how fast the peers are, and what they answer; None: some other way each time.
        as_json: print the ledger as JSON, and nothing else, on standard output.

    Raises:
        MeshpointError: a server cannot be used, or a replica did not start.
    """
    from meshpoint.demo.show import run_demo

    return run_demo(broker_url=broker_url, db_url=db_url, requests=requests, seed=seed, as_json=as_json)
