"""`python -m thinpipe` is the command `thinpipe`."""

import sys

from thinpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
