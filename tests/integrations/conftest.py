"""Settings for all frameworks."""

import contextlib

with contextlib.suppress(ModuleNotFoundError):
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: tests fork, and it may hold a lock that the child then waits for
