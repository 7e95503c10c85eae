"""``python -m cosmos_lab`` is the command ``cosmos-lab``."""

import sys

from cosmos_lab.cli.main import main

sys.exit(main())
