"""The demo: three replicas, two of them killed, every request answered once."""

from __future__ import annotations

__all__ = ["run"]


def run(
    *, broker_url: str | None = None, db_url: str | None = None, requests: int, seed: int | None, as_json: bool
) -> int:
    """Run the demo; return 0 if every number of its ledger is as expected, else 1.

    Args:
        broker_url: RabbitMQ; `None` for a temporary SQLite file.
        db_url: PostgreSQL, whose tables are created if missing; `None` for a temporary SQLite
            file.
        requests: Number of tasks to start.
        seed: Determines the response times and answers of the peers; `None` for a random seed.
        as_json: Print only the ledger, as JSON on standard output.

    Raises:
        MeshpointError: A server cannot be used, or a replica did not start.
    """
    from meshpoint.demo.show import run_demo

    return run_demo(broker_url=broker_url, db_url=db_url, requests=requests, seed=seed, as_json=as_json)
