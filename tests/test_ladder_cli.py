"""`tightfit ladder` as it is typed: what it says of bad words, and a ladder climbed to its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ladder.test_running import DONE, Processes
from tightfit import cli, ladder_command
from tightfit.errors import RecipeError, ReportError
from tightfit.ladder import running
from tightfit.ladder_command import run_ladder


@pytest.mark.parametrize(("words", "said"), [
    (["bert-larg"], "did you mean 'bert-large'"),
    (["nothing-of-this-name"], "The ladders: bert-large, fp16-batch"),
    (["bert-large", "--peer", "hf"], "peer: 'hf'"),
    (["bert-large", "--scale", "half"], "scale: 'half' is none; write one of full, reduced, smallest"),
    (["gpt2", "--scale", "reduced"], "scale: 'reduced' is for the ladders that have a name"),
    (["bert-large", "--gpu", "h2000"], "gpu: 'h2000'"),
    (["bert-large", "--gpu-memory", "lots"], "gpu-memory: 'lots'"),
    (["bert-large", "seq_length=8"], "seq_length"),
    (["gpt2", "mode=inference"], "a ladder is of training"),
])  # fmt: skip
def test_bad_words_are_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tightfit", "ladder", *words])
    monkeypatch.setattr(ladder_command, "_has_gpu", lambda: False)
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
    monkeypatch.setattr(running, "_job", made)
    monkeypatch.setattr(ladder_command, "_has_gpu", lambda: False)
    monkeypatch.setenv("COLUMNS", "160")
    page = run_ladder("bert-large", [f"output_dir={tmp_path}", "seq_len=64"], peers=["plain"],
                      picture=tmp_path / "ladder.png")
    printed = capsys.readouterr().out
    assert "reduced shape: num_hidden_layers=4" in printed
    assert "batch 4, fp32 (plain)" in printed
    assert "predicted for v100-16gb" in printed
    assert "<html" in page.read_text("utf-8")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert {job["recipe"]["seq_len"] for job in made.jobs} == {64}
    assert all("output_dir" not in job["recipe"] or job["recipe"]["output_dir"] is None for job in made.jobs)


def test_a_picture_that_cannot_be_written_keeps_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_job", Processes(lambda job: DONE))
    monkeypatch.setattr(ladder_command, "_has_gpu", lambda: False)
    with pytest.raises(ReportError, match="picture cannot be written"):
        run_ladder("bert-large", [f"output_dir={tmp_path}"], picture=tmp_path / "no" / "where.png")
    assert (tmp_path / "results.jsonl").exists()


def test_a_recipes_ladder_lies_in_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = Processes(lambda job: DONE)
    monkeypatch.setattr(running, "_job", made)
    page = run_ladder("gpt2", ["batch_size=2", "checkpointing=none", "optimizer=sgd", "compile=off"])
    assert page == Path("ladders/gpt2/ladder.html")
    assert {job["recipe"]["optimizer"] for job in made.jobs} == {"sgd"}


def test_a_limit_on_memory_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_job", Processes(lambda job: DONE))
    monkeypatch.setattr(ladder_command, "_has_gpu", lambda: False)
    with pytest.raises(RecipeError, match="no GPU to cut down"):
        run_ladder("bert-large", [f"output_dir={tmp_path}"], gpu_memory="8GB")
