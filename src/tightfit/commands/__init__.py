"""What each command of the command line does, a module each; `tightfit.cli` reads the words and calls them."""
