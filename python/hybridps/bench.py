"""`python -m hybridps.bench`: `hybridps bench`, for launchers that run a module."""

import sys

from hybridps.tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
