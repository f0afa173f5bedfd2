"""The broker on PostgreSQL: queues as tables."""

from meshpoint.adapters.postgres_queue.broker import PostgresBroker

__all__ = ["PostgresBroker"]
