"""Where the version of a release is written."""

__version__ = "0.1.0"
"""The version of this release. The build reads it from here."""
