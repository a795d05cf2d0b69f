"""`python -m training` in a checkout, `python -m extensor.training` anywhere.

The import is absolute: the package has one name, `extensor.training`, whatever ``-m`` called it.
"""

import sys

from extensor.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
