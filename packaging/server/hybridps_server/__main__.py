import sys

from hybridps_server._server import main

sys.exit(main())
