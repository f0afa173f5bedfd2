"""The dashboard in a browser: `make dashboard-check`. Its scene also serves the unit tests."""
