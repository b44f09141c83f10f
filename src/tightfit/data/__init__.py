"""Data: from files, data sets or random numbers to windows of micro-batches. Framework-free."""

from tightfit.data.loading import WindowLoader, evaluation_windows
from tightfit.data.preparation import Prepared, prepare

__all__ = ["Prepared", "WindowLoader", "evaluation_windows", "prepare"]
