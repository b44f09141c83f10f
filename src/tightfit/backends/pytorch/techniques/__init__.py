"""How each technique is applied: a file or a package for each slot."""
