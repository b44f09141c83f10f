"""How plans are shown: on a terminal, in a notebook."""
