"""How a plan is shown: as text on a terminal, as HTML in a notebook, over all GPUs of the catalogue."""
