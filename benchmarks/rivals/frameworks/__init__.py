"""Durable agents of frameworks: a model calls one peer N times, with a pause each, then answers.

Each contender runs in its own process, driven through `driver.serve`. The fake models answer at
once, and the peer's work takes no time, so that throughput measures the systems.
"""
