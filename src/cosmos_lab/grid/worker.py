"""Train one run in its own process: ``python -m cosmos_lab.grid.worker CONFIG.json``, JSON of ``RunConfig.flat()``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cosmos_lab.config import RunConfig
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import train


def main(arguments: list[str]) -> int:
    """Train with the config in the file; return the exit code."""
    config = RunConfig.from_flat(json.loads(Path(arguments[0]).read_text()))
    try:
        train(config)
    except Stopped as stop:
        print(f"cosmos-lab: {stop}", file=sys.stderr)
        return stop.code
    except (ValueError, OSError) as error:
        print(f"cosmos-lab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
