"""Start the server with ``python -m kvstore.server``."""

import sys

from kvstore.server.main import main

sys.exit(main())
