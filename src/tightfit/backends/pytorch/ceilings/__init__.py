"""How fast this machine really is: products, attention, bandwidth, the host."""
