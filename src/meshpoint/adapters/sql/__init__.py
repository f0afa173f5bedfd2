"""The checkpoint store on PostgreSQL and SQLite."""

from meshpoint.adapters.sql.store import SqlCheckpointStore

__all__ = ["SqlCheckpointStore"]
