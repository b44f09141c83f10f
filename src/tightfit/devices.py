"""The device a recipe runs on: what it holds, how fast it is, and what its hardware can do.

`find_device` names one of the catalogue's GPUs, `device_of_memory` a card of which only the size is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from tightfit.errors import RecipeError, nearest
from tightfit.text import size

if TYPE_CHECKING:
    from tightfit.catalogue import Card

MIB = 1 << 20
GIB = 1 << 30

FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
"""Number formats with peaks of their own, by PyTorch's name."""

TENSOR_CORES = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}
"""The compute capability from which tensor cores have a format (CUDA C++ programming guide, compute capabilities)."""
FLASH_MAJOR = 8
"""The compute capability, its major part, from which there are flash attention's kernels and cuDNN's."""

RESIDENT_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor by compute capability, 2,048 on others (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""
GEFORCE = re.compile(r"RTX \d0[5-9]0")
"""In the names of GeForce cards, whose drivers let no other card read their memory."""
BRIDGED = re.compile(r"PCIe|NVL|RTX|TITAN")
"""In the names of cards whose NVLink, where they have one, is a bridge between two of them."""


Evidence = Literal["measured", "few", "assumed"]
"""The source of a card's speeds: recordings of it, few of them, or its neighbours'."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor that trains: its kind, and what its hardware can do. Bandwidths are bytes a second, 0 where not
    known."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    """Total memory of the device, as CUDA reports it; host memory for the CPU."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for the CPU."""
    bandwidth: float = 0.0
    """Bytes a second to and from its memory; 0 where not known."""
    flops: dict[str, float] = field(default_factory=dict)
    """Dense peak of matrix products, operations a second, by number format: fp32, tf32, fp16, bf16, fp8. Products of
    16 and 8 bits accumulate in fp32. A format that the hardware has no units for is left out."""
    sustains: float = 0.8
    """Share of a format's peak that large products on tensor cores sustain."""
    evidence: Evidence = "assumed"
    """The source of its speeds."""
    units: int = 0
    """Streaming multiprocessors, or cores of a CPU."""
    l2_bytes: int = 0
    """Level 2 cache, shared by all units; 0 where not known."""
    link_bandwidth: float = 0.0
    """To another GPU over NVLink, in one direction, all links together; 0 without NVLink."""
    pcie_bandwidth: float = 0.0
    """To the host's memory, in one direction."""
    host_bytes: int = 0
    """Memory of the machine that it is in; 0 where not known."""
    host_assumed: bool = False
    """Whether that is what such machines usually have."""
    cards: int = 1
    """Such devices in a machine that train together."""
    machines: int = 1
    """Such machines."""
    network_bandwidth: float = 0.0
    """Between machines: bytes a second that each sends, and receives as well; 0 where not known."""
    source: str = ""
    """The documents that the figures come from; what could not be verified is named as such."""
    notes: str = ""
    """Assumptions, as a sentence; empty where there are none."""
    uuid: str = ""
    """The card's own, as its driver writes it; empty for one that is not there."""

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether this is a CUDA device of at least that compute capability."""
        return self.capability is not None and self.capability >= (major, minor)

    def has_tensor_cores(self, number_format: str) -> bool:
        """Whether this is a CUDA device whose tensor cores have a format."""
        return self.at_least(*TENSOR_CORES[number_format])

    @property
    def has_flash(self) -> bool:
        """Whether it is a CUDA device with fused attention on tensor cores: flash attention's kernels, and cuDNN's."""
        return self.at_least(FLASH_MAJOR)

    @property
    def world(self) -> int:
        """Devices that train together."""
        return self.cards * self.machines

    @property
    def resident_threads(self) -> int:
        """Threads that are resident at once on one of its multiprocessors."""
        return RESIDENT_THREADS.get(self.capability or (0, 0), 2048)

    def in_machine_with(self, host_bytes: int) -> Self:
        """The device in a machine assumed to have so much memory for each, or the next of 32, 48, 64, 96 GiB..."""
        sizes = (gib * GIB << doublings for doublings in range(16) for gib in (32, 48))
        size = next(size for size in sizes if size >= host_bytes)
        return replace(self, host_bytes=self.cards * size, host_assumed=True)

    @property
    def links_all(self) -> bool:
        """Whether NVLink joins all such cards of a machine."""
        return self.link_bandwidth > 0 and (self.cards == 2 or not BRIDGED.search(self.name))

    @property
    def peer_to_peer(self) -> bool:
        """Whether other cards may read its memory over PCIe."""
        return not GEFORCE.search(self.name)

    @property
    def wants_wide_rows(self) -> bool:
        """Whether its tensor cores are fed best by rows of whole 128 bytes, as the A100's are, and not of 16."""
        return self.capability in ((8, 0), (9, 0), (10, 0))  # data-center cards, as the guide to matrix products has it

    def peak(self, dtype: str, tf32: bool = False) -> float:
        """Dense peak of matrix products on tensors of a dtype, operations a second; 0 where no peak is known.

        dtype: PyTorch's name, such as `bfloat16`. A dtype that the device has no peak for counts as float32, which
            is what it runs as at best.
        tf32: whether products of float32 may run on the tensor cores.
        """
        fp32 = self.flops.get("fp32", 0.0)
        own = FORMATS.get(dtype.removeprefix("torch."), "fp32")
        return self.flops.get("tf32" if own == "fp32" and tf32 else own, fp32)


def catalogue() -> tuple[Device, ...]:
    """Every GPU that has a name here, older generations first."""
    return tuple(map(_device, _cards()))


def gpu_names() -> list[str]:
    """The names of the catalogue's GPUs as they are written for `--gpu`."""
    return [_slug(card.name) for card in _cards()]


def find_device(name: str) -> Device:
    """The catalogue's GPU of that name: `rtx-4090`, `4090`, `a100-80gb-sxm`, or as a driver writes it, `NVIDIA
    A100-SXM4-80GB`. Raises RecipeError for an unknown name, and for one that several cards share."""
    given = frozenset(_words(name))
    found = [card for card in _cards() if _means(card, given)]
    if len(found) == 1:
        return _device(found[0])
    if found:
        choices = ", ".join(sorted(_slug(card.name) for card in found))
        raise RecipeError(f"gpu: {name!r} is the name of {len(found)} GPUs; write one of: {choices}")
    if name == "all" or "," in name or re.match(r"\s*\d+\s*x\s*\S", name, re.IGNORECASE):
        raise RecipeError(f"gpu: {name!r} is more than one GPU; write one's name, such as rtx-4090, or ask "
                          f"tightfit plan RECIPE --gpu {name}")
    raise RecipeError(f"gpu: {name!r} is not in the catalogue; write a size such as 24GB for a card that is not there; "
                      + nearest(_slug(" ".join(_words(name))), gpu_names()))


def listed_device(name: str) -> Device | None:
    """The catalogue's GPU of that name, as `find_device` knows it; None where there is not exactly one."""
    with suppress(RecipeError):
        return find_device(name)
    return None


def says_memory(text: str) -> bool:
    """Whether it is meant as a size of memory, well written or not, and no GPU's name."""
    return re.fullmatch(r"\s*[\d.]+\s*(gb|gib|mib)\s*", text, re.IGNORECASE) is not None


def parse_memory(text: str, field: str = "gpu-memory") -> int:
    """Bytes of device memory from `24GB`, `24 gb`, `23.5GiB` or `16384MiB`. Raises RecipeError for anything else.

    GB is the size a card is sold by, and stands for what CUDA reports on it: that many GiB, less what the driver
    keeps, see `reported_memory`. GiB and MiB are taken as they are, for figures read off a card.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gb|gib|mib)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise RecipeError(f"{field}: {text!r} is not a size of memory; write 24GB for a card sold as 24 GB, or what "
                          "CUDA reports as 23.5GiB or 24081MiB")
    number, unit = float(match[1]), match[2].lower()
    given = number * (MIB if unit == "mib" else GIB)
    if not 2 * GIB <= given <= 1024 * GIB:  # what CUDA itself takes leaves nothing of 1 GB
        raise RecipeError(f"{field}: {text!r} should be at least 2GB and at most 1024GB")
    return reported_memory(round(given)) if unit == "gb" else round(given)


def parse_host_memory(text: str) -> int:
    """Bytes of a machine's memory from `64GB`, `2TB`, `62.5GiB` or `512MiB`; modules are sold in GiB and called GB.
    Raises RecipeError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(tb|gb|gib|mib)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None or not float(match[1]):
        raise RecipeError(f"host-memory: {text!r} is not a size of memory; write 64GB, or what is free as 55.5GiB")
    return round(float(match[1]) * {"mib": MIB, "tb": 1024 * GIB}.get(match[2].lower(), GIB))


def reported_memory(nominal: int) -> int:
    """Bytes that CUDA reports on a card sold by `nominal` bytes: less 576 MiB or 2.1 %, whichever is more.

    The rule lies at or below every card of the catalogue but those whose GDDR6 corrects errors, by 2.5 % at most.
    Error correction takes another 6 %: name such a card (T4, A10, L4, L40S).
    """
    return nominal - max(576 * MIB, nominal * 21 // 1000)


REFERENCES = ("RTX 3060 12GB", "RTX A4000", "RTX 3090", "RTX A6000", "A100 80GB SXM")
"""Whose capability and speed a card is taken to have of which only the memory is known: Ampere, the oldest generation
with bf16 and FlashAttention. An older card has neither, and a data-center card of its size may be slower."""


def device_of_memory(memory_bytes: int) -> Device:
    """A CUDA card of that much memory, with everything else as on the smallest of `REFERENCES` that holds as much;
    its name and notes say which."""
    references = [_device(card) for name in REFERENCES for card in _cards() if card.name == name]
    near = 1.05  # the references' own memory depends on the driver
    like = next((r for r in references if r.memory_bytes * near >= memory_bytes), references[-1])
    major, minor = like.capability or (0, 0)
    return replace(
        like,
        name=f"{size(memory_bytes)} card (like {like.name})",
        memory_bytes=memory_bytes,
        evidence="assumed",
        notes=f"only its memory is known: compute capability {major}.{minor}, peaks and bandwidth are assumed to be "
              f"those of the {like.name}",
    )


def with_memory(device: Device, memory_bytes: int) -> Device:
    """The device with another amount of memory, which its name and notes then say."""
    note = f"its memory was given; {device.name} has {size(device.memory_bytes)}"
    return replace(device, name=f"{device.name} with {size(memory_bytes)}", memory_bytes=memory_bytes,
                   notes="; ".join(filter(None, (device.notes, note))))


def _cards() -> Sequence[Card]:
    from tightfit.catalogue import CARDS  # a run on a processor names no card

    return CARDS


def _device(card: Card) -> Device:
    peaks = {"fp32": card.fp32, "tf32": card.tf32, "fp16": card.fp16, "bf16": card.bf16, "fp8": card.fp8}
    return Device(
        kind="cuda",
        name=card.name,
        memory_bytes=card.memory_mib * MIB,
        capability=card.capability,
        bandwidth=card.bandwidth * 1e9,
        flops={number_format: peak * 1e12 for number_format, peak in peaks.items() if peak},
        sustains=card.sustains,
        evidence=card.evidence,
        units=card.units,
        l2_bytes=round(card.l2_mib * MIB),
        link_bandwidth=card.link * 1e9,
        pcie_bandwidth=card.pcie * 1e9,
        source=card.source,
    )


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


NAME_NOISE = frozenset({"nvidia", "geforce", "tesla", "gpu", "generation", "edition", "hbm3e"})
"""Words in the names of drivers and shops that tell no two cards of the catalogue apart."""


def _words(name: str) -> list[str]:
    """The words of a card's name, spelled alike however it is written: `RTX4060Ti-16 GB` has rtx, 4060, ti, 16gb."""
    text = re.sub(r"(\d+)\s*gi?b?\b", r"\1gb ", name.lower())
    text = re.sub(r"sxm\d", "sxm", text)
    text = re.sub(r"(rtx|titan)(?=[a-z]?\d|rtx)", r"\1 ", text)
    text = re.sub(r"(?<=\d{4})(?=ti|super)|(?<=ti)(?=super)", " ", text)
    return [word for word in re.findall(r"[a-z0-9]+", text) if word not in NAME_NOISE]


def _means(card: Card, given: frozenset[str]) -> bool:
    """Whether a name's words are this card's: all that tell models apart, none that the card has not.

    The size, the form, and RTX may be left out.
    """
    words = frozenset(_words(card.name))
    optional = {word for word in words if re.fullmatch(r"\d+gb|sxm|pcie", word)}
    if "titan" not in words:
        optional.add("rtx")
    return bool(given) and words - optional <= given <= words | optional | set(_words(card.also))
