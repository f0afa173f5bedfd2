"""Contenders of the store benchmark: Meshpoint and others that do the same work."""
