"""Mutated messages against live replicas, alongside honest traffic, with a ledger of both.

`python -m fuzz --minutes 10` (with `tests` on PYTHONPATH), or `make fuzz MINUTES=10`; `make test`
runs one minute.
"""
