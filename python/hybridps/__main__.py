import sys

from hybridps.tools.cli import main

sys.exit(main())
