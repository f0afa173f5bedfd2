"""Test suites for adapters and agents, to be subclassed in pytest modules."""

import pkgutil

from meshpoint import extras

extras.CONFORMANCE.require(__name__)

import pytest  # noqa: E402

pytest.register_assert_rewrite(
    *(f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__))
)
