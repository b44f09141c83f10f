"""Plans on a terminal and in a notebook, the tables of GPUs, and the progress of a search."""
