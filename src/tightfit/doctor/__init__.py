"""Looking at the machine at hand: so far, how fast its device really runs."""
