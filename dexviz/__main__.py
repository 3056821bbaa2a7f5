"""`python -m dexviz`: the command line."""

import sys

from dexviz.cli import main

if __name__ == "__main__":
    sys.exit(main())
