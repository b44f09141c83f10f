"""What the tests share: a tiny recipe, and a quiet, offline process."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browsing import browser, visit  # noqa: F401
from tightfit.cli import main
from tightfit.garbage import gc_paused

# A test that reaches for a hub must fail at once, not wait for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """The libraries make a million objects that never become garbage: looking through them all comes seldom. And a home
    that is empty, for the processes too that tests start: no calibration and no plan of the person's own is found."""
    gc.set_threshold(10_000, 20, 100)
    if not hasattr(config, "workerinput"):
        home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(home.cleanup)
        os.environ["HOME"] = home.name
        os.environ.pop("XDG_CACHE_HOME", None)


def pytest_sessionfinish() -> None:
    """pytest's last look for garbage, five times over, finds nothing that is slow to look through."""
    gc.freeze()


@pytest.fixture(autouse=True)
def one_process_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches trace in the test's own process: the suite fills the cores already, and another process imports for
    seconds."""
    monkeypatch.setattr("tightfit.planning.search.pool.cores", lambda: 1)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """The collector, and whoever asks it what there is, sees what the test itself makes: the libraries' objects and
    what other tests left take it a second each time."""
    with gc_paused():
        yield


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of trained tokenizers and tokenized text for the whole session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path: Path, shared_cache: Path) -> dict[str, Any]:
    """Recipe values that train in a second: a two-layer GPT-2 on random tokens, dropout off."""
    return {
        "model": "gpt2",
        "model_overrides": {
            "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        "vocab_size": 128,
        "data": {"source": "dummy", "samples": 32},
        "seq_len": 16,
        "batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(shared_cache),
        "device": "cpu",
    }


@pytest.fixture(scope="session")
def deepspeed_loaded() -> None:
    """DeepSpeed, which takes seconds to load, before any process is forked."""
    from tightfit.backends.pytorch.techniques.zero.library import load_deepspeed

    load_deepspeed("cpu")


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What JAX compiles is compiled once in the session."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def fast_xla(monkeypatch: pytest.MonkeyPatch, compiled_programs: None) -> None:
    """The JAX backend's steps compile quickly rather than run quickly."""
    from tests.backends.jax.cases import fast_options
    from tightfit.backends.jax import assembly

    monkeypatch.setattr(assembly, "compiler_options", lambda flags, devices: fast_options())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """The command line, run in this process: exit status, standard output, standard error."""

    def command(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["tightfit", *map(str, words)])
        try:
            main()
            status: Any = 0
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return command
