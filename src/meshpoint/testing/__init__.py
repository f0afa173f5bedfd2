"""Suites that any adapter, and any user's agent, can run with pytest."""
