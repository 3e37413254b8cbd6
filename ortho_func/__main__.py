"""``python -m ortho_func``: see `ortho_func.cli.main`."""

import sys

from ortho_func.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
