"""`tightfit ladder` as it is typed: what it says of bad words, and a ladder climbed to its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from tests.ladder.climbs import CARD, CPU, DONE, Processes
from tightfit import cli
from tightfit.commands.ladder import run_ladder
from tightfit.errors import RecipeError, ReportError
from tightfit.ladder import climbing
from tightfit.ladder.catalogue import LADDERS
from tightfit.ladder.jobs import About, Job, Measure, Outcome
from tightfit.ladder.peers import PEERS


@pytest.mark.parametrize(("words", "said"), [
    (["bert-larg"], "did you mean 'bert-large'"),
    (["nothing-of-this-name"], "The ladders: bert-large, fp16-batch"),
    (["bert-large", "--peer", "hf"], "peer: 'hf'"),
    (["bert-large", "--scale", "half"], "scale: 'half' is none; write one of full, reduced, smallest"),
    (["gpt2", "--scale", "reduced"], "scale: 'reduced' is for the ladders that have a name"),
    (["bert-large", "--gpu", "h2000"], "gpu: 'h2000'"),
    (["bert-large", "--gpu-memory", "lots"], "gpu-memory: 'lots'"),
    (["bert-large", "seq_length=8"], "seq_length"),
    (["fp16-batch", "precision=bf16"], "precision: the rungs of fp16-batch set it themselves"),
    (["bert-large", "--limit", "inf"], "limit: inf should be more than 0"),
    (["bert-large", "--steps", "10000000"], "steps: 10000000 should be 1 or more"),
    (["bert-large", "--picture", "ladder.jpg"], "picture: ladder.jpg ends in '.jpg'"),
    (["gpt2", "mode=inference"], "a ladder is of training"),
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


def test_a_ladder_is_shown_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Processes(lambda job: DONE)
    monkeypatch.setattr(climbing, "run_job", made)
    monkeypatch.setenv("COLUMNS", "160")
    page = run_ladder("bert-large", [f"output_dir={tmp_path}", "seq_len=64"], peers=["plain"],
                      picture=tmp_path / "ladder.png")
    printed = capsys.readouterr().out
    assert "reduced shape: num_hidden_layers=4" in printed
    assert "every rung with seq_len=64; what was published is without" in printed
    assert "batch 4, fp32 (plain)" in printed
    assert "predicted for v100-16gb" in printed
    assert "<html" in page.read_text("utf-8")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert {job.recipe["seq_len"] for job in made.jobs} == {64}
    assert all(job.recipe.get("output_dir") is None for job in made.jobs)


def test_a_ladder_that_is_stopped_says_where_it_is_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome(job: Measure) -> Outcome:
        if len(made.jobs) == 3:
            raise KeyboardInterrupt
        return DONE

    made = Processes(outcome)
    monkeypatch.setattr(climbing, "run_job", made)
    with pytest.raises(KeyboardInterrupt):
        run_ladder("bert-large", [f"output_dir={tmp_path}"])
    assert f"stopped; the rows so far are kept in {tmp_path / 'results.jsonl'}" in capsys.readouterr().err
    monkeypatch.setattr(climbing, "run_job", Processes(lambda job: DONE))
    run_ladder("bert-large", [f"output_dir={tmp_path}"])
    assert "going on: 2 of 15 rungs have their row" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_keeps_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climbing, "run_job", Processes(lambda job: DONE))
    with pytest.raises(ReportError, match="picture cannot be written"):
        run_ladder("bert-large", [f"output_dir={tmp_path}"], picture=tmp_path / "no" / "where.png")
    assert (tmp_path / "results.jsonl").exists()


def test_a_recipes_ladder_lies_in_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = Processes(lambda job: DONE)
    monkeypatch.setattr(climbing, "run_job", made)
    page = run_ladder("gpt2", ["batch_size=2", "checkpointing=none", "optimizer=sgd", "compile=off"])
    assert page == Path("ladders/gpt2/ladder.html")
    assert {job.recipe["optimizer"] for job in made.jobs} == {"sgd"}


def test_a_limit_on_memory_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climbing, "run_job", Processes(lambda job: DONE))
    with pytest.raises(RecipeError, match="no GPU to cut down"):
        run_ladder("bert-large", [f"output_dir={tmp_path}"], gpu_memory="8GB")


class TwoDevices(Processes):
    """A machine that has a GPU, and a processor."""

    def __call__(self, job: Job, limit: float) -> Outcome:
        if isinstance(job, About) and job.recipe["device"] == "cpu":
            return Outcome(machine=CPU)
        return super().__call__(job, limit)


@pytest.mark.parametrize(("words", "layers"), [([], None), (["device=cpu"], 4)])
def test_the_scale_is_of_the_device_that_the_rungs_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], layers: int | None
) -> None:
    made = TwoDevices(lambda job: DONE, CARD)
    monkeypatch.setattr(climbing, "run_job", made)
    run_ladder("bert-large", [f"output_dir={tmp_path}", *words])
    assert {job.recipe["model_overrides"].get("num_hidden_layers") for job in made.jobs} == {layers}


def test_the_command_line_names_every_ladder_and_peer() -> None:
    """Its help spells them out, so that it need not load them."""
    every = get_command(cli.app)
    assert isinstance(every, TyperGroup)
    helps = {option.name: str(getattr(option, "help", "")) for option in every.commands["ladder"].params}
    assert helps["name"].partition(", or a recipe")[0].split(", ") == list(LADDERS)
    assert re.findall("`(.+?)`", helps["peer"]) == list(PEERS)
