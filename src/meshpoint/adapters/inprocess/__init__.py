"""Adapters that keep everything in this process, for tests, notebooks and non-durable tasks."""
