"""The command line: commands parse and print, and import nothing heavy before one runs."""

import sys


def run() -> int:
    """The program `ragblend`: as `main`, and Ctrl-C is no traceback while modules are imported, either."""
    try:
        from ragblend.app.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 1
