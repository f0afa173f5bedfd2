"""Models that follow the script of `trips`: one for each framework."""
