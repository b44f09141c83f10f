"""A process that evaluates the recipes it reads from standard input; see `pool`."""

from __future__ import annotations

import os
import sys

from tightfit.planning.search.evaluate import InProcess
from tightfit.planning.search.pool import read, write


def main() -> None:
    """Evaluate until the input ends. Anything that a model prints goes to standard error."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    paths, name, calibration, margin = read(jobs)
    sys.path[:] = paths

    from tightfit.backends import load_backend
    from tightfit.planning.standard_tools import standard_tools

    backend = load_backend(name)
    evaluate = InProcess(standard_tools(backend.predict, calibration, unseen=backend.unseen), margin)
    write(answers, "ready")
    while True:
        try:
            recipe, device = read(jobs)
        except EOFError:
            return
        write(answers, evaluate.one(recipe, device))


if __name__ == "__main__":
    main()
