"""Experiments and measurements; each module is a command, `python -m benchmarks.NAME`."""

import time

BEGAN = time.monotonic()  # The start of the command, before torch is imported.
