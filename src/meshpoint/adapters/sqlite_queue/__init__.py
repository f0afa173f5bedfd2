"""An embedded broker: durable queues in one SQLite file, for several processes on one host."""

from meshpoint.adapters.sqlite_queue.broker import SqliteBroker

__all__ = ["SqliteBroker"]
