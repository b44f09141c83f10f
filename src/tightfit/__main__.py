"""`python -m tightfit`: the same as the command `tightfit`."""

import sys


def main() -> None:
    """The command line; Ctrl-C while it loads ends it as any later one does."""
    try:
        from tightfit.cli import main as run

        run()
    except KeyboardInterrupt:
        print("tightfit: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
