"""Loading a framework: what its libraries log about themselves stays off the screen, for that long."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tightfit.backends import CHATTY, load_backend, quiet_loading
from tightfit.errors import MissingLibrary


@pytest.fixture
def loggers(monkeypatch):
    """The chatty libraries' loggers, with no level of their own."""
    found = [logging.getLogger(name) for name in CHATTY]
    for logger in found:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
        logger.manager._clear_cache()
    return found


def test_levels_are_held_while_libraries_load_and_put_back(loggers):
    def load():
        with quiet_loading():
            assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
            assert all(logger.isEnabledFor(logging.ERROR) for logger in loggers)
            raise ImportError

    with pytest.raises(ImportError):
        load()
    assert [logger.level for logger in loggers] == [logging.NOTSET] * len(loggers)


def test_a_level_that_someone_has_set_stands(loggers):
    loggers[0].setLevel(logging.DEBUG)
    with quiet_loading():
        assert loggers[0].level == logging.DEBUG
        loggers[0].setLevel(logging.WARNING)  # as transformers does
    assert loggers[0].level == logging.DEBUG


def test_a_missing_framework_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    for name in [name for name in sys.modules if name.startswith("tightfit.backends.jax")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingLibrary, match=r"backend: jax needs the library jax.*pip install 'tightfit\[jax\]'"):
        load_backend("jax")


@pytest.mark.cold
def test_python_calls_print_nothing_that_libraries_log():
    script = "import tightfit; tightfit.apply; from tightfit.backends import load_backend; load_backend('pytorch')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
