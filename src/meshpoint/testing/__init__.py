"""Test suites for adapters and agents, to be subclassed in pytest modules."""
