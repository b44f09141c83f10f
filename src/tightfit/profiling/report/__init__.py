"""The report: a measured training step beside its predicted one, as one HTML file that needs nothing else."""
