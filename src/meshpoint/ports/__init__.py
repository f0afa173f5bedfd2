"""Protocols for everything outside Meshpoint, with conformance suites in `meshpoint.testing`."""
