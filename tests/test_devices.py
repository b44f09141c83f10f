"""The catalogue of GPUs: its figures agree with one another, and its cards are found by the names people use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tightfit.devices import (
    GIB,
    MIB,
    Device,
    catalogue,
    device_of_memory,
    find_device,
    parse_host_memory,
    parse_memory,
    reported_memory,
    with_memory,
)
from tightfit.errors import RecipeError

CARDS = {device.name: device for device in catalogue()}

CORES = {(7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128, (12, 0): 128}
"""fp32 units of a multiprocessor, by compute capability (CUDA C++ programming guide)."""
TENSOR = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192,
          (12, 0): 1024}
"""Dense fp16 operations of a multiprocessor's tensor cores in a cycle (NVIDIA's architecture whitepapers)."""
HALF_RATE = {"RTX 2080 Ti", "A10G"} | {name for name in CARDS if name.startswith(("RTX 30", "RTX 40", "RTX 50"))}
"""Cards whose tensor cores accumulate in fp32 at half the rate."""
ERROR_CORRECTED = {"T4": 16, "A10": 24, "A10G": 24, "L4": 24, "L40S": 48}
"""Cards whose GDDR6 keeps a sixteenth for error correction, and the size they are sold by, in GB."""
SOLD_AS = {
    **dict.fromkeys(("RTX A4000", "RTX 4070 Ti Super", "RTX 4080", "RTX 5070 Ti", "RTX 5080"), 16),
    **dict.fromkeys(("TITAN RTX", "RTX A5000", "RTX 3090", "RTX 4090"), 24), "RTX 2080 Ti": 11, "RTX 5090": 32,
    **dict.fromkeys(("RTX A6000", "RTX 6000 Ada"), 48), "H100 PCIe": 80, "H100 SXM": 80, "H100 NVL": 94,
    "H200": 141, "B200": 180, "RTX PRO 6000": 96,
    **{name: int(name.split("GB")[0].split()[-1]) for name in CARDS if "GB" in name},
}


def test_the_catalogue_holds_the_cards_that_people_train_on():
    asked = ("V100 16GB", "V100 32GB", "TITAN RTX", "T4", "A10", "RTX A5000", "RTX A6000", "RTX 3090", "RTX 4090",
             "RTX 5090", "L4", "L40S", "A100 40GB", "A100 80GB SXM", "H100 PCIe", "H100 SXM", "H200", "B200")
    assert set(asked) <= set(CARDS)
    assert len(CARDS) == len(catalogue())


@pytest.mark.parametrize("device", CARDS.values(), ids=str)
def test_a_card_has_every_figure(device: Device):
    assert device.kind == "cuda"
    assert device.source
    assert device.bandwidth > 100e9
    assert device.pcie_bandwidth > 10e9
    assert device.l2_bytes >= 3 * MIB
    assert ("bf16" in device.flops) == ("tf32" in device.flops) == device.at_least(8)
    assert ("fp8" in device.flops) == device.at_least(8, 9)


@pytest.mark.parametrize("device", CARDS.values(), ids=str)
def test_peaks_are_dense_and_agree_with_units_and_clock(device: Device):
    """fp32 and tensor peaks, each divided by what a unit does in a cycle, are the same clock, a plausible one. A
    figure with sparsity, or with the wrong accumulation, would be off by a factor of two."""
    capability = device.capability or (0, 0)
    clock = device.flops["fp32"] / (2 * CORES[capability] * device.units)
    assert 1.3e9 < clock < 2.7e9
    rate = TENSOR[capability] // (2 if device.name in HALF_RATE else 1)
    tensor_clock = device.flops["fp16"] / (rate * device.units)
    # Hopper's tensor cores are rated at a lower clock than its fp32 units.
    assert tensor_clock == pytest.approx(clock, rel=0.15 if device.at_least(9) and not device.at_least(12) else 0.015)
    for number_format, factor in (("bf16", 1), ("tf32", 0.5), ("fp8", 2)):
        if number_format in device.flops:
            assert device.flops[number_format] == pytest.approx(factor * device.flops["fp16"], rel=0.03)


def test_reported_memory_is_a_little_less_than_sold():
    assert set(SOLD_AS) | set(ERROR_CORRECTED) == set(CARDS)
    for name, size in SOLD_AS.items():
        shortfall = 1 - reported_memory(size * GIB) / CARDS[name].memory_bytes
        assert 0 <= shortfall <= 0.025, name
    for name, size in ERROR_CORRECTED.items():
        share = CARDS[name].memory_bytes / (size * GIB)
        assert 0.90 < share < 15 / 16, name


@pytest.mark.parametrize(("written", "name"), [
    ("rtx-4090", "RTX 4090"), ("RTX 4090", "RTX 4090"), ("4090", "RTX 4090"), (" RTX4090 ", "RTX 4090"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("rtx_4070_ti_super", "RTX 4070 Ti Super"),
    ("4060ti 16 gb", "RTX 4060 Ti 16GB"), ("a6000", "RTX A6000"), ("NVIDIA RTX A6000", "RTX A6000"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("TITANRTX", "TITAN RTX"), ("Tesla T4", "T4"),
    ("Tesla V100-SXM2-32GB", "V100 32GB"), ("a100-40gb", "A100 40GB"), ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
    ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"), ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
    ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H100 NVL", "H100 NVL"),
    ("NVIDIA GH200 480GB", "GH200 96GB"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
])
def test_names_are_forgiven_their_spelling(written: str, name: str):
    assert find_device(written) == CARDS[name]


def test_every_card_is_found_by_the_name_that_messages_give():
    for name, device in CARDS.items():
        assert find_device(name.lower().replace(" ", "-")) == device


@pytest.mark.parametrize(("written", "message"), [
    ("a100", "'a100' is the name of 3 GPUs; write one of: a100-40gb, a100-80gb-pcie, a100-80gb-sxm"),
    ("v100", "write one of: v100-16gb, v100-32gb"),
    ("4060 ti", "rtx-4060-ti-16gb, rtx-4060-ti-8gb"),
    ("rtx-4900", "gpu: 'rtx-4900' is not in the catalogue; .* did you mean 'rtx-4090'"),
    ("rtx 4090 laptop", "not in the catalogue"),  # another chip, half as fast
    ("rtx 4070 ti", "not in the catalogue"),  # not the Super
    ("all", "gpu: 'all' is more than one GPU; .* such as rtx-4090, or .* --gpu all"),
    ("l4,t4", "gpu: 'l4,t4' is more than one GPU"),
    ("8xh100-sxm", "gpu: '8xh100-sxm' is more than one GPU; .* such as rtx-4090, or .* --gpu 8xh100-sxm"),
    ("mi300x", "write a size such as 24GB .*; choose from: a10, "),
    ("rtx", "choose from"),
    ("", "choose from"),
])
def test_names_of_several_cards_and_of_none_are_refused(written: str, message: str):
    with pytest.raises(RecipeError, match=message):
        find_device(written)


@pytest.mark.parametrize(("text", "size"), [
    ("24GB", 24576 - 576), ("24 gb", 24576 - 576), ("24GiB", 24576), ("16384MiB", 16384), ("23.5 gib", 24064),
    ("80GB", 81920 * 0.979),
])
def test_memory_is_read_as_people_write_it(text: str, size: float):
    assert parse_memory(text) == pytest.approx(size * MIB, abs=1)


def test_a_machines_memory_may_be_terabytes():
    assert [parse_host_memory(text) for text in ("1.5TB", "64gb", "62.5GiB", "512 MiB")] == [
        1536 * GIB, 64 * GIB, 62.5 * GIB, 512 * MIB]


@pytest.mark.parametrize("text", ["24", "24G", "24000MB", "lots", "", "-4GB", "1e3GB", "0GB", "٣GB", "9" * 400 + "GB"])
def test_other_sizes_say_what_to_write(text: str):
    with pytest.raises(RecipeError, match=r"gpu-memory: .*\b\d+GB"):
        parse_memory(text)


@pytest.mark.parametrize(("text", "like"), [
    ("6GB", "RTX 3060 12GB"), ("12GB", "RTX 3060 12GB"), ("16GB", "RTX A4000"), ("24GiB", "RTX 3090"),
    ("40GB", "RTX A6000"), ("80GB", "A100 80GB SXM"), ("192GB", "A100 80GB SXM"),
])
def test_a_card_of_known_memory_says_what_else_it_assumes(text: str, like: str):
    device = device_of_memory(parse_memory(text))
    assert device.memory_bytes == parse_memory(text)
    assert like in device.name
    assert like in device.notes
    assert (device.capability, device.flops) == (CARDS[like].capability, CARDS[like].flops)


def test_a_card_with_other_memory_keeps_its_speed():
    device = with_memory(CARDS["RTX 4090"], 48 * GIB)
    assert (device.name, device.memory_bytes) == ("RTX 4090 with 48.0 GiB", 48 * GIB)
    assert "23.5 GiB" in device.notes
    assert (device.flops, device.bandwidth) == (CARDS["RTX 4090"].flops, CARDS["RTX 4090"].bandwidth)


def test_peaks_by_dtype():
    hopper, turing = CARDS["H100 SXM"], CARDS["T4"]
    assert hopper.peak("float32") == 67e12
    assert hopper.peak("float32", tf32=True) == 494.7e12
    assert hopper.peak("torch.bfloat16", tf32=True) == hopper.peak("float16") == 989.4e12
    assert hopper.peak("float8_e4m3fn") == hopper.peak("float8_e5m2") == 1978.9e12
    assert turing.peak("float16") == 65e12
    assert turing.peak("bfloat16") == turing.peak("float32", tf32=True) == turing.peak("float8_e4m3fn") == 8.1e12
    assert Device(kind="cpu", name="CPU", memory_bytes=1).peak("float32") == 0


def test_the_catalogue_needs_no_framework():
    code = "import sys, tightfit.devices; print(*sorted({'torch', 'transformers', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""
