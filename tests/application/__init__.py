"""The example application under load, while its processes are killed at random.

`make application` is the long form, `test_application.py` the short one.
"""
