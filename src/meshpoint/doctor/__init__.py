"""`meshpoint doctor`: what a deploy of a configuration would do.

`facts.py` reads the servers, each within a time limit. The checks are functions of these facts.
"""
