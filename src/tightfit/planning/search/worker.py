"""A process that evaluates the recipes it gets over a connection; see `pool`."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from tightfit.planning.search.evaluate import InProcess


def main() -> None:
    """Evaluate until the connection ends, whose file descriptor is the first argument."""
    connection = Connection(int(sys.argv[1]))
    paths, name, calibration, margin = connection.recv()
    sys.path[:] = paths

    from tightfit.backends import load_backend
    from tightfit.planning.standard_tools import standard_tools

    backend = load_backend(name)
    evaluate = InProcess(standard_tools(backend.predict, calibration, unseen=backend.unseen), margin)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            connection.send(evaluate.one(*connection.recv()))


if __name__ == "__main__":
    main()
