"""Data files that are damaged: samples whose ids and labels the model has, or one message."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from fuzzing.harness import LONGEST, Kind
from tightfit.data import Prepared, prepare
from tightfit.errors import DataError
from tightfit.model_facts import ModelFacts
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, get_task

VOCAB = 300
FACTS = ModelFacts(vocab_size=VOCAB, num_labels=3, max_positions=64, image_size=8)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "café", "naïve", "—", "1234", "🦊", "<|endoftext|>", "\u202e")
VALUES: tuple[Any, ...] = (None, True, 0, -1, 3, 2**70, 1.5, "", " ", "x" * 20_000, [], {}, [[]], ["a", None],
                           {"a": {"b": []}}, "\ud800", "\x00")
TEMPLATES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages[1]['content'][0] }}", "{{ raise_exception('no') }}", "{% for", "", "{{ 1 / 0 }}", "{{ messages }}",
    "{% for i in range(3) %}{{ messages[0].content.__class__.__mro__ }}{% endfor %}",
)  # fmt: skip
Rows = list[Any]


def text_of(draw: random.Random) -> str:
    """Some words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """Turns of a user and an assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text_of(draw)} for i in range(draw.randint(1, 5))]


def rows_of(draw: random.Random, task: str) -> Rows:
    """Rows that a task learns from."""
    count = draw.choice((0, 1, 2, 12, 12, 40))
    if task == "sequence-classification":
        named = draw.random() < 0.5
        return [{"text": text_of(draw), "label": "abc"[i % 3] if named else i % 3} for i in range(count)]
    if task == "seq2seq":
        return [{"text": text_of(draw), "target": text_of(draw)} for _ in range(count)]
    kind = draw.randrange(3) if task == "causal-lm" else 0
    if kind == 0:
        return [{"text": text_of(draw)} for _ in range(count)]
    if kind == 1:
        return [{"prompt": text_of(draw), "completion": text_of(draw)} for _ in range(count)]
    return [{"messages": conversation(draw)} for _ in range(count)]


def spoilt(draw: random.Random, rows: Rows) -> Rows:
    """Rows with something wrong in some of them."""
    rows = json.loads(json.dumps(rows))
    for _ in range(draw.choice((0, 1, 1, 2)) if rows else 0):
        place = draw.randrange(len(rows))
        row = rows[place]
        if not isinstance(row, dict) or not row:
            continue
        key, value = draw.choice(list(row)), draw.choice(VALUES)
        kind = draw.randrange(7)
        if kind == 0:
            del row[key]
        elif kind == 1:
            row[draw.choice(("extra", "", "text", "é"))] = value
        elif kind == 2:
            rows[place] = value
        elif kind == 3 and isinstance(row[key], list) and row[key]:
            place = draw.randrange(len(row[key]))
            if isinstance(row[key][place], dict):
                row[key][place][draw.choice(("role", "content", "name", "tool_calls"))] = value
        elif kind == 4 and isinstance(row[key], list):
            text = json.dumps(row[key])
            row[key] = draw.choice([text, text[:-2], row[key] * 40, [row[key]], [None, *row[key]]])
        elif kind == 5:
            row[key] = f"{row[key]}\ue0000\ue001"
        else:
            row[key] = value
    return rows


def table(rows: Rows) -> pa.Table:
    """Rows as an Arrow table; what has no column is left out."""
    return pa.Table.from_pylist([row for row in rows if isinstance(row, dict)])


def separated(rows: Rows, delimiter: str) -> bytes:
    """Rows as separated values under a line of names."""
    file = io.StringIO()
    listed = [row for row in rows if isinstance(row, dict)]
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(listed[0] if listed else [])
    for row in listed:
        writer.writerow(row.values())
    return file.getvalue().encode("utf-8", "surrogatepass")


def as_lines(rows: Rows) -> bytes:
    """Rows as lines of JSON."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows: Rows) -> bytes:
    """Rows as a Parquet file."""
    file = io.BytesIO()
    parquet.write_table(table(rows), file)
    return file.getvalue()


def as_text(rows: Rows) -> bytes:
    """Rows' values, a line each."""
    return "\n".join(str(row) for row in rows).encode("utf-8", "surrogatepass")


def as_array(rows: Rows) -> bytes:
    """Rows as one value of JSON, over many lines."""
    return json.dumps(rows, indent=1).encode()


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "a.jsonl": as_lines, "a.ndjson": as_lines, "a.json": as_array, "b.json": as_lines,
    "a.csv": lambda rows: separated(rows, ","), "a.tsv": lambda rows: separated(rows, "\t"),
    "a.parquet": as_parquet, "a.txt": as_text, "a.jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "a.txt.zst": lambda rows: b"\x28\xb5\x2f\xfd" + as_text(rows), "a.md": as_text, "noending": as_text,
}  # fmt: skip


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """A file's bytes, or what is left of them."""
    place = draw.randrange(len(raw) + 1)
    before, behind, text = raw[:place], raw[place:], raw.decode("utf-8", "replace")
    return draw.choice((
        raw, raw, raw, raw, before, behind, b"", b"\n\n", b"\xef\xbb\xbf" + raw, raw + before, draw.randbytes(500),
        raw.replace(b"\n", b"\r\n"), raw.replace(b"\n", b"\r"), before + b"\x00" * 5 + behind,
        before + b"\xff\xfe" + behind, before + draw.randbytes(9) + behind, before + b'"' + behind,
        before + b"{" * 30_000, before + b"x" * 300_000 + behind, text.encode("utf-16"),
        text.encode("latin-1", "replace"),
    ))  # fmt: skip


def write_data(draw: random.Random, folder: Path, rows: Rows) -> str:
    """A file, a folder of files, or a saved dataset; its name."""
    kind = draw.randrange(10)
    if kind == 0:
        datasets.Dataset(table(rows), fingerprint="0" * 16).save_to_disk(str(folder / "saved"))
        file = draw.choice(sorted((folder / "saved").iterdir()))
        if draw.random() < 0.5:
            file.write_bytes(damaged(draw, file.read_bytes()))
        return "saved"
    if kind == 1:
        (folder / "many").mkdir()
        for name in draw.sample(list(FORMATS), 3):
            (folder / "many" / name).write_bytes(damaged(draw, FORMATS[name](rows)))
        return "many"
    name = draw.choice(list(FORMATS))
    (folder / name).write_bytes(damaged(draw, FORMATS[name](rows)))
    return name


def write_images(draw: random.Random, folder: Path) -> str:
    """A folder of images, one of them broken."""
    for label in range(draw.choice((1, 2, 3, 4))):
        place = folder / "pics" / f"class {label}"
        place.mkdir(parents=True)
        for i in range(draw.choice((0, 1, 4))):
            file = io.BytesIO()
            mode = draw.choice(("RGB", "L", "RGBA", "P", "CMYK", "1", "I;16", "F", "LA"))
            form = draw.choice(("PNG", "JPEG", "TIFF"))
            image = Image.new(mode, draw.choice(((8, 8), (1, 1), (30, 2))))
            try:
                image.save(file, form)
            except (OSError, ValueError, KeyError):
                image.convert("RGB").save(file, form)
            raw = file.getvalue()
            if draw.random() < 0.1 and form == "PNG":  # its header claims to be that large
                sides = draw.choice(((60_000, 60_000), (0, 0), (2**31 - 1, 2**31 - 1)))
                raw = raw[:16] + struct.pack(">II", *sides) + raw[24:]
            elif draw.random() < 0.2:
                raw = damaged(draw, raw)
            (place / f"{i}.{draw.choice(('png', 'jpg', 'JPEG', 'txt'))}").write_bytes(raw)
    if draw.random() < 0.2:
        (folder / "pics" / "notes.txt").parent.mkdir(exist_ok=True)
        (folder / "pics" / "notes.txt").write_text("no image")
    return "pics"


def attempt(seed: int, folder: Path) -> str | None:
    """A data set, drawn from a seed and prepared."""
    draw = random.Random(seed)
    task = draw.choice(("causal-lm",) * 5 + ("masked-lm", "sequence-classification", "seq2seq", "image-classification"))
    data: dict[str, Any] = {"eval_fraction": draw.choice((0.0, 0.2, 0.2, 0.99)), "packing": draw.random() < 0.5}
    try:
        if task == "image-classification":
            data["source"] = write_images(draw, folder)
        else:
            data["source"] = write_data(draw, folder, spoilt(draw, rows_of(draw, task)))
    except (pa.ArrowException, UnicodeError, OverflowError):  # what the format cannot hold
        return None
    if draw.random() < 0.3:
        (folder / "template.jinja").write_text(draw.choice(TEMPLATES))
        data["chat_template"] = "template.jinja"
    if draw.random() < 0.1:
        field = draw.choice(("text", "label", "target", "messages", "prompt", "completion"))
        data[field] = draw.choice(("text", "label", "none such", ""))
    if draw.random() < 0.1:
        data["eval_source"] = data["source"]
    recipe = Recipe.from_dict({
        "task": task, "data": data, "vocab_size": VOCAB, "num_labels": 3, "seq_len": draw.choice((4, 16, 64)),
        "batch_size": 2, "cache_dir": str(folder / "cache"),
    })  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return samples_fault(prepare(recipe, FACTS), recipe)
        except DataError as error:
            text = str(error)
            named = any(word in text for word in ("data", "tokenizer", "seq_len", "num_labels"))
            if len(text) > LONGEST or not named:
                raise
            return None if "\n" not in text else f"several lines: {text}"


def samples_fault(prepared: Prepared, recipe: Recipe) -> str | None:
    """Fault in samples: an id that the model has not, or no label to learn."""
    task = get_task(recipe.task)
    high = FACTS.num_labels if task.predicts == "class" else VOCAB
    for samples in (prepared.train, prepared.evaluation):
        for index in range(min(len(samples) if samples is not None else 0, 50)):
            assert samples is not None
            batch = samples.batch(np.array([index]), 0)[0]
            ids = batch.inputs.get("input_ids", np.zeros(1, np.int64))
            labels = batch.labels[batch.labels != IGNORE]
            if ids.size and (ids.min() < 0 or ids.max() >= VOCAB):
                return f"ids from {ids.min()} to {ids.max()} of a vocabulary of {VOCAB}"
            if labels.size and (labels.min() < 0 or labels.max() >= high):
                return f"labels from {labels.min()} to {labels.max()}, of {high}"
            if not np.isfinite(batch.inputs.get("pixel_values", np.zeros(1))).all():
                return "a pixel that is not finite"
    return "no sample" if not len(prepared.train) else None


KIND = Kind(attempt, quick=80, chunk=40, shared=("tightfit.data.chat", "transformers", "jinja2", "tokenizers"))
