"""The parts of an HTML page that the ladder's page is made with, until it has its own template."""
