"""`tightfit ladder` as it is typed: its answers to bad words, and a ladder run to its page."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tests.failing import failing
from tests.ladder.made import CARD, CPU, DONE, Processes, use
from tightfit import cli
from tightfit.commands.ladder import run_ladder
from tightfit.errors import RecipeError, Refused, ReportError
from tightfit.ladder.catalogue import ladders
from tightfit.ladder.jobs import Job, Outcome
from tightfit.ladder.peers import PEERS
from tightfit.ladder.rows import Status
from tightfit.system import SIGNALS


@pytest.mark.parametrize(("words", "said"), [
    (["bert-larg"], "did you mean 'bert-large'"),
    (["nothing-of-this-name"], "'nothing-of-this-name' is neither a ladder nor a recipe; the ladders: bert-large, "),
    (["nothing-of-this-name"], "transformer-156m-jax; or a recipe: see tightfit recipes\n"),
    (["acumulation"], "did you mean 'accumulation'?"),
    (["bert-large", "--peer", "hf"], "peer: 'hf'"),
    (["bert-large", "--list", "--peer", "hf"], "peer: 'hf'"),
    (["bert-large", "--scale", "half"], "scale: 'half' is not a scale; write one of full, reduced, smallest"),
    (["gpt2", "--scale", "reduced"], "scale: 'reduced' is for the ladders that have a name"),
    (["bert-large", "--gpu", "h2000"], "gpu: 'h2000' is not in the catalogue; write a size such as 24GB for a "
     "card that is not there; did you mean 'h200'?"),
    (["bert-large", "--gpu", "2000GB"], "gpu: '2000GB' should be at least 2GB"),
    (["bert-large", "--gpu-memory", "lots"], "gpu-memory: 'lots'"),
    (["bert-large", "seq_length=8"], "seq_length"),
    (["fp16-batch", "precision=bf16"], "such as tightfit ladder mine.yaml precision=bf16"),
    (["bert-large", "--limit", "inf"], "less than or equal to 604800"),
    (["bert-large", "--steps", "10000000"], "less than or equal to 1000000"),
    (["gpt2", "mode=inference"], "a ladder is of training"),
    (["gpt2", "--peer", "plain"], "data.packing: no peer keeps documents apart that share a row; write data.packing="),
])  # fmt: skip
def test_bad_words_are_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tightfit", "ladder", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_the_recipe_is_said_once_and_no_rung_is_started(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    status, printed, said = run("ladder", "quickstart", "data=nowhere.txt", f"output_dir={tmp_path / 'ladder'}")
    assert (status, printed) == (2, "")
    assert said.startswith("tightfit: data: 'nowhere.txt' does not exist")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_no_rung_can_do_without_is_said_once_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use(monkeypatch, Processes(lambda job: DONE))
    words = ["offload=host", "compile=off", "optimizer=sgd", f"output_dir={tmp_path / 'ladder'}"]
    with pytest.raises(Refused) as raised:
        run_ladder("gpt2", words)
    assert str(raised.value).startswith("offload: ")
    assert str(raised.value).count("offload=none") == 1
    assert (made.ran(), list(tmp_path.iterdir())) == (0, [])
    with pytest.raises(Refused, match="no rung can run here"):
        run_ladder("gpt2", words, gpu="t4")  # for which they are predicted
    assert made.ran() == 0
    assert made.predicted > 10


def test_a_ladder_is_shown_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Processes(lambda job: DONE)
    use(monkeypatch, made)
    monkeypatch.setenv("COLUMNS", "160")
    status = run_ladder("bert-large", [f"output_dir={tmp_path}", "seq_len=64"], peers=["plain"])
    printed = capsys.readouterr().out
    assert "reduced shape: num_hidden_layers=4" in printed
    assert "every rung with seq_len=64; what was published is without" in printed
    assert "batch 4, fp32 (bare loop)" in printed
    assert "predicted for V100 16GB" in printed
    assert status == 0
    assert "<html" in (tmp_path / "ladder.html").read_text("utf-8")
    assert {job.recipe["seq_len"] for job in made.jobs} == {64}
    assert all(job.recipe.get("output_dir") is None for job in made.jobs)


def test_rungs_are_listed_and_what_a_recipe_pins_makes_none(capsys: pytest.CaptureFixture[str]) -> None:
    pinned = ["precision=fp32", "checkpointing=none", "optimizer=adamw", "attention=sdpa", "compile=off"]
    assert run_ladder("quickstart", [*pinned, "loss=auto", "micro_batch_size=4"], listed=True) == 0
    assert capsys.readouterr().out.splitlines() == [
        "plain", "loss chunked", "loss liger", "combined, as the plan chooses"]  # fmt: skip


@pytest.mark.parametrize("number", SIGNALS)
def test_a_ladder_that_is_stopped_says_where_it_is_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def outcome(job: Job) -> Outcome:
        if len(made.jobs) == 3:
            signal.raise_signal(number)
        return DONE

    made = Processes(outcome)
    use(monkeypatch, made)
    with pytest.raises(KeyboardInterrupt):
        run_ladder("bert-large", [f"output_dir={tmp_path}"])
    printed = capsys.readouterr()
    assert f"stopped; the rows so far are kept in {tmp_path / 'results.jsonl'}" in printed.err
    assert f"page: {tmp_path / 'ladder.html'}" in printed.err
    assert "micro-batch 1, accumulation 4" in printed.out
    assert "2 of 15" in (tmp_path / "ladder.html").read_text("utf-8")
    use(monkeypatch, Processes(lambda job: DONE))
    run_ladder("bert-large", [f"output_dir={tmp_path}"])
    assert "resuming: 2 of 15 rungs have their row" in capsys.readouterr().err


def test_a_ladder_that_is_stopped_before_its_first_row_has_nothing_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Processes(failing(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        run_ladder("bert-large", [f"output_dir={tmp_path}"])
    printed = capsys.readouterr()
    assert "stopped; no rung has a row yet" in printed.err
    assert printed.out == ""
    assert not (tmp_path / "ladder.html").exists()


def test_a_page_that_cannot_be_written_keeps_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Processes(lambda job: DONE))
    (tmp_path / "ladder.html").mkdir()
    with pytest.raises(ReportError, match="page cannot be written"):
        run_ladder("bert-large", [f"output_dir={tmp_path}"])
    assert (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize("name", ["transformer-156m", "transformer-156m-jax"])
def test_the_notebooks_transformer_has_a_ladder_of_its_own_in_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    made = use(monkeypatch, Processes(lambda job: DONE))
    run_ladder(name, ["backend=jax", f"output_dir={tmp_path}"])
    assert "The notebook's transformer in JAX" in capsys.readouterr().out
    assert {job.recipe["backend"]["layers"] for job in made.jobs} == {"scanned", "unrolled"}


def test_fresh_runs_every_rung_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    made = use(monkeypatch, Processes(lambda job: DONE))
    for words, ran in (((), 15), ((), 0), (("--fresh",), 15)):
        status, printed, _ = run("ladder", "bert-large", f"output_dir={tmp_path}", *words)
        assert (status, made.ran()) == (0, ran)
        assert "what the plan chooses" in printed


def test_a_recipes_ladder_lies_in_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = Processes(lambda job: DONE)
    use(monkeypatch, made)
    run_ladder("gpt2", ["batch_size=2", "checkpointing=none", "optimizer=sgd", "compile=off"])
    assert Path("ladders/gpt2/ladder.html").exists()
    assert {job.recipe["optimizer"] for job in made.jobs} == {"sgd"}


@pytest.mark.parametrize(("statuses", "exits"), [
    (("failed", "killed", "timed-out", "out-of-memory"), 1), (("refused", "failed"), 1), (("refused",), 2),
    (("failed", "done", "refused"), 0),
])  # fmt: skip
def test_the_exit_status_says_whether_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]],
    statuses: tuple[Status, ...], exits: int,
) -> None:  # fmt: skip
    ends = cycle(statuses)
    use(monkeypatch, Processes(
        lambda job: DONE if (status := next(ends)) == "done" else Outcome(status=status, reason="because")))
    status, printed, said = run("ladder", "bert-large", f"output_dir={tmp_path}")
    assert status == exits
    assert "because" in printed
    assert ("tightfit: no rung can run here" in said) == (exits == 2)
    assert (tmp_path / "ladder.html").exists()


def test_what_lies_where_the_results_belong_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    use(monkeypatch, Processes(lambda job: DONE))
    (tmp_path / "results.jsonl").mkdir()
    status, _, said = run("ladder", "bert-large", f"output_dir={tmp_path}")
    assert status == 2
    assert said.endswith("results.jsonl: cannot be read (Is a directory)\n")


def test_a_limit_on_memory_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Processes(lambda job: DONE))
    with pytest.raises(RecipeError, match="no GPU to cut down"):
        run_ladder("bert-large", [f"output_dir={tmp_path}"], gpu_memory="8GB")


class TwoDevices(Processes):
    """A machine that has a GPU, and a processor."""

    def __call__(self, jobs: Sequence[Job], limit: float) -> Iterator[Outcome]:
        if jobs[0].kind == "machine" and jobs[0].recipe["device"] == "cpu":
            return iter([Outcome(values=CPU.model_dump())])
        return super().__call__(jobs, limit)


@pytest.mark.parametrize(("words", "layers"), [([], None), (["device=cpu"], 4)])
def test_the_scale_is_of_the_device_that_the_rungs_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], layers: int | None
) -> None:
    made = TwoDevices(lambda job: DONE, CARD)
    use(monkeypatch, made)
    run_ladder("bert-large", [f"output_dir={tmp_path}", *words])
    assert {job.recipe["model_overrides"].get("num_hidden_layers") for job in made.jobs} == {layers}


def test_the_command_line_names_every_ladder_and_peer() -> None:
    """Its help spells them out, so that it need not load them."""
    every = get_command(cli.app)
    assert isinstance(every, TyperGroup)
    helps = {option.name: str(getattr(option, "help", "")) for option in every.commands["ladder"].params}
    assert helps["name"].partition(", or a recipe")[0].split(", ") == list(ladders())
    assert re.findall("`(.+?)`", helps["peer"]) == list(PEERS)
