"""The command line: det-lightning."""

import sys


def main() -> None:
    """Console entry point: run the command in sys.argv and exit with its code (see `exit_codes`)."""
    from det_lightning.cli.app import run

    sys.exit(run(sys.argv[1:]))
