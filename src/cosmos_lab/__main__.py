"""``python -m cosmos_lab`` is the command ``cosmos-lab``."""

from cosmos_lab.cli.main import run_and_leave

run_and_leave()
