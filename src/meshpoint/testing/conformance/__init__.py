"""Test suites for adapters and agents, to be subclassed in pytest modules."""

from meshpoint import extras

extras.CONFORMANCE.require(__name__)
