"""Meshpoint's value types. Nothing here does I/O."""
