"""What the SQL store does about the errors of its drivers."""

from __future__ import annotations

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError

from meshpoint.adapters.sql.failures import Failure, classify


def wrapped(error: Exception) -> DBAPIError:
    """`error` as SQLAlchemy raises it: inside its adapter's error, inside its own."""
    adapted = Exception("in words of the server, which may be in any language")
    adapted.__cause__ = error
    return DBAPIError("SELECT 1", None, adapted)


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped], ids=["fast path", "SQLAlchemy"])
def test_a_plan_that_a_migration_outdated_is_prepared_again(wrap: object) -> None:
    assert callable(wrap)
    assert classify(wrap(asyncpg.InvalidCachedStatementError("x"))) is Failure.RETRY
    assert (
        classify(wrap(asyncpg.FeatureNotSupportedError("cached statement plan")))
        is not Failure.RETRY
    )
