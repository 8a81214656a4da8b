"""`python -m benchmarks.peers`."""

import sys

from benchmarks.peers.run import main

sys.exit(main(sys.argv[1:]))
