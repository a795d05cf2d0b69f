"""``python -m extensor.cli``."""

import sys

from extensor.cli import main

sys.exit(main())
