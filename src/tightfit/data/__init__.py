"""Data: from files, data sets or random numbers to global batches of micro-batches. Framework-free."""

from tightfit.data.loading import GlobalBatchLoader, evaluation_global_batches
from tightfit.data.preparation import Prepared, prepare

__all__ = ["GlobalBatchLoader", "Prepared", "evaluation_global_batches", "prepare"]
