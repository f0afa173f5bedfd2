"""Many replicas, every fault there is, and a ledger outside that says what became of each request.

`python -m chaos --minutes 20` (with `tests` on PYTHONPATH), or `make chaos`; `make test` runs a minute of it.
"""
