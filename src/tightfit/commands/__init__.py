"""Commands, a module each; `tightfit.cli` reads the words and calls them."""
