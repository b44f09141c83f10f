"""Models that read values which hang on no others as they are built, or run functions of TorchScript: predicted as
every other model is."""

from __future__ import annotations

import pytest
import torch
import transformers

import cpu_cases
from cpu_cases import Case
from cpu_truth import PHASES
from plan_vs_cpu import BOUND, CPU, compare
from tightfit import Recipe
from tightfit.backends.pytorch.simulate.predict import predict
from tightfit.backends.pytorch.simulate.scripted import scripts_as_python
from tightfit.backends.pytorch.simulate.target import PlanningMode
from tightfit.devices import find_device

pytestmark = [
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning"),  # DeBERTa's, and ours
]

BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 256}
RELATIVE = {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False,
            "type_vocab_size": 0}
CONV = {"image_size": 64, "hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.1}
MODELS = {
    "deberta": ("DebertaConfig", "masked-lm", RELATIVE),
    "deberta-v3": ("DebertaV2Config", "masked-lm", {
        **RELATIVE, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True}),
    "tapas": ("TapasConfig", "masked-lm", BERT),
    "convnext": ("ConvNextConfig", "image-classification", CONV),
    "swinv2": ("Swinv2Config", "image-classification", {
        "image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "hiera": ("HieraConfig", "image-classification", {
        "image_size": [64, 64], "embed_dim": 32, "depths": [1, 2], "num_heads": [1, 2], "num_query_pool": 1,
        "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "drop_path_rate": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_such_a_model_takes_what_is_predicted(name, monkeypatch):
    monkeypatch.setitem(cpu_cases.KNOWN, name, MODELS[name])
    error = compare(Case(name, {"micro_batch_size": 4}))["error"]
    assert max(map(abs, error.values())) <= BOUND, error


@pytest.mark.parametrize("name", MODELS)
def test_such_a_model_is_built_from_its_configuration_as_from_weights(name, tmp_path):
    config_class, task, numbers = MODELS[name]
    images = task == "image-classification"
    config = getattr(transformers, config_class)(**numbers, **({} if images else {"vocab_size": 500}))
    config.save_pretrained(tmp_path)
    recipe = Recipe.from_dict({
        "model": str(tmp_path), "task": task, "pretrained": False, "data": "dummy", "seq_len": 32, "batch_size": 2,
        "micro_batch_size": 2, "precision": "fp32", "attention": "sdpa", "optimizer": "adamw", "compile": "off",
        "checkpointing": "none",
    })
    auto = "AutoModelForImageClassification" if images else "AutoModelForMaskedLM"
    module = getattr(transformers, auto).from_config(config)
    built, given = (predict(recipe, CPU, own) for own in (None, module))

    def peaks(trace):
        return [max(trace.peak(s.start, s.stop)[1] for s in trace.spans if s.name == phase) for phase in PHASES]

    assert peaks(built) == pytest.approx(peaks(given), rel=1e-3)
    assert predict(recipe, find_device("rtx-4090")).peak()[1] > 0


def test_values_that_hang_on_no_others_are_known_exactly():
    def numbers():
        rates = torch.linspace(0, 0.3, 7)
        ends = torch.tensor([1, 2, 4]).cumsum(0)
        return [rate.item() for rate in rates], rates.split([3, 4])[1][1].item(), rates.tolist(), ends.tolist()

    expected = numbers()
    with PlanningMode(CPU):
        assert numbers() == expected
        overwritten = torch.linspace(0, 1, 3)
        overwritten.normal_()
        assert overwritten.constant is None
        assert torch.linspace(0, 1, 100_000).constant is None


def scaled_in_python(x: torch.Tensor, times: int = 2) -> torch.Tensor:
    return x * times


def test_a_scripted_function_runs_as_python_for_a_plan_alone():
    scaled, x = torch.jit.script(scaled_in_python), torch.ones(2)
    with PlanningMode(CPU), scripts_as_python():
        assert type(scaled(torch.empty(2), times=3)) is torch._subclasses.FakeTensor
    assert scaled(x, times=3).tolist() == [3, 3]
    assert scaled(x).tolist() == [2, 2]
    with pytest.raises(ZeroDivisionError), scripts_as_python():
        1 / 0  # noqa: B018
    assert type(vars(torch.jit.ScriptFunction)["__call__"]).__name__ == "instancemethod"
