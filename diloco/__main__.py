"""`python -m diloco` is `diloco`."""

import atexit
import os
import sys

from diloco.cli import main
from diloco.exchange.world import started_here


def _end(code: int) -> None:
    """Exit without tearing the interpreter down. gloo's threads may still be releasing tensors, for which they need the
    interpreter: if it is gone, they abort the process (torch 2.13, Python 3.11: one export of a sharded run in ten)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    code = main()
    if started_here():
        _end(code)
    sys.exit(code)
