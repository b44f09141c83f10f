"""Application of techniques: a file or a package for each slot."""
