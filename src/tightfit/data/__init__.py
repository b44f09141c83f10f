"""Data: from files, data sets or random numbers to windows of micro-batches. Framework-free."""

from tightfit.data.loading import WindowLoader, evaluation_windows
from tightfit.data.preparation import Prepared, prepare
from tightfit.data.rows import Rows, samples_from_rows
from tightfit.data.samples import Samples
from tightfit.data.tokenizing import Tokenizer

__all__ = [
    "Prepared",
    "Rows",
    "Samples",
    "Tokenizer",
    "WindowLoader",
    "evaluation_windows",
    "prepare",
    "samples_from_rows",
]
