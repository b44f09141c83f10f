"""What waits in host memory: shares that the device has room for, sweeps of large global batches, embeddings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.display.plans import CARD, GIB, streamed
from tests.planning.search.declared import Declared
from tightfit.planning.defaults import resolve
from tightfit.planning.estimate import Margin
from tightfit.planning.host_shares import ALL_BLOCKS, KINDS
from tightfit.planning.search.budget import TraceBudget
from tightfit.planning.search.choose import choose
from tightfit.planning.search.evaluate import Evaluated, InProcess
from tightfit.planning.search.exploration import Exploration
from tightfit.planning.search.host_demand import host_holds, too_much_for_host
from tightfit.planning.search.host_memory import worth_filling
from tightfit.planning.search.neighbors import usual_precision
from tightfit.planning.search.search import search
from tightfit.planning.search.smallest_gpu import smallest_gpu
from tightfit.planning.search.space import Space
from tightfit.recipe import Recipe
from tightfit.techniques.offload import Host, NoOffload
from tightfit.trace import Allocation, Category, Place

HOST = {"name": "host", "activations": 1}
FIELDS = {"model": "gpt2", "batch_size": 64, "data": {"source": "dummy"}}


def evaluated(added=None, **memory):
    """A streamed candidate with other figures of memory: 7 GiB of 23 are in use, 44 GiB lie outside. added: seconds
    that its copies add."""
    (moving,) = streamed().candidates[1:]
    cost = moving.estimate
    time = cost.time if added is None else replace(cost.time, copies=replace(cost.time.copies, added=added))
    return Evaluated(recipe=moving.recipe, estimate=replace(cost, memory=replace(cost.memory, **memory), time=time),
                     passes=1, outside=1, held=1, gradients=1, parameters=1, events=1)


def test_weights_stay_first_then_gradients_then_states():
    shares = [(offload.weights, offload.gradients, offload.optimizer)
              for reserved in (19, 13, 7)
              for offload in [worth_filling(evaluated(peak_reserved=reserved * GIB), KINDS)]]

    assert shares == [(0.75, 1.0, 1.0), (0.25, 1.0, 1.0), (0.0, 0.75, 1.0)]


def test_states_outside_of_the_blocks_stay_first_and_before_any_blocks_own():
    roomy, tight, pinned = (worth_filling(evaluated(peak_reserved=reserved * GIB, host_states_outside=4 * GIB), kinds)
                            for reserved, kinds in ((13, KINDS), (19, KINDS), (13, ["weights"])))

    assert (roomy.weights, roomy.optimizer) == (0.59, ALL_BLOCKS)
    assert (tight.weights, tight.optimizer) == (0.75, 1.0)
    assert (pinned.weights, pinned.optimizer) == (0.25, 1.0)


def test_shares_are_of_whole_blocks_as_many_as_there_is_room_for():
    shares = [worth_filling(evaluated(peak_reserved=reserved * GIB, host_blocks=8), KINDS).weights
              for reserved in (19, 17, 13)]

    assert shares == [0.75, 0.62, 0.25]
    assert [round(8 * share) for share in shares] == [6, 5, 2]


def test_a_share_that_a_person_wrote_stays():
    offload = worth_filling(evaluated(peak_reserved=13 * GIB), ["optimizer"])

    assert (offload.weights, offload.gradients, offload.optimizer) == (1.0, 1.0, 0.44)


@pytest.mark.parametrize("memory", [{"peak_reserved": 22 * GIB}, {"missing": GIB}], ids=["no room", "too large"])
def test_nothing_is_changed_where_there_is_no_room(memory):
    assert worth_filling(evaluated(**memory), KINDS) is None


def test_nothing_is_changed_where_copies_are_hidden_and_the_host_suffices():
    assert worth_filling(evaluated(added=0.0), KINDS) is None
    assert worth_filling(evaluated(added=0.0, host_missing=GIB), KINDS) is not None


def test_what_the_host_lacks_has_to_find_room_on_the_device():
    assert worth_filling(evaluated(host_missing=15 * GIB), KINDS) is not None
    assert worth_filling(evaluated(host_missing=16 * GIB), KINDS) is None


def test_of_what_is_equally_fast_the_least_memory_counts_the_hosts():
    space = Space(Recipe.from_dict(FIELDS), CARD)
    search_so_far = Exploration(space, InProcess(Declared(1e9, GIB, {}).tools()), TraceBudget(limit=1),
                                margin=Margin())
    more_of_the_host, more_of_the_card = (space.defaults, 1), (space.defaults, 2)
    search_so_far.found = {more_of_the_host: evaluated(peak_reserved=8 * GIB, host=100 * GIB),
                           more_of_the_card: evaluated(peak_reserved=10 * GIB, host=10 * GIB)}

    assert choose(search_so_far) == more_of_the_card


def test_of_what_is_equally_fast_what_needs_no_blocks_freed_is_chosen():
    space = Space(Recipe.from_dict(FIELDS), CARD)
    search_so_far = Exploration(space, InProcess(Declared(1e9, GIB, {}).tools()), TraceBudget(limit=1),
                                margin=Margin())
    freeing, fitting = (space.defaults, 1), (space.defaults, 2)
    search_so_far.found = {freeing: evaluated(peak_reserved=8 * GIB, retries=2)}
    assert choose(search_so_far) == freeing
    search_so_far.found[fitting] = evaluated(peak_reserved=10 * GIB)

    assert choose(search_so_far) == fitting


def test_the_smallest_gpu_is_asked_of_shares_too_that_only_a_room_gave():
    space = Space(Recipe.from_dict({**FIELDS, "compile": "off"}), CARD)
    search_so_far = Exploration(space, InProcess(Declared(1e12, GIB, SPEEDS).tools()), TraceBudget(limit=9),
                                margin=Margin())
    changed = next(choice for choice in space.combinations
                   if space.level(choice) > (0, 0) and space.needs_by_block(choice))
    filled = space.with_value(changed, "offload", Host(weights=0.5))
    search_so_far.found = {(filled, 1): evaluated()}

    assert smallest_gpu(search_so_far, [CARD])[2].startswith("With ")


def test_smaller_gpus_with_blocks_in_host_memory_stand_beside_the_smallest_that_needs_none():
    """A streamed candidate takes 5 GiB reserved, 1 of context and 30 beside it; without blocks there 60 are needed."""
    space = Space(Recipe.from_dict({**FIELDS, "compile": "off"}), CARD)
    mild = next(choice for choice in space.mildest if space.needs_by_block(choice))
    cards = [replace(CARD, name=f"Card {size}", memory_bytes=size * GIB) for size in (4, 8, 16)]

    def text(**memory):
        search_so_far = Exploration(space, InProcess(Declared(1e12, 60 * GIB, SPEEDS).tools()), TraceBudget(limit=9),
                                    margin=Margin())
        search_so_far.found = {(mild, 1): evaluated(**memory)}
        return smallest_gpu(search_so_far, cards)[1]

    assert text(peak_reserved=5 * GIB, host=30 * GIB) == (
        "No GPU of the catalogue was found that can train this with no block in host memory. With blocks there a "
        "smaller one does, such as Card 8 (8.0 GiB) beside 30.0 GiB of host memory, by this Test Card's trace.")
    assert text(peak_reserved=20 * GIB).endswith("memory. With blocks there a smaller one may do.")


def test_what_fsdp_keeps_in_host_memory_is_not_offloads_to_bring_back():
    lacking = evaluated(host_missing=GIB, host_blocks=8)
    apart = replace(lacking, recipe=lacking.recipe.model_copy(update={"offload": NoOffload()}))

    assert worth_filling(lacking, KINDS) is not None
    assert worth_filling(apart, KINDS) is None


def test_auto_shares_are_all_of_the_blocks_until_a_plan_says_otherwise():
    recipe = Recipe.from_dict({**FIELDS, "offload": {**dict.fromkeys(KINDS, "auto"), "name": "host", "gradients": 0.5}})

    assert "offload" in recipe.open_choices()
    assert Space(recipe, CARD).fields.count("offload") == 1
    resolved = resolve(recipe, CARD)
    assert (resolved.offload.weights, resolved.offload.gradients, resolved.offload.activations) == (1.0, 0.5, 1.0)
    assert "offload" not in resolved.open_choices()


@pytest.mark.parametrize(("micro", "sweep"), [(64, "auto"), (4, "auto"), (3, 4), (1, 4)])
def test_large_global_batches_go_in_sweeps(micro, sweep):
    recipe = resolve(Recipe.from_dict({**FIELDS, "offload": HOST, "micro_batch_size": micro}), CARD)

    assert recipe.accumulation.sweep == sweep


@pytest.mark.parametrize(("seq_len", "batch", "sweep"), [
    (16_384, 16, "auto"), (32_768, 16, 4), (32_768, 4, "auto"), (65_000, 16, 3), (131_072, 5, 1), (131_072, 1, "auto"),
])
def test_long_sequences_go_in_sweeps_that_hide_their_copies(seq_len, batch, sweep):
    fields = {"offload": HOST, "micro_batch_size": 1, "batch_size": batch, "seq_len": seq_len}

    assert resolve(Recipe.from_dict({**FIELDS, **fields}), CARD).accumulation.sweep == sweep


class Streamed(Declared):
    """What is offloaded lies in the host's memory, copies are free, and the larger a micro-batch, the faster."""

    def predict(self, recipe, device):
        trace = super().predict(recipe, device)
        gone = vars(recipe.offloaded)
        shares = [(a, gone.get(a.category.value, 0)) for a in trace.allocations]
        made = [replace(a, bytes=round(a.bytes * part), place=place) for a, share in shares
                for place, part in ((Place.DEVICE, 1 - share), (Place.HOST, share))]
        return replace(trace, allocations=made)

    def seconds(self, trace, recipe, device):
        step = super().seconds(trace, recipe, device)
        return replace(step, seconds=step.seconds * (1 + 2 / recipe.micro_batch_size))


SPEEDS = {("bf16", "adamw"): 10_000.0}


def chosen(parameters, gib, host_gib=0, progress=None, **fields):
    """The choice for a model of so many parameters, of which a sample keeps 2 GiB."""
    model = Streamed(parameters=parameters, sample=2 * GIB, speeds=SPEEDS, recomputing=1.3)
    return planned(model, gib, host_gib, progress, **{"precision": "bf16", "optimizer": "adamw", **fields})


def planned(model, gib, host_gib=0, progress=None, **fields):
    card = replace(CARD, memory_bytes=gib * GIB, host_bytes=host_gib * GIB)
    recipe = Recipe.from_dict({**FIELDS, "compile": "off", "attention": "sdpa", "loss": "plain", **fields})
    return search(recipe, card, model.tools(), progress=progress)


def test_blocks_wait_where_nothing_fits_and_where_that_is_faster():
    nothing_fits, saves, fits = (chosen(2e9, gib) for gib in (14, 20, 200))

    assert nothing_fits.chosen.recipe.offloaded.keeps_weights
    assert any("nothing fits with all of the model" in note for note in nothing_fits.notes)
    assert saves.chosen.recipe.offloaded.keeps_weights
    assert not any(candidate.changes_numerics for candidate in nothing_fits.candidates)
    assert fits.chosen.recipe.offload.name == "none"


def test_a_recipe_that_streams_is_told_what_would_help_where_it_does_not_fit():
    fits, too_large = (chosen(2e9, 14, host_gib=gib, offload="host", micro_batch_size=1) for gib in (64, 30))

    assert fits.chosen.recipe.offloaded.keeps_weights
    assert not any("nothing fits" in note for note in fits.notes)
    assert too_large.chosen is None
    assert too_large.answers.smallest_change_text.startswith("The smallest that makes it fit: optimizer=adamw-8bit")


def test_traces_are_counted_on_from_one_search_to_the_next():
    told = []
    plan = chosen(2e9, 14, progress=lambda done, total, text: told.append(done))
    assert told == sorted(told)
    assert plan.predictions == told[-1]


def test_states_in_host_memory_are_no_other_precision():
    space = Space(Recipe.from_dict({**FIELDS, "optimizer": "adamw", "checkpointing": "none", "compile": "off"}), CARD)
    mild = [choice for choice in space.combinations if space.level(choice) == (0, 0)]
    usual = {choice: usual_precision(SimpleNamespace(space=space, device=CARD), (choice, 1)) for choice in mild}

    at = space.fields.index("precision")
    assert {choice[at].name for choice in mild if not usual[choice]} == {"bf16"}
    assert len({choice[space.fields.index("offload")] for choice in mild if not usual[choice]}) == 4
    for alike in filter(None, usual.values()):
        assert alike == [choice for choice in mild if choice[at].name == "bf16"]


def test_what_the_host_cannot_hold_is_not_traced():
    plan = chosen(2e9, 20, host_gib=8)

    assert plan.chosen is None
    assert plan.predictions < 20


def test_what_lacks_memory_with_any_numerics_is_told_by_few_traces():
    told, opened = [], dict.fromkeys(("precision", "optimizer", "compile"), "auto")
    plan = chosen(200e9, 20, host_gib=8, progress=lambda done, total, text: told.append(text), **opened)

    assert plan.chosen is None
    assert len([text for text in told if "offload.activations=1" in text]) <= 3
    assert plan.predictions < 20


def test_host_memory_that_would_do_is_named_where_that_alone_lacks():
    short = chosen(2e9, 14, host_gib=8)

    assert short.chosen is None
    assert "of host memory would do, of which Test Card's machine has 8.0 GiB: with" in short.answers.offload
    assert chosen(2e9, 14, host_gib=64).chosen is not None


@pytest.mark.parametrize(("parameters", "gib"), [(1e9, 32), (2e9, 48), (8e9, 192)])
def test_a_host_of_unknown_memory_is_one_that_is_usual_or_the_smallest_that_does(parameters, gib):
    plan, enough = (chosen(parameters, 10, host_gib=known) for known in (0, 4096))

    assert (plan.device.host_bytes, plan.device.host_assumed) == (gib * GIB, True)
    assert plan.chosen.recipe == enough.chosen.recipe
    assert (2 / 3 if gib > 32 else 0) * gib * GIB < plan.chosen.estimate.memory.host < gib * GIB


def test_a_recipe_that_pins_all_to_the_gpu_is_told_of_a_larger_host_too_where_that_is_assumed():
    pins = {"offload": "none", "micro_batch_size": 1, "checkpointing": "none"}
    assumed, known = (chosen(2e9, 10, host_gib=gib, **pins).answers.smallest_change_text for gib in (0, 24))

    assert assumed.startswith("The smallest that makes it fit: offload=auto (what does not fit waits in the host's ")
    assert assumed.endswith("of 48.0 GiB assumed).")  # where twice the card's memory and a usual size are 32
    assert "offload=auto" not in known


@pytest.mark.parametrize(("lacks", "left"), [(2, [1, 2]), (12, [])])
def test_what_proved_too_much_for_the_host_leaves_smaller_sweeps(lacks, left):
    """64 samples with 4 GiB of activations: at 4 a micro-batch all go through the blocks together, at 2 eight do."""
    space = Space(Recipe.from_dict({**FIELDS, "precision": "bf16", "optimizer": "adamw"}), CARD.in_machine_with(48))
    exploration = Exploration(space, InProcess(None), TraceBudget(limit=9), margin=Margin())
    choice = next(choice for choice in space.combinations if space.value(choice, "offload").shares.activations
                  and space.value(choice, "checkpointing").name == "every-block")
    keeps_more = space.with_value(choice, "checkpointing", space.values["checkpointing"][0])
    exploration.found[choice, 16] = evaluated(host_missing=lacks * GIB)
    lacking = too_much_for_host(exploration)

    assert len(lacking) == 1
    assert host_holds(exploration, choice, [1, 2, 4, 16, 64], lacking) == left
    assert set(host_holds(exploration, keeps_more, [1, 2, 4, 16, 64], lacking)) < {1, 2, 4}
    exploration.found.clear()
    assert too_much_for_host(exploration) == []


class Wider(Streamed):
    """A step that keeps 4 GiB on the device beside all that is offloaded, twice that where weights are of 32 bits."""

    def predict(self, recipe, device):
        trace = super().predict(recipe, device)
        kept = Allocation(born=3, died=5, bytes=2 * GIB * round(recipe.precision.weight_bytes))
        return replace(trace, allocations=[*trace.allocations, kept])


@pytest.mark.parametrize(("gib", "picked"), [
    (10, ("bf16", "adamw", ())), (5, ("bf16-pure", "adamw", ("precision=bf16-pure",))), (3, None),
])
def test_a_streamed_plan_takes_the_mildest_numerics_that_fit(gib, picked):
    plan = planned(Wider(parameters=8e9, sample=2 * GIB, speeds=SPEEDS), gib, 512, batch_size=1)

    assert (plan.chosen and (plan.chosen.recipe.precision.name, plan.chosen.recipe.optimizer.name,
                             plan.chosen.changes_numerics)) == picked


class Embedded(Streamed):
    """A step that holds 8 GiB of embeddings on the device, unless those wait in host memory as well."""

    def predict(self, recipe, device):
        trace = super().predict(recipe, device)
        place = Place.HOST if recipe.offloaded.embeddings else Place.DEVICE
        kept = Allocation(born=0, died=None, bytes=8 * GIB, category=Category.WEIGHTS, place=place)
        return replace(trace, allocations=[*trace.allocations, kept])


@pytest.mark.parametrize(("gib", "wait"), [(11, True), (40, False)])
def test_embeddings_wait_where_that_makes_room_for_much_larger_micro_batches(gib, wait):
    model = Embedded(parameters=8e9, sample=2 * GIB, speeds=SPEEDS, recomputing=1.3)
    plan = planned(model, gib, 512, precision="bf16", optimizer="adamw")

    assert plan.chosen.recipe.offloaded.embeddings is wait
    assert wait is any(asked.offloaded.embeddings for asked in model.calls)


def test_a_host_of_unknown_memory_is_one_that_holds_embeddings_too_where_they_have_no_room():
    plan = planned(Embedded(parameters=8e9, sample=GIB / 4, speeds=SPEEDS, recomputing=1.3), 8)

    assert plan.device.host_assumed
    assert plan.chosen is not None
    assert plan.chosen.recipe.offloaded.embeddings
    assert not plan.chosen.changes_numerics


@pytest.mark.parametrize(("gib", "host_gib"), [(20, 16), (24, 20), (28, 16)])
def test_a_host_too_small_for_the_fast_ones_is_filled_by_what_leaves_room_on_the_device(gib, host_gib):
    plan = chosen(2e9, gib, host_gib=host_gib)

    assert plan.chosen is not None
    assert plan.chosen.estimate.memory.host <= host_gib * GIB
    assert not plan.chosen.changes_numerics
