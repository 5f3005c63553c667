import sys

from hybridps_server.server import main

sys.exit(main())
