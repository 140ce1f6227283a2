"""`python -m mpiparallel`, alone or under mpirun."""

import sys

from mpiparallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
