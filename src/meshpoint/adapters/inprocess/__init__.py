"""Adapters that live in one process: for tests, notebooks and tasks that are not kept."""
