"""The task store on PostgreSQL and SQLite."""

from meshpoint.adapters.sql.store import SqlStore

__all__ = ["SqlStore"]
