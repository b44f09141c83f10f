"""Pages made from what benchmarks recorded in results/."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PEERS = {
    "tightfit": "tightfit", "accelerate": "accelerate estimate-memory", "deepspeed_zero2": "DeepSpeed ZeRO-2",
    "deepspeed_zero3": "DeepSpeed ZeRO-3",
}  # fmt: skip

PAGES = {"beyond": "beyond_cards", "scale": "scale_gpus"}
"""Pages that have another name than their record."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and rows."""


def recorded_pages() -> dict[str, list[str | Table]]:
    """The parts of each page whose record exists, paragraphs and tables, by the page's path below docs/."""
    made = {"rules_of_thumb": rules_page, "peer_estimates": peers_page, "published": published_page,
            "beyond": beyond_page, "scale": scale_page}
    return {
        f"{PAGES.get(name, name)}.md": list(page(json.loads((RESULTS / f"{name}.json").read_text("utf-8"))))
        for name, page in made.items()
        if (RESULTS / f"{name}.json").exists()
    }


def rules_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """The rules of thumb, what is predicted, and why they differ."""
    small, large = record["bytes_per_parameter"], record["states_gb"]
    yield "# Rules of thumb"
    yield ("Guides state the memory of training in bytes per parameter. Here each rule stands beside what the training "
           "step itself holds, as planning predicts it: the most bytes of that kind at once in a step, over the number "
           "of parameters.")
    yield (f"A decoder of {small['parameters'] / 1e6:.0f} million parameters, sequences of 64 tokens, planned for the "
           f"{record['device']}; {_where(record, 'rules_of_thumb')}. Where nothing is said, the rule holds.")
    yield ("what", "rule", "predicted", "why"), [
        (row["what"], row["rule"], f"{row['predicted']:.3g}", row["why"]) for row in small["rows"]
    ]
    yield "## Optimizer states of a model of 3 billion parameters"
    yield f"In GB, for {large['parameters'] / 1e9:.2f} billion parameters."
    yield ("what", "rule", "predicted", "why"), [
        (row["what"].rpartition(", ")[2], row["rule"], f"{row['predicted']:.3g}", row["why"]) for row in large["rows"]
    ]


def peers_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """Other tools' estimates beside tightfit's, against measured memory."""
    yield "# Memory estimates beside those of other tools"
    yield ("How far each estimate is from the most that two real steps on the CPU hold at once, by torch.profiler's "
           "own allocation events. Small models, AdamW and fp32 where nothing is said; "
           f"{_where(record, 'peer_estimates')}.")
    rows = [
        (row["what"], row["batch"], f"{row['measured'] / 2**20:.1f}", *(_signed(row["error"][p]) for p in PEERS))
        for row in record["rows"]
    ]
    for figure in ("median", "worst"):
        rows.append((f"{figure}, without sign", "", "", *(f"{record['summary'][p][figure]:.2%}" for p in PEERS)))
    yield ("model", "sequences x tokens", "measured MiB", *PEERS.values()), rows
    yield "## How each figure was got"
    yield "- tightfit: the peak of the predicted trace, for the CPU."
    yield ("- accelerate: the functions behind `accelerate estimate-memory`, run on the same model on torch's meta "
           "device; its figure for training with Adam. It knows the weights' bytes and the precision, and says that it "
           "is for a batch size of 1. For mixed precision it names the largest of its parts, not their sum.")
    yield ("- DeepSpeed: not installed where this was recorded. Its published formulas for one GPU without offloading "
           "were computed, not run: 20 bytes a parameter for ZeRO-2; for ZeRO-3, 18 and 4 more for each parameter of "
           "the largest module. They are for mixed precision with Adam, and leave activations to the reader.")
    yield ("Neither of the others counts activations, and neither knows another optimizer than Adam: their distance "
           "grows with the batch. On a GPU this comparison is not yet measured.")


def published_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """Predictions beside training runs that others published."""
    speed, memory, fits = (record["summary"][figure] for figure in ("speed", "memory", "fits"))
    yield "# Predictions beside published runs"
    yield ("Training runs that others published, each with its source, predicted with every field of its recipe pinned "
           "and nothing measured: times come from data sheets, memory from the step itself. Errors are predicted over "
           f"published figures, less 1; {_where(record, 'published')}. The runs are in "
           "[published_runs.jsonl](../results/published_runs.jsonl), graded by how fully they are described: tables "
           "are of grades A and A- but where they say B.")
    yield "![Predicted against published speed](../results/published.png)"
    yield from held_to(record)
    yield "## Speed"
    yield ("Plain is PyTorch with its own kernels, eager; special kernels, such as apex's, are predicted as PyTorch's "
           "own. Weights of fp16 beside fp32 ones, which no recipe has, are predicted as bf16-pure on cards with bf16, "
           "and as fp16 on others.")
    names = {"by_kernels": "kernels", "by_grade": "grade", "by_source": "source", "by_timed": "timed",
             "by_precision": "precision"}
    parts = [("all", speed["all"])] if "all" in speed else []
    parts += [(f"{name}: {group}", row) for key, name in names.items() for group, row in speed[key].items()]
    yield SPREAD, [_spread(name, row) for name, row in parts]
    yield "By card, every kernel:"
    yield SPREAD, [_spread(card, row) for card, row in speed["by_card"].items()]
    yield "## Intervals"
    yield ("A plan gives a speed with its interval, from what is known of the card and from what the step's seconds go "
           "to, meant to hold nine runs of ten. *Left out*: the same when the error of cards known as well is fitted "
           "without the run's own card.")
    yield ("of", "runs", "inside", "left out", "interval at the median", "error of the card alone"), [
        (name, str(row["rows"]), *(f"{row[key] / max(row['rows'], 1):.0%}" for key in ("inside", "inside_left_out")),
         f"± {row['median_interval']:.0%}", f"{row['card_error']:.0%}" if "card_error" in row else "")
        for name, row in record["summary"]["intervals"].items()
    ]
    yield "## MFU"
    yield ("Predicted beside the highest that was published for the card. MFU counts 6 FLOPs a token for each weight "
           "that it is multiplied by, and 12 for each pair of positions, layer and feature, masked or not, as PaLM, "
           "torchtitan, llm-foundry and nanochat do; recomputation counts nothing.")
    yield ("model", "tokens", "checkpointing", "card", "predicted", "highest", "where"), [
        (row["model"], f"{row['micro_batch_size']} x {row['seq_len']:,}", row.get("checkpointing", "none"), row["card"],
         f"{row['predicted']:.0%}", f"{row['mfu']:.0%}", row["source"]) for row in record["mfu"]
    ]
    yield "## Memory"
    yield ("By who counted it: PyTorch's allocator, or the driver, whose figure is what is reserved and the context "
           "together. Software before CUDA 11.7 and PyTorch 1.13 loaded every kernel into its context, and is "
           "predicted so, from contexts that others published; a plan is for today's, which loads what it uses.")
    parts = [(name, row) for name, row in memory.items() if name in ("allocated", "reserved", "driver")]
    parts += [(f"plain kernels: {name}", row) for name, row in memory["plain"].items()]
    parts += [(f"grade {name}", row) for name, row in memory["by_grade"].items()]
    yield SPREAD, [_spread(name, row) for name, row in parts]
    yield (f"Of {fits['rows']} runs of all grades, {fits['ran']} ran and the others were out of memory; the prediction "
           f"says the same of {fits['agree']}.")
    yield "## Adapters"
    yield ("LoRA and QLoRA, memory by who counted it. The rows that begin with fms are of transformers, peft and "
           "bitsandbytes in rows of one length, beside full fine-tuning by the same script; their speeds are averages "
           "over 30 steps, the first ones included. Lengths vary in peft's, and LitGPT's model is its own.")
    yield ("run", "card", "counted", "published", "predicted", "off by", "speed off by"), [
        (row["id"], row["card"], row["memory"]["counted"], *(f"{row['memory'][figure] / 1e9:.1f} GB"
                                                             for figure in ("published", "predicted")),
         f"{row['memory']['error']:+.1%}", f"{row['speed']['error']:+.0%}" if "speed" in row else "")
        for row in record["rows"] if "memory" in row and "held_out" not in row
        and ("lora" in row["id"] or row["id"].startswith("fms-"))
    ]
    yield from held_out(record)
    yield "## Far off"
    yield "Every figure of the other runs that is off by more than 20 %, and the reason where it is known."
    yield ("run", "grade", "card", "figure", "off by", "because"), [
        (row["id"], row["grade"], row["card"], figure, f"{row[figure]['error']:+.0%}", row[figure]["reason"])
        for row in record["rows"] for figure in FIGURES if "reason" in row.get(figure, {}) and "held_out" not in row
    ]
    yield "## Not expressed"
    yield "Runs that no recipe says the same as, by what is in the way."
    yield ("runs", "what"), sorted(
        ((str(count), why) for why, count in Counter(_why(row["why"]) for row in record["left_out"]).items()),
        key=lambda row: -int(row[0]),
    )


def held_out(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """Runs that were found when all constants stood, by themselves."""
    sums, rows = record["held_out"], [row for row in record["rows"] if "held_out" in row]
    timed = sums["speed"]["all"]["rows"]
    yield "## Held out"
    yield (f"{sums['runs']} runs of today's software that were found, graded and written down, with what is uncertain "
           "of each, after every constant stood, and then predicted: they are in no other figure of this page. Those "
           "that compile were predicted twice, for they showed two things that are mended: FlexAttention was not "
           "followed in compiled blocks (torchtune's speeds were 15 to 18 % too low with recomputed ones), and compile "
           "left the loss out, which the scripts of GPT-2 compile: on most cards 22 to 39 % too slow, 36 to 44 % too "
           "large. The script of gpt2grid keeps the last micro-batch's logits while the next is computed, as was "
           "written down before predicting: those bytes (beside_bytes) are added to what a recipe takes. Speed is "
           "inside its interval in "
           f"{sums['speeds_inside_their_interval']} of {timed}; whether a run fits is said rightly of "
           f"{sums['fits']['agree']} of {sums['fits']['rows']}. Every grade; by what a run's id begins with.")
    for figure in FIGURES:
        yield (f"{figure}, of", *SPREAD[1:]), [_spread(name, row) for name, row in sums[figure].items()]
    yield "What is off by more than 20 %, and why:"
    yield ("figures", "what", "off by", "because"), sorted(
        ((str(len(errors)), f"{figure} of {source}", _range(errors), why)
         for (figure, source, why), errors in _far(rows).items()), key=lambda line: -int(line[0]))
    yield "Each of them:"
    yield ("run", "grade", "card", "memory", "predicted", "off by", "speed off by"), [
        (row["id"], row["grade"], row["card"],
         *((f"{row['memory']['published'] / 1e9:.1f} GB {row['memory']['counted']}",
            f"{row['memory']['predicted'] / 1e9:.1f} GB", f"{row['memory']['error']:+.1%}") if "memory" in row
           else ("", "", "")),
         f"{row['speed']['error']:+.1%}" if "speed" in row else "") for row in rows
    ]


def _range(errors: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{error:+.0%}" for error in (min(errors), max(errors))))


def _far(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[float]]:
    """Errors of figures that are far off, by figure, source and reason."""
    found = defaultdict(list)
    for row in rows:
        for figure in FIGURES:
            if "reason" in row.get(figure, {}):
                found[figure, row["id"].partition("-")[0], row[figure]["reason"]].append(row[figure]["error"])
    return found


def held_to(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """Limits on the errors of predicted runs and single ops, beside the errors measured."""
    ops = json.loads((RESULTS / "ops_vs_gpu.json").read_text("utf-8"))
    yield "## Held to"
    yield ("Absolute relative errors: the limit on their median, then that on their 95th percentile where there is "
           "one; both are measured. Runs are of grades A and A- unless the line says otherwise; ops and layers are "
           f"those that others recorded on GPUs; {_where(ops, 'ops_vs_gpu')}. *Left out*: predicted without fitting "
           "any recording of the same card, except for the clock that its power limit sustains, which is fitted on one "
           "half of the card's recordings and judged on the other. Fused ops are those of PyTorch and transformers, "
           "forward and backward.")
    yield ("of", "cases", "limit", "measured", "met"), [
        _held(line) for line in (*record["held_to"], *ops["held to"]) if line["rows"]
    ]
    yield ("Grade B has three kinds of runs whose peak was measured by PyTorch's allocator: transformers' models in "
           "rows of one length ([LoRA, QLoRA and full fine-tuning](#adapters)); runs whose reserved memory was "
           "measured over batches of many lengths, and is predicted as if all were the longest; and LitGPT's own "
           "model, [predicted as transformers'](#far-off). Of single layers, those furthest off are RMSNorm and "
           "rotary embeddings, which torch and transformers of 2024 compute by other ops.")


def _held(line: Mapping[str, Any]) -> tuple[str, ...]:
    cases, limit = f"{line['rows']:,}", f"{line['limit']:.0%}"
    if "part" in line:
        return line["of"], cases, limit, f"{line['part']:.0%}", "yes" if line["part"] >= line["limit"] else "no"
    met = line["median"] <= line["limit"] and line["p95"] <= line.get("p95_limit", math.inf)
    limit = f"{limit}, {line['p95_limit']:.0%}" if "p95_limit" in line else limit
    return line["of"], cases, limit, f"{line['median']:.1%}, {line['p95']:.0%}", "yes" if met else "no"


def scale_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """A large model on few and on many GPUs."""
    yield "# Many GPUs: by number and network"
    yield (f"{record['model']} in full on {record['gpu']} cards, {record['tokens']:,} tokens a step in sequences of "
           f"{record['seq_len']:,}, bf16, AdamW, every block recomputed; [what many GPUs mean](scale.md). Planned by "
           f"`benchmarks/scale.py`, not measured on GPUs; {_where(record, 'scale')}.")
    yield "![Tokens a second of each GPU, by their number](pictures/scale.svg)"
    rows = []
    for row in record["rows"]:
        host, waits = row["host_bytes_of_a_machine"], row["waits"]
        rows.append((
            f"{row['gpus']:,}", row["network"] or "-", _step_of(row), f"{row['gpu_bytes'] / 2**30:.1f}",
            f"{host / 2**30:,.0f}" if host else "-", f"{row['step_seconds']:,.1f}", f"{row['tokens_per_second']:,.0f}",
            f"{row['per_gpu']:,.0f}", f"{row['mfu']:.0%}", f"{waits['communication']:.0%}",
            f"{waits['host'] + waits['transfers']:.0%}",
        ))  # fmt: skip
    yield ("GPUs", "network of a machine", "what fits", "GiB a GPU", "GiB of a machine's memory", "seconds a step",
           "tokens/s", "each", "MFU", "waits for communication", "for host and copies"), rows


def _step_of(row: Mapping[str, Any]) -> str:
    parallel = row["parallel"]
    if parallel == "none":
        return "block by block, bf16 weights"
    offloaded = isinstance(parallel, dict) and parallel.get("cpu_offload")
    where = ", parts in host memory" if offloaded else ""
    return f"fsdp{where}, micro-batches of {row['micro_batch_size']}"


def beyond_page(record: Mapping[str, Any]) -> Iterator[str | Table]:
    """Streamed steps by card and global batch."""
    yield "# Bigger than the card: how fast"
    yield (f"Full fine-tuning of {record['model']} in bf16 with stochastic rounding, {record['optimizer']}, 4,096 "
           "tokens a sequence, one sequence a micro-batch, recomputed blocks, [all of each block in the host's "
           f"memory](beyond.md). Planned by `benchmarks/beyond.py`, not measured on a GPU; {_where(record, 'beyond')}.")
    yield "![Speed beside that without copies, by tokens of a global batch](pictures/beyond.svg)"
    yield "## When copies cost nothing"
    yield (f"From that global batch on a streamed step has {record['share']:.0%} of the speed that it would have with "
           "copies that take no time. Beside it the fastest plan with everything on a card of the same speed that had "
           "room for it, which recomputes less, and what it would take.")
    yield ("card", "memory, GiB", "hidden from, tokens a step", "fastest resident plan, GiB", "its tokens/s",
           "its choice"), [
        (row["gpu"], f"{row['memory_gib']:.1f}",
         f"{row['hidden_from_tokens']:,}" if row["fits"] else "does not fit", f"{row['fastest_gib']:.0f}",
         f"{row['fastest_tokens_per_second']:,}", f"`{row['fastest']}`") for row in record["cards"]
    ]
    yield "## By global batch"
    yield ("Speed as a share of: the same step with copies that take no time; the same recomputation with everything "
           "on the card, one micro-batch after the other; the fastest resident plan, at its own global batch.")
    yield ("card", "tokens a step", "GPU memory, GiB", "host memory, GiB", "to the GPU, GiB", "back, GiB", "tokens/s",
           "MFU", "without copies", "resident", "fastest resident"), [
        (row["gpu"], f"{row['tokens']:,}", f"{row['reserved_gib']:.1f}", f"{row['host_gib']:.0f}",
         f"{row['to_device_gib']:.0f}", f"{row['to_host_gib']:.0f}", f"{row['tokens_per_second']:,}",
         f"{row['mfu']:.0%}", *(f"{row[f'of_{speed}']:.2f}" for speed in (
             "speed_without_copies", "resident_speed", "fastest_speed"))) for row in record["rows"]
    ]


FIGURES = ("speed", "memory")
SPREAD = ("of", "runs", "median", "95 of 100", "worst", "median with sign", "within 20 %")


def _spread(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (f"{row[key]:.1%}" for key in ("median", "p95", "worst"))
    return name, str(row["rows"]), *shares, f"{row['median_with_sign']:+.1%}", str(row["within_20_percent"])


def _why(reasons: str) -> str:
    """The first reason; one for all rows that lack a card of the catalogue."""
    first = reasons.splitlines()[0]
    return "gpu: a card that is not in the catalogue" if first.startswith("gpu: ") else first


def _where(record: Mapping[str, Any], name: str) -> str:
    place = record["environment"]
    return f"torch {place['torch']}, {place['date']}, in [{name}.json](../results/{name}.json)"


def _signed(error: float) -> str:
    return f"{error:+.2%}" if round(error, 4) else "0.00%"
