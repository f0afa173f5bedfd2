"""Many replicas under every kind of fault, and an external ledger that checks each request.

`python -m chaos --minutes 20` (with `tests` on PYTHONPATH), or `make chaos`; `make test` runs one
minute of it.
"""
