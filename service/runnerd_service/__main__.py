"""``python -m runnerd_service`` is the command ``runnerd``."""

import sys

from runnerd_service.cli.main import main

if __name__ == "__main__":  # the engine process imports this module again
    sys.exit(main())
