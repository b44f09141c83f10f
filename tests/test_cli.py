"""The command line as a person meets it: real processes, exit statuses, one-line errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.failing import failing

RECIPE = """\
model: gpt2
model_overrides: {n_layer: 1, n_head: 2, n_embd: 32, n_positions: 64}
vocab_size: 300
data: %(data)s
seq_len: 32
batch_size: 4
max_steps: 6
logging_steps: 2
save_steps: 3
sample_prompt: "def "
output_dir: %(run)s
cache_dir: %(cache)s
"""
TEXT = "def add(a, b):\n    return a + b\n\n\n" * 80


@pytest.fixture
def place(tmp_path: Path, shared_cache: Path) -> Path:
    (tmp_path / "code.txt").write_text(TEXT)
    places = {"data": tmp_path / "code.txt", "run": tmp_path / "run", "cache": shared_cache}
    (tmp_path / "mine.yaml").write_text(RECIPE % places)
    return tmp_path


def tightfit(*words: str, cwd: Path, **more) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tightfit", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **more)


def test_train_writes_a_whole_run(place, run):
    done = tightfit("train", "mine.yaml", "report_to=[tensorboard]", cwd=place)
    assert done.returncode == 0, done.stderr
    figures = ("held-out loss", "tokens/s", "samples/s", "peak resident", "waiting for data", "attention kernel")
    for word in (*figures, "sample"):
        assert word in done.stdout, done.stdout
    folder = place / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4, 6]
    assert {"step", "loss", "learning_rate", "tokens_per_second", "samples_per_second"} <= steps[0].keys()
    assert lines[-1]["step"] == 6
    assert lines[-1]["eval_loss"] > 0
    assert lines[-1]["eval_perplexity"] > 1
    assert 0 <= lines[-1]["eval_accuracy"] <= 1
    assert list((folder / "trackers").rglob("events.out.tfevents*"))
    assert (folder / "recipe.yaml").exists()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.vocab_size == 300
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer("def add").input_ids) == "def add"
    status, out, _ = run("train", folder / "recipe.yaml")
    assert status == 0
    assert "finished run" in out


@pytest.mark.parametrize(("words", "expected"), [
    (["train", "nope"], ["'nope'", "recipe"]),
    (["train", "mine.yaml", "modle=gpt2"], ["modle", "'model'"]),
    (["train", "mine.yaml", "optimizer=adan"], ["optimizer", "'adan'"]),
    (["train", "mine.yaml", "model=gpt3"], ["model", "'gpt3'", "'gpt2'"]),
    (["train", "mine.yaml", "batch_size=0"], ["batch_size", "0"]),
    (["train", "mine.yaml", "data=missing.txt"], ["data", "missing.txt"]),
    (["train", "mine.yaml", "seq_len=128"], ["seq_len", "128", "64"]),
    (["train", "mine.yaml", "attention=flex", "device=cpu"], ["attention", "sdpa"]),
    (["train", "mine.yaml", "precision=tf32", "device=cpu"], ["precision", "tf32"]),
    (["train", "mine.yaml", "output_dir=/proc/here"], ["output_dir", "/proc/here"]),
    (["train", "mine.yaml", "report_to=[tensorbored]"], ["report_to", "'tensorboard'"]),
    (["train", "mine.yaml", "max_steps"], ["max_steps", "key=value"]),
])
def test_bad_input_is_one_line_and_exit_2(place, run, monkeypatch, words, expected):
    monkeypatch.chdir(place)
    status, _, err = run(*words)
    assert status == 2
    assert_one_line(err, expected)


def test_nothing_else_is_said_in_a_process_of_its_own(place):
    done = tightfit("train", "mine.yaml", "model_overrides.n_inner=1000000000000", cwd=place)
    assert done.returncode == 2
    assert_one_line(done.stderr, ["a step is predicted to take ", "No micro-batch is small enough",
                                  "a smaller seq_len or model"])  # fmt: skip


def assert_one_line(said, expected):
    assert said.startswith("tightfit: ")
    assert said.count("\n") == 1
    for word in expected:
        assert word in said


def test_too_few_open_files_are_said(place):
    few = ["sh", "-c", 'ulimit -n 5; exec "$@"', "-", sys.executable, "-m", "tightfit", "train", "mine.yaml"]
    done = subprocess.run(few, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert_one_line(done.stderr, ["Too many open files", "ulimit -n 1024"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_under_the_output_is_said():
    command = [sys.executable, "-m", "tightfit", "gpus"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert_one_line(done.stderr, ["No space left on device", "may be cut short; free some space, or write elsewhere"])


@pytest.mark.cold
def test_what_the_output_s_encoding_cannot_say_is_replaced(place):
    done = tightfit("train", "mine.yaml", "output_dir=\N{GREEK SMALL LETTER ALPHA}", cwd=place,
                    encoding="cp1252", env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0, done.stderr
    assert "run folder: ?" in done.stdout


@pytest.mark.parametrize(("words", "said"), [
    (["train", "gpt2", "max_steps=1", "data.source=dummy"], "caches have no place, for this user has no home folder"),
    (["plan", "gpt2", "--gpu", "rtx-4090", "cache_dir=~/caches"], "no home folder is known for its ~"),
])
def test_a_user_without_a_home_is_told_so(run, monkeypatch, words, said):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # nor has the system's list of users one
    status, _, error = run(*words)
    assert status == 2
    assert_one_line(error.splitlines(keepends=True)[-1], [f"{said}; set HOME"])


def test_an_interrupt_within_pydantic_is_an_interrupt(place, run, monkeypatch):
    monkeypatch.setattr("tightfit.recipe.yaml.RootModel", failing(KeyboardInterrupt()))  # while it writes the recipe
    assert run("train", place / "mine.yaml")[::2] == (130, "tightfit: interrupted\n")


@pytest.mark.parametrize(("words", "within"), [
    (["plan", "gpt2", "--gpu", "l4"], "commands.plan.run_plan"), (["doctor"], "commands.doctor.run_doctor"),
    (["report", "runs/mine"], "commands.report.run_report"), (["gpus"], "display.gpu_tables.gpu_table"),
])  # fmt: skip
def test_an_interrupt_within_any_command_is_said(run, monkeypatch, words, within):
    monkeypatch.setattr(f"tightfit.{within}", failing(KeyboardInterrupt()))
    assert run(*words) == (130, "", "tightfit: interrupted\n")


def test_an_interrupt_while_the_command_loads_is_said():
    code = ("import builtins, tightfit.__main__ as command; load = builtins.__import__\n"
            "def interrupted(name, *rest):\n    if name == 'typer':\n        raise KeyboardInterrupt\n"
            "    return load(name, *rest)\n"
            "builtins.__import__ = interrupted; command.main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "tightfit: interrupted\n")


def test_its_module_is_the_command_too():
    done = subprocess.run([sys.executable, "-m", "tightfit.cli", "train", "nowhere"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("tightfit: 'nowhere' is not a recipe")


def test_a_terminal_without_a_width_is_written_to():
    done = subprocess.run([sys.executable, "-m", "tightfit", "gpus"], capture_output=True, text=True, check=True,
                          env={**os.environ, "COLUMNS": "0"})  # fmt: skip
    assert "rtx-4090" in done.stdout


HEARD = ("import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # not what is inherited
         "runpy.run_module('tightfit', run_name='__main__')")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.cold), signal.SIGINT])
def test_a_signal_saves_and_says_so(place, number):
    command = [sys.executable, "-c", HEARD, "train", "mine.yaml", "max_steps=100000", "save_steps=null"]
    metrics = place / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (metrics.exists() and metrics.read_text().count("\n") > 2):
                assert time.monotonic() < deadline
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "the same command resumes the run" in out
    assert out.count(f"{number.name}: the run ends after this step, saved; Ctrl-C now ends it at once") == 1
    assert len(list((place / "run" / "checkpoints").glob("step-*"))) == 1


STUCK = """\
import ctypes
from torch import nn


class Stuck(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.calls = nn.Embedding(300, 8), nn.Linear(8, 300), 0

    def forward(self, input_ids):
        self.calls += 1
        if self.calls == 4:
            print("long", flush=True)
            mutex = ctypes.create_string_buffer(64)  # an operation that no handler of Python's comes into
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return self.head(self.embedding(input_ids))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is Linux's")
def test_a_second_interrupt_ends_a_run_at_once_and_nothing_but_the_step_is_lost(place):
    (place / "stuck.py").write_text(STUCK)
    words = ["model=stuck:Stuck", "model_overrides={}", "sample_prompt=null", "micro_batch_size=4", "save_steps=1",
             "save_total_limit=2", "data=dummy"]
    command = [sys.executable, "-c", HEARD, "train", "mine.yaml", *words]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        limit = threading.Timer(60, process.kill)
        limit.start()
        try:
            assert any(line == "long\n" for line in process.stdout)
            time.sleep(1)  # by then it is in that operation
            process.send_signal(signal.SIGINT)
            assert any(line.startswith("SIGINT: the run ends after this step") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 128 + signal.SIGINT
        finally:
            limit.cancel()
            process.kill()
    assert [path.name[:5] for path in (place / "run" / "checkpoints").iterdir()] == ["step-"] * 2


def test_help_loads_no_framework():
    code = "import sys\nfrom tightfit.cli import app\nfrom typer.testing import CliRunner\n" \
           "result = CliRunner().invoke(app, ['--help'])\nassert 'train' in result.output, result.output\n" \
           "print(sorted({'torch', 'transformers', 'jax', 'numpy', 'pydantic'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [
    ["train", "gpt2", "seq_lne=3"], ["plan", "gpt2", "seq_lne=3", "--gpu", "l4"], ["plan", "gpt2", "--gpu", "rtx-4091"],
], ids=" ".join)  # fmt: skip
def test_a_misspelt_word_is_refused_before_a_framework_is_loaded(words):
    code = "import sys\nfrom tightfit.cli import app\nfrom tightfit.errors import RecipeError\n" \
           "try:\n    app(sys.argv[1:], standalone_mode=False)\nexcept RecipeError as error:\n    print(error)\n" \
           "print(sorted({'torch', 'transformers', 'jax'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    said, loaded = done.stdout.splitlines()
    assert "did you mean" in said
    assert loaded == "[]"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_said_and_older_checkpoints_stay(place):
    disk = place / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1800k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine allows no mounts")
    try:
        done = tightfit("train", "mine.yaml", f"output_dir={disk}/run", "save_steps=1", "save_total_limit=5", cwd=place)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "No space left" in done.stderr
        left = [path.name for path in (disk / "run" / "checkpoints").iterdir()]
        assert left
        assert all(name.startswith("step-") for name in left)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
