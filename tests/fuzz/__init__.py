"""Mutated messages on live replicas, with honest traffic next to them, and a ledger for both.

`python -m fuzz --minutes 10` (with `tests` on PYTHONPATH), or `make fuzz MINUTES=10`; `make test` runs a minute.
"""
