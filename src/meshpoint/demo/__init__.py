"""The demo: three replicas, two of them killed, every request answered once."""
