"""The report: a training step, measured and predicted, as one HTML file that opens offline."""
