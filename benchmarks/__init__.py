"""Benchmarks of Meshpoint and of other systems that do the same work.

Run `python -m benchmarks --help`.
"""
