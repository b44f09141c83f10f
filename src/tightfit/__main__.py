"""`python -m tightfit`: the same as the command `tightfit`."""

from tightfit.cli import main

main()
