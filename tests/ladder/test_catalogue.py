"""The named ladders: every rung a recipe at every scale, and what is published as it was published."""

from __future__ import annotations

import pytest

from tightfit.errors import RecipeError
from tightfit.ladder.catalogue import FEATURE_OF, guides, ladder_of, ladders
from tightfit.ladder.rungs import SCALES
from tightfit.recipe import Recipe
from tightfit.techniques import SLOTS
from tightfit.techniques.precision import Fp32


@pytest.mark.parametrize("name", ladders())
@pytest.mark.parametrize("scale", SCALES)
def test_every_rung_is_a_recipe(name: str, scale: str) -> None:
    ladder = ladders()[name]
    for rung in ladder.rungs:
        recipe = ladder.recipe(rung, scale)
        assert recipe.micro_batch_size == "auto" or recipe.micro_batch_size <= recipe.batch_size
        assert bool(recipe.model_overrides) == (scale != "full")


@pytest.mark.parametrize("name", ladders())
def test_a_rungs_baseline_stands_before_it(name: str) -> None:
    ladder = ladders()[name]
    names = [rung.name for rung in ladder.rungs]
    assert ladder.name == name
    assert len(set(names)) == len(names)
    assert ladder.rungs[0].against is None
    for at, rung in enumerate(ladder.rungs):
        assert rung.against is None or rung.against in names[:at]


def test_overrides_stand_above_all() -> None:
    ladder = ladders()["bert-large"]
    recipe = ladder.recipe(ladder.rungs[3], "reduced", ["seq_len=16", "model_overrides.num_hidden_layers=1"])
    assert (recipe.seq_len, recipe.model_overrides["num_hidden_layers"]) == (16, 1)
    assert recipe.model_overrides["hidden_size"] == 256
    with pytest.raises(RecipeError, match="seq_length"):
        ladder.recipe(ladder.rungs[0], "reduced", ["seq_length=16"])


def test_published_figures_are_a_whole_ladder() -> None:
    shown = {name: sum(any(rung.published) for rung in ladders()[name].rungs) for name in ladders()}
    assert {name: count for name, count in shown.items() if count} == {
        "bert-large": 9, "fp16-batch": 8, "ddp": 3, "transformer-156m": 6, "transformer-156m-jax": 7,
    }  # fmt: skip
    assert ladders()["bert-large"].rungs[0].published == (57.82 / 128, 14_949 * 2**20)  # of 128 steps, and in MiB


def test_a_recipes_ladder_varies_what_is_open() -> None:
    recipe = Recipe.from_dict({"model": "gpt2", "batch_size": 8, "optimizer": "sgd", "attention": "sdpa"})
    ladder = ladder_of(recipe, "gpt2")
    recipes = {rung.name: ladder.recipe(rung) for rung in ladder.rungs}
    plain = recipes["plain"]
    assert (plain.micro_batch_size, plain.precision.name, plain.checkpointing.name) == (8, "fp32", "none")
    assert {each.optimizer.name for each in recipes.values()} == {"sgd"}
    assert {each.attention.name for each in recipes.values()} == {"sdpa"}
    for technique in (*SLOTS["precision"], *SLOTS["checkpointing"], *SLOTS["compile"]):
        for setting in technique.representative_settings():
            assert any(setting == getattr(each, setting.slot) for each in recipes.values()), setting
    combined = recipes["combined, as the plan chooses"]
    assert combined.precision == combined.checkpointing == combined.micro_batch_size == "auto"
    assert combined.optimizer.name == "sgd"
    assert "pinned in every rung: optimizer=sgd, attention=sdpa" in ladder.notes


def test_what_a_backend_lacks_makes_no_rung() -> None:
    recipe = Recipe.from_dict({"model": "gpt2", "backend": "jax", "optimizer": "sgd", "checkpointing": "none",
                               "precision": "fp32", "offload": "host"})
    ladder = ladder_of(recipe.override(micro_batch_size=4), "gpt2")
    assert [rung.name for rung in ladder.rungs] == [
        "plain", "attention sdpa", "attention sdpa, kernel=cudnn", "attention sdpa, kernel=math",
        "combined, as the plan chooses"]
    (note,) = (note for note in ladder.notes if note.startswith("no rungs, for backend: jax does not have them: "))
    assert "attention sdpa, kernel=flash; " in note
    assert "; loss chunked; loss liger; compile per-block; " in note


def test_a_recipe_with_nothing_open_has_no_ladder() -> None:
    pinned = {"micro_batch_size": 1, "precision": "fp32", "checkpointing": "none", "optimizer": "sgd",
              "attention": "sdpa", "compile": "off", "loss": "plain"}  # fmt: skip
    with pytest.raises(RecipeError, match="all are pinned"):
        ladder_of(Recipe.from_dict(pinned), "gpt2")
    with pytest.raises(RecipeError, match="inference"):
        ladder_of(Recipe.from_dict({"mode": "inference"}), "gpt2")


def test_a_module_of_ones_own_has_a_baseline_that_it_can_run():
    ladder = ladder_of(Recipe.from_dict({"model": "mine:build", "vocab_size": 256}), "mine:build")
    plain = ladder.recipe(ladder.rungs[0])
    assert (plain.attention.name, plain.optimizer.name) == ("sdpa", "adamw")
    by_name = {rung.name: rung for rung in ladder.rungs}
    assert "attention sdpa" not in by_name
    assert by_name["attention eager"].feature is None  # against SDPA it shows the contrary
    pinned = ladder_of(Recipe.from_dict({"model": "mine:build", "vocab_size": 256, "attention": "eager"}), "mine:build")
    assert pinned.recipe(pinned.rungs[0]).attention.name == "eager"


def test_every_kind_of_checkpointing_is_in_its_ladder() -> None:
    ladder = ladders()["checkpointing"]
    recipes = [(rung.grows, ladder.recipe(rung).checkpointing) for rung in ladder.rungs]
    for technique in SLOTS["checkpointing"][1:]:
        for setting in technique.representative_settings():
            assert {(False, setting), (True, setting)} <= set(recipes)


def test_every_technique_that_a_rung_shows_is_in_the_guides_table() -> None:
    named = {rung.feature for ladder in ladders().values() for rung in ladder.rungs if rung.feature is not None}
    assert named | set(FEATURE_OF.values()) <= set(guides().features)
    assert all(len(words.speed) == len(words.memory) == len(guides().guides) for words in guides().features.values())


def test_smaller_scales_ask_for_nothing_that_a_processor_lacks() -> None:
    ladder = ladders()["transformer-156m-jax"]
    assert ladder.recipe(ladder.rungs[0]).precision == Fp32(tf32=True)
    assert ladder.recipe(ladder.rungs[0], "reduced").precision == Fp32()
