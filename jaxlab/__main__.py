"""`python -m jaxlab` is the `jaxlab` command."""

import sys

from jaxlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
