"""The figures of each GPU that a recipe can be planned for, as a plain table.

Memory is what CUDA reports as the device's total, in MiB: less than the size a card is sold by, because the driver
keeps some, and error correction on GDDR6 keeps a sixteenth more (on by default on T4, A10, L4 and L40S, off on the
RTX cards). It falls by up to 1.5 % from older to newer drivers, so each figure is the one of the newest driver found,
on Linux; Windows reports up to 3 % more.

Peaks are dense (without structured sparsity), with accumulation in fp32, in TFLOPS, at NVIDIA's boost clock. GeForce
cards run 16-bit products at half the rate when they accumulate in fp32, which is how they train. What a datasheet
gives only with sparsity is halved here. Bandwidths are in GB/s (1e9); `link` and PCIe count one direction.

Nothing here was measured by us. NVIDIA's documents were read where others quote their tables; a figure for which no
document was found says so in its source. Where a source says "by ratio", the tensor peaks of that card were not found:
they are its fp32 peak times what NVIDIA's tables give for its generation (fp16 and bf16 / tf32 / fp8):
    GeForce RTX 30      2 / 1         from the RTX 3090: 71.2 and 35.6 against 35.6
    GeForce RTX 40      2 / 1 / 4     from the RTX 4090: 165.2, 82.6 and 330.3 against 82.6
    GeForce RTX 50      2 / 1 / 4     from the RTX 5090: 209.5, 104.8 and 419 against 104.8
    RTX A               4 / 2         from the RTX A6000: 154.8 and 77.4 against 38.7
    RTX Ada, L          4 / 2 / 8     from the L40S: 362, 183 and 733 against 91.6
    RTX PRO Blackwell   4 / 2 / 8     from 4,000 sparse FP4 TOPS against 125: 8 times the dense 16-bit peak
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tightfit.devices import Evidence

PCIE_3, PCIE_4, PCIE_5 = 0.985, 1.969, 3.938
"""GB/s of one lane in one direction, after 128b/130b encoding of 8, 16 and 32 GT/s (PCI-SIG)."""

VOLTA = "NVIDIA V100 datasheet, 2020, and A100 architecture whitepaper, 2020"
TURING = "NVIDIA Turing architecture whitepaper, 2018"
T4_SHEET = "NVIDIA T4 datasheet, 2019"
AMPERE = "NVIDIA A100 datasheet, 2021, and A100 architecture whitepaper, 2020"
GA102 = "NVIDIA Ampere GA102 architecture whitepaper v2, 2021"
GA102_RATIO = "by ratio from NVIDIA's published fp32 peak"
ADA = "NVIDIA Ada architecture whitepaper v2.1, 2023"
HOPPER = "NVIDIA H100 datasheet, 2022, and H100 architecture whitepaper v1.04, 2023"
BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper, 2025"
LOG = "memory from a public log of PyTorch"
XLA = "memory and L2 from OpenXLA's device specifications, read off the card"


class Card(NamedTuple):
    """One GPU. See the module for the units; 0 is a format without tensor cores for it, or a link that it lacks.

    name: as people write it; in lower case with hyphens it is the name to give as `--gpu`.
    also: other words that may stand in the card's name, as drivers and shops write it.
    sustains: share of its 16-bit peak that large matrix products sustain; power decides, and GeForce cards run above
        their sheets. Fitted to all the seconds of a card's recordings, of which large products take most.
    evidence: where `sustains` comes from: `measured`, fitted on recordings of the card (`benchmarks/ops_vs_gpu.py`);
        `few`, of which there are few; `assumed`, its neighbours'.
    source: of the figures in front of these two.
    """

    name: str
    also: str
    memory_mib: int
    bandwidth: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    fp8: float
    capability: tuple[int, int]
    units: int
    l2_mib: float
    link: float
    pcie: float
    sustains: float
    evidence: Evidence
    source: str


CARDS = (
    Card("V100 16GB", "sxm", 16151, 900, 15.7, 0, 125, 0, 0, (7, 0), 80, 6, 150, 16 * PCIE_3,
         0.85, "measured", f"{VOLTA}; {XLA}"),
    Card("V100 32GB", "sxm", 32494, 900, 15.7, 0, 125, 0, 0, (7, 0), 80, 6, 150, 16 * PCIE_3,
         0.85, "measured", f"{VOLTA}; {LOG} 2.6 (CUDA 12.4)"),
    Card("TITAN RTX", "", 24212, 672, 16.3, 0, 130.5, 0, 0, (7, 5), 72, 6, 50, 16 * PCIE_3,
         0.75, "assumed", f"{TURING}; {LOG} 1.13 (CUDA 11.7), newer drivers not found"),
    Card("RTX 2080 Ti", "", 10825, 616, 13.4, 0, 53.8, 0, 0, (7, 5), 68, 5.5, 50, 16 * PCIE_3,
         1.00, "assumed", f"{TURING}, reference clock; {LOG} 2.6 (CUDA 12.4)"),
    Card("T4", "", 14913, 320, 8.1, 0, 65, 0, 0, (7, 5), 40, 4, 0, 16 * PCIE_3,
         0.54, "few", f"{T4_SHEET}; {LOG} 2.14 (CUDA 13.0)"),
    Card("A10", "", 22731, 600, 31.2, 62.5, 125, 125, 0, (8, 6), 72, 6, 0, 16 * PCIE_4,
         0.60, "assumed", "NVIDIA A10 datasheet, 2021; memory from a public log of llama.cpp, newer drivers not "
         "found"),
    Card("A10G", "", 22587, 600, 35, 35, 70, 70, 0, (8, 6), 80, 6, 0, 16 * PCIE_4,
         0.82, "few", f"Baseten, A10 against A10G, 2023 (NVIDIA's own sheet not read; L2 taken from the A10); {LOG} "
         "(CUDA 13.0)"),
    Card("RTX A4000", "", 15985, 448, 19.2, 38.4, 76.7, 76.7, 0, (8, 6), 48, 4, 0, 16 * PCIE_4,
         0.75, "assumed", f"NVIDIA RTX A4000 datasheet, 2021, tf32 by ratio; {LOG} of 2025, to 10 MiB; L2 not "
         "verified"),
    Card("RTX A5000", "", 24114, 768, 27.8, 55.6, 111.1, 111.1, 0, (8, 6), 64, 6, 56.25, 16 * PCIE_4,
         0.82, "assumed", f"NVIDIA RTX A5000 datasheet, 2021, tensor peaks by ratio; {LOG}"),
    Card("RTX A6000", "", 48676, 768, 38.7, 77.4, 154.8, 154.8, 0, (8, 6), 84, 6, 56.25, 16 * PCIE_4,
         0.82, "few", f"{GA102}; {XLA}, newer drivers not found"),
    Card("RTX 3060 12GB", "", 11910, 360, 12.7, 12.7, 25.5, 25.5, 0, (8, 6), 28, 3, 0, 16 * PCIE_4,
         1.07, "assumed", f"{GA102_RATIO}; {LOG} 2.10 (CUDA 12.8); bandwidth and L2 not verified"),
    Card("RTX 3080 10GB", "", 9881, 760, 29.8, 29.8, 59.5, 59.5, 0, (8, 6), 68, 5, 0, 16 * PCIE_4,
         1.07, "assumed", f"{GA102_RATIO}; {LOG}, to 10 MiB; bandwidth and L2 not verified"),
    Card("RTX 3090", "", 24124, 936, 35.6, 35.6, 71.2, 71.2, 0, (8, 6), 82, 6, 56.25, 16 * PCIE_4,
         1.07, "few", f"{GA102}; {LOG} 2.13 (CUDA 13.0)"),
    Card("A100 40GB", "sxm pcie", 40339, 1555, 19.5, 156, 312, 312, 0, (8, 0), 108, 40, 300, 16 * PCIE_4,
         0.78, "measured", f"{AMPERE}; {XLA} (SXM; PCIe 40,377)"),
    Card("A100 80GB PCIe", "", 81154, 1935, 19.5, 156, 312, 312, 0, (8, 0), 108, 40, 300, 16 * PCIE_4,
         0.79, "few", f"{AMPERE}; {LOG} 2.6 (CUDA 12.4)"),
    Card("A100 80GB SXM", "", 81153, 2039, 19.5, 156, 312, 312, 0, (8, 0), 108, 40, 300, 16 * PCIE_4,
         0.78, "measured", f"{AMPERE}; {LOG} 2.7 (CUDA 12.6)"),
    Card("RTX 4060 Ti 8GB", "", 7806, 288, 22.1, 22.1, 44.1, 44.1, 88.3, (8, 9), 34, 32, 0, 8 * PCIE_4,
         1.00, "assumed", f"{ADA}, by ratio; {LOG} 2.12 (CUDA 13.0); L2 not verified"),
    Card("RTX 4060 Ti 16GB", "", 15944, 288, 22.1, 22.1, 44.1, 44.1, 88.3, (8, 9), 34, 32, 0, 8 * PCIE_4,
         1.00, "assumed", f"{ADA}, by ratio; memory from a public log of llama.cpp; L2 not verified"),
    Card("RTX 4070 Ti Super", "16gb", 15934, 672, 44.1, 44.1, 88.2, 88.2, 176.4, (8, 9), 66, 48, 0, 16 * PCIE_4,
         1.00, "assumed", f"{ADA}, by ratio; memory and L2 from public logs of PyTorch; bandwidth not verified"),
    Card("RTX 4080", "16gb", 16049, 717, 48.7, 48.7, 97.5, 97.5, 194.9, (8, 9), 76, 64, 0, 16 * PCIE_4,
         1.00, "assumed", f"{ADA}, by ratio; {LOG}, newer drivers not found"),
    Card("RTX 4090", "", 24081, 1008, 82.6, 82.6, 165.2, 165.2, 330.3, (8, 9), 128, 72, 0, 16 * PCIE_4,
         1.00, "few", f"{ADA}; {LOG} 2.5"),
    Card("L4", "", 22563, 300, 30.3, 60, 121, 121, 242.5, (8, 9), 58, 48, 0, 16 * PCIE_4,
         0.44, "few", f"NVIDIA L4 datasheet, 2023; {LOG} 2.11 (CUDA 12.8)"),
    Card("L40S", "", 45467, 864, 91.6, 183, 362, 362, 733, (8, 9), 142, 96, 0, 16 * PCIE_4,
         0.50, "measured", "NVIDIA L40S datasheet, 2023; memory from a public log of llama.cpp; L2 not verified"),
    Card("RTX 6000 Ada", "", 48520, 960, 91.1, 182.1, 364.2, 364.2, 728.5, (8, 9), 142, 96, 0, 16 * PCIE_4,
         0.54, "few", f"NVIDIA RTX 6000 Ada datasheet, 2023, tensor peaks by ratio; {LOG} 2.7 (CUDA 12.8); bandwidth "
         "and L2 not verified"),
    Card("H100 PCIe", "80gb", 81008, 2039, 51, 378, 756, 756, 1513, (9, 0), 114, 50, 300, 16 * PCIE_5,
         0.65, "few", f"{HOPPER}; {XLA}, bandwidth likewise"),
    Card("H100 SXM", "80gb hbm3", 81089, 3352, 67, 494.7, 989.4, 989.4, 1978.9, (9, 0), 132, 50, 450, 16 * PCIE_5,
         0.76, "measured", f"{HOPPER}; {LOG} 2.7 (CUDA 12.8); bandwidth from OpenXLA's device specifications, read off "
         "the card"),
    Card("H100 NVL", "94gb pcie", 95320, 3938, 60, 417.5, 835.5, 835.5, 1670.5, (9, 0), 132, 60, 300, 16 * PCIE_5,
         0.84, "few", f"NVIDIA H100 NVL datasheet and product brief, 2024; {LOG} 2.13 (CUDA 13.0); L2 taken from the "
         "H200, not verified"),
    Card("GH200 96GB", "480gb", 96768, 4000, 67, 494.7, 989.4, 989.4, 1978.9, (9, 0), 132, 60, 450, 450,
         0.72, "assumed", "NVIDIA GH200 datasheet, 2024, peaks as the H100 SXM's; `pcie` is NVLink-C2C to its own "
         "processor; memory from a public log of PyTorch, to 10 MiB; L2 taken from the H200; bandwidth and L2 not "
         "verified"),
    Card("H200", "141gb sxm", 143156, 4800, 67, 494.7, 989.4, 989.4, 1978.9, (9, 0), 132, 60, 450, 16 * PCIE_5,
         0.66, "measured", f"NVIDIA H200 datasheet, 2024, peaks as the H100 SXM's; {LOG} 2.11 (CUDA 12.8), L2 "
         "likewise"),
    Card("B200", "180gb sxm", 182631, 7672, 75, 1100, 2250, 2250, 4500, (10, 0), 148, 126.5, 900, 16 * PCIE_5,
         0.61, "measured", f"NVIDIA HGX B200 datasheet, 2025, an eighth of its eight GPUs; {LOG}; bandwidth and L2 "
         "from OpenXLA's device specifications, read off the card (8,000 on the datasheet); fp32 is given as 75 to "
         "80"),
    Card("RTX 5060 Ti 16GB", "", 15825, 448, 23.7, 23.7, 47.4, 47.4, 94.8, (12, 0), 36, 32, 0, 8 * PCIE_5,
         1.08, "assumed", f"{BLACKWELL}, by ratio; memory from a public log of llama.cpp; bandwidth and L2 not "
         "verified"),
    Card("RTX 5070 Ti", "16gb", 15808, 896, 43.9, 43.9, 87.9, 87.9, 175.8, (12, 0), 70, 48, 0, 16 * PCIE_5,
         1.08, "assumed", f"{BLACKWELL}, by ratio (a sixteenth of 1,406 AI TOPS); memory from a public log of "
         "llama.cpp; L2 not verified"),
    Card("RTX 5080", "16gb", 15840, 960, 56.3, 56.3, 112.6, 112.6, 225.1, (12, 0), 84, 64, 0, 16 * PCIE_5,
         1.08, "assumed", f"{BLACKWELL}, by ratio (a sixteenth of 1,801 AI TOPS); memory and L2 from public logs of "
         "PyTorch"),
    Card("RTX 5090", "32gb", 32102, 1792, 104.8, 104.8, 209.5, 209.5, 419, (12, 0), 170, 96, 0, 16 * PCIE_5,
         1.08, "few", f"{BLACKWELL}; {LOG} 2.12 (CUDA 13.0)"),
    Card("RTX PRO 6000", "blackwell workstation 96gb", 97247, 1792, 125, 251, 503, 503, 1007, (12, 0), 188, 128, 0,
         16 * PCIE_5,
         0.76, "measured", "NVIDIA RTX PRO 6000 Blackwell datasheet, 2025, tensor peaks by ratio; memory from a "
         "public log of llama.cpp"),
)
"""Within a generation from the smallest to the largest."""
