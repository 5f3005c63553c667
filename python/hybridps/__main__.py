import sys

from hybridps.cli import main

sys.exit(main())
