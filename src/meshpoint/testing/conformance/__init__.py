"""Suites that any adapter, and any user's agent, can run with pytest."""

from meshpoint import extras

extras.CONFORMANCE.require(__name__)
