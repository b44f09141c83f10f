"""Conversations, and prompts with completions: what is learned of them, packed and padded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from transformers import AutoTokenizer

from tests.data.helpers import FACTS, recipe, texts, write_jsonl
from tightfit.commands.export import run_export
from tightfit.data import GlobalBatchLoader, Prepared, prepare
from tightfit.data.chat import question
from tightfit.data.samples import Packed
from tightfit.data.tokenizing import END, bare_tokenizer, name_end, train_bpe
from tightfit.errors import DataError
from tightfit.recipe import Recipe
from tightfit.tasks import IGNORE, MicroBatch
from tightfit.training.trainer import Trainer

CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TURN = "{{ message['content'] | trim }}<|im_end|>"
MARKED = CHATML.replace(TURN, "{% if message['role'] == 'assistant' %}{% generation %}" + TURN
                        + "{% endgeneration %}{% else %}" + TURN + "{% endif %}")


def say(*turns: str) -> dict[str, Any]:
    """A conversation in which the assistant has every second turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


CHATS = [say("who are you", " a fox "), say("tea?", "tea serves", "the dog", "café — 1234"), say("no answer")]
ANSWERS = [["a fox<|im_end|>"], ["tea serves<|im_end|>", "café — 1234<|im_end|>"], []]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that has the ends of ChatML's turns as special tokens, and no template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bare_tokenizer(train_bpe(texts(60), 360, [END, "<|im_start|>", "<|im_end|>"]), "train").save(folder)
    return folder


def prepared(tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], template: str | None = CHATML,
             **data: Any) -> tuple[Prepared, Recipe]:
    if template is not None:
        (tmp_path / "template.jinja").write_text(template)
        data["chat_template"] = str(tmp_path / "template.jinja")
    source = str(write_jsonl(tmp_path / "chat.jsonl", rows))
    settings = recipe(tmp_path, tokenizer=str(tokenizer), seq_len=4 if data.get("packing", True) else 200, batch_size=2,
                      data={"source": source, "eval_fraction": 0.0, **data})  # fmt: skip
    return prepare(settings, replace(FACTS, max_positions=None)), settings


def learned_texts(prepared: Prepared, tokenizer: Path) -> list[str]:
    """The runs of labels that count, as text, in order."""
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    train = prepared.train
    rows = [train.batch(np.array([i]), 0).labels[0] for i in range(len(train))]
    if isinstance(train, Packed):  # the last row begins in what the one before it has counted
        rows[-1] = rows[-1][len(train) * train.seq_len - len(train.stream) :]
    labels = np.concatenate(rows)
    runs: list[list[int]] = [[]]
    for label in labels.tolist():
        if label == IGNORE:
            runs.append([])
        else:
            runs[-1].append(label)
    return [decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["found", "marked"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_assistants_turns_alone_are_learned_with_their_ends(tmp_path, tokenizer, packing, template):
    found, _ = prepared(tmp_path, tokenizer, CHATS, template, packing=packing)
    assert learned_texts(found, tokenizer) == [answer for answers in ANSWERS for answer in answers]
    assert found.unigram_loss is None


def test_every_token_of_a_conversation_is_shown(tmp_path, tokenizer):
    found, _ = prepared(tmp_path, tokenizer, CHATS, packing=False)
    assert found.tokenizer is not None
    backend = found.tokenizer.backend
    shown = [found.train.batch(np.array([i]), 0).inputs["input_ids"][0].tolist() for i in range(3)]
    assert shown == [backend.apply_chat_template(chat["messages"], return_dict=False) for chat in CHATS]


def test_documents_of_which_nothing_is_learned_are_counted(tmp_path, tokenizer):
    long = say("who are you " * 60, "a fox")
    rows = [*CHATS, long]
    assert prepared(tmp_path, tokenizer, rows, packing=False)[0].unlearned == 2  # one has no answer
    assert prepared(tmp_path, tokenizer, rows)[0].unlearned == 1


def test_the_template_is_saved_with_the_tokenizer(tmp_path, tokenizer):
    found, _ = prepared(tmp_path, tokenizer, CHATS)
    assert found.tokenizer is not None
    found.tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == CHATML


def test_a_tokenizer_is_trained_on_what_is_said(tmp_path):
    found, _ = prepared(tmp_path, Path("train"), CHATS * 3)
    assert found.tokenizer is not None
    assert found.tokenizer.decode(found.tokenizer.encode_batch(["a fox serves tea"])[0]) == "a fox serves tea"


@pytest.mark.parametrize("packing", [True, False])
def test_a_completion_is_learned_and_its_prompt_is_not(tmp_path, tokenizer, packing):
    rows = [{"prompt": "the quick brown", "completion": " fox jumps"}, {"prompt": "tea", "completion": "serves"}]
    found, _ = prepared(tmp_path, tokenizer, rows, None, packing=packing)
    assert learned_texts(found, tokenizer) == [" fox jumps" + END, "serves" + END]


def as_trl(tokenizer: Any, row: dict[str, Any], template: str) -> tuple[list[int], list[int]]:
    """Tokens and labels of a row, as trl 1.16 makes them in SFTTrainer (`tokenize_fn`, `build_labels`)."""
    options = {"chat_template": template, "tools": row.get("tools"), "return_dict": False}
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, **options)
    ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"], **options)
    shared = 0
    while shared < min(len(prompt), len(ids)) and prompt[shared] == ids[shared]:
        shared += 1
    return ids, [IGNORE] * shared + ids[shared:]


@pytest.mark.parametrize("template", [
    CHATML, MARKED, CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>"),
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}",
], ids=["chatml", "marked", "another beginning alone", "tokens over the edge"])  # fmt: skip
def test_prompts_and_completions_that_are_messages_are_learned_as_trl_does(tmp_path, tokenizer, template):
    turns = say("who are you", "a fox", "tea?", " tea serves ")["messages"]
    rows = [{"prompt": turns[:1], "completion": turns[1:2]}, {"prompt": turns[:3], "completion": turns[3:]},
            {"prompt": [{"role": "system", "content": "the dog"}, turns[0]], "completion": turns[1:]}]
    backend = AutoTokenizer.from_pretrained(tokenizer)
    found, _ = prepared(tmp_path, tokenizer, rows, template, packing=False)
    for number, row in enumerate(rows):
        ids, labels = as_trl(backend, row, template)
        batch = found.train.batch(np.array([number]), 0)
        assert batch.inputs["input_ids"][0].tolist() == ids
        assert batch.labels[0].tolist() == [*labels[1:], IGNORE]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    saved, _ = prepared(tmp_path, tokenizer, rows, template, source=str(tmp_path / "saved"))
    assert len(saved.train.stream.tokens) == sum(len(as_trl(backend, row, template)[0]) for row in rows)


def test_tools_and_calls_stand_beside_prompts_that_are_messages(tmp_path, tokenizer):
    rows = [{"q": CALLED[:1], "a": CALLED[1:], "tools": [TOOL]}]
    found, _ = prepared(tmp_path, tokenizer, rows, CALLING, prompt="q", completion="a", packing=False)
    ids, labels = as_trl(AutoTokenizer.from_pretrained(tokenizer),
                         {"prompt": CALLED[:1], "completion": [{**CALL, "content": ""}, *CALLED[2:]], "tools": [TOOL]},
                         CALLING)  # fmt: skip
    batch = found.train.batch(np.array([0]), 0)
    assert (batch.inputs["input_ids"][0].tolist(), batch.labels[0].tolist()) == (ids, [*labels[1:], IGNORE])
    with pytest.raises(DataError, match=r"does not write the tool_calls in .*row 1"):
        prepared(tmp_path, tokenizer, [{"prompt": CALLED[:1], "completion": CALLED[1:]}])


def test_contents_in_parts_are_read_as_their_texts(tmp_path, tokenizer):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "fox"}]
    found, _ = prepared(tmp_path, tokenizer, row_of([*say("who")["messages"], {"role": "assistant", "content": parts}]))
    assert learned_texts(found, tokenizer) == [*ANSWERS[0], "a fox<|im_end|>"]


def test_an_instruction_and_its_input_are_asked_and_its_output_is_learned(tmp_path, tokenizer):
    rows = [{"instruction": "who are you", "input": "", "output": "a fox"},
            {"instruction": "name it", "input": "the dog", "output": "tea"}, {"instruction": "so", "output": "fox"}]
    found, _ = prepared(tmp_path, tokenizer, rows)
    assert learned_texts(found, tokenizer) == ["a fox<|im_end|>", "tea<|im_end|>", "fox<|im_end|>"]
    shown = AutoTokenizer.from_pretrained(tokenizer).decode(found.train.stream.tokens)
    assert "user\nwho are you<|im_end|>" in shown
    assert "user\nname it\n\nthe dog<|im_end|>" in shown
    assert found.turn_end is not None


CONTENT = "{{ message['content']"
THINKS = CHATML.replace(CONTENT, "{{ '<think></think>' if message.role == 'assistant' and loop.last }}" + CONTENT)
OPEN = CHATML.replace("<|im_end|>", "")


@pytest.mark.parametrize(("template", "learned", "end"), [
    (CHATML.replace("<|im_end|>", "{{ '<|endoftext|>' if loop.last and not loop.index % 2 else '<|im_end|>' }}"),
     ["tea<|im_end|>", "so<|endoftext|>"], END),
    (THINKS, ["tea<|im_end|>", "<think></think>so<|im_end|>"], "<|im_end|>"),
    (THINKS.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), ["tea<|im_end|>", "</think>so<|im_end|>"],
     "<|im_end|>"),
    (OPEN.replace("\n{% endfor", "{% endfor"), ["tea<|im_start|>", "so<|im_start|>"], "<|im_start|>"),
    (OPEN.replace("<|im_start|>", "Role "), ["tea\n", "so\n"], None),
], ids=["ends the last otherwise", "thinks in the last", "prompts to think", "ends by the next", "ends by nothing"])
def test_a_turn_is_learned_from_its_prompt_to_its_end(tmp_path, tokenizer, template, learned, end):
    chat = say("who", "tea", "why", "so")
    found, _ = prepared(tmp_path, tokenizer, [chat], template, packing=False)
    backend = AutoTokenizer.from_pretrained(tokenizer)
    assert learned_texts(found, tokenizer) == learned
    assert found.turn_end == (None if end is None else backend.convert_tokens_to_ids(end))
    assert any("data.chat_template=<one with {{ eos_token }}" in note for note in found.notes) == (end is None)
    called = [chat["messages"][0], CALL, {"role": "tool", "content": "served"}, chat["messages"][3]]
    calling = template.replace(CONTENT, "{% for call in message.tool_calls or [] %}served{% endfor %}" + CONTENT)
    found, _ = prepared(tmp_path, tokenizer, [{"messages": called}], calling, packing=False)
    assert learned_texts(found, tokenizer) == [learned[0].replace("tea", "served"), learned[1]]  # as beside no call


SPACED = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ '\\n' + m['content'] }}:{% else %}{{ m['content'] }}"
          "{% endif %}{% endfor %}")
SPACED_MARKED = SPACED.replace("else %}", "else %}{% generation %}  ").replace(
    "{% endif", "  {% endgeneration %}{% endif")


@pytest.mark.parametrize(("row", "template", "learned"), [
    ({"prompt": "tea  ", "completion": "    fox   dog  "}, None, ["    fox   dog  " + END]),
    (say("tea", "   fox  ", "dog", "fox"), SPACED, ["   fox  ", "fox"]),
    (say("tea", "   fox ", "dog", "fox"), SPACED_MARKED, ["     fox   ", "  fox  "]),
], ids=["completion", "found", "marked"])
def test_spaces_are_learned_that_a_tokenizer_leaves_out_of_its_tokens_places(tmp_path, row, template, learned):
    backend = train_bpe(["   fox   dog  tea:"] * 9, 290, [END])
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-NeoX has it
    bare_tokenizer(backend, "train").save(tmp_path / "tokenizer")
    found, _ = prepared(tmp_path, tmp_path / "tokenizer", [row], template, packing=False)
    assert learned_texts(found, tmp_path / "tokenizer") == learned


def test_fields_of_other_names(tmp_path, tokenizer):
    rows = [{"text": "the dog", "q": "the quick brown", "a": " fox"}]
    found, _ = prepared(tmp_path, tokenizer, rows, None, prompt="q", completion="a")
    assert learned_texts(found, tokenizer) == [" fox" + END]
    rows = [{"text": "the dog", "said": CHATS[0]["messages"]}]
    found, _ = prepared(tmp_path, tokenizer, rows, messages="said")
    assert learned_texts(found, tokenizer) == ["a fox<|im_end|>"]
    found, _ = prepared(tmp_path, tokenizer, [{"text": "the dog jumps over", **CHATS[0]}], None)
    assert learned_texts(found, tokenizer)[0].endswith("dog jumps over" + END)


def test_a_global_batch_counts_what_is_learned(tmp_path, tokenizer):
    found, settings = prepared(tmp_path, tokenizer, CHATS, packing=False)
    batches = [GlobalBatchLoader(found.train, settings).global_batch(i) for i in range(2)]
    counts = [sum(int((m.labels != IGNORE).sum()) for m in batch.micro_batches) for batch in batches]
    assert [batch.count for batch in batches] == counts
    backend = AutoTokenizer.from_pretrained(tokenizer)
    assert sum(counts) == sum(len(backend(answer).input_ids) for answers in ANSWERS for answer in answers)


ASKED_FOR = [{"role": "user", "content": "why"}]
ASKED = {"instruction": "why", "input": "", "output": "so"}


def row_of(turns: Any) -> list[dict[str, Any]]:
    return [CHATS[0], {"messages": turns}]


@pytest.mark.parametrize(("rows", "template", "words"), [
    (CHATS, None, r"data.messages: the tokenizer .tokenizer=.* has no chat template .*data.chat_template=<a file"),
    (row_of([]), CHATML, r"chat.jsonl row 2 holds \[\], and no list of messages; write \[\{"),
    (row_of([{"role": "user", "content": None}]), CHATML, r"the content of message 1 of .*row 2 is None, not text"),
    (row_of([{"content": "a"}]), CHATML, "message 1 of .*row 2 is .*, without a role"),
    (row_of("hello"), CHATML, "row 2 holds text that is no JSON list"),
    (row_of(None), CHATML, "row 2 holds None, and no list of messages"),
    (CHATS, "{% if m %}\n{{ m.content }", "the chat template is no Jinja, line 2: unexpected '}'; mend it"),
    (CHATS, "{{ raise_exception('only one turn') }}", "the chat template refuses .*only one turn"),
    (CHATS, "{{ messages | map(attribute='content') | join | length }}" + CHATML,
     "an assistant's turn of .*row 1 cannot be found.*generation"),
    ([say("only a question")], CHATML, "no assistant's turn"),
    (row_of([{"role": "bot", "content": "so"}])[1:], CHATML, "no assistant's turn .*, and the roles are 'bot'; write"),
    ([ASKED, {**ASKED, "input": 5}], CHATML, r"the content of message 1 of .*row 2 is \['why', 5\], not text"),
    ([ASKED, {"instruction": "why"}], CHATML, "line 2 has no field 'output'.*; write it in every row"),
    ([{**CHATS[0], "tools": "weather"}], CHATML, "tools: .*row 1 holds text that is no JSON list"),
    ([{**CHATS[0], "tools": ["weather"]}], CHATML, "tools: .*row 1 holds .'weather'., and no list of JSON schemas"),
    ([{**CHATS[0], "tools": [{"name": "sun"}]}], CHATML, "row 1 has tools, which the chat template does not write"),
    (row_of([{"role": "user", "content": [{"type": "image", "url": "a"}]}]), CHATML,
     r"message 1 of .*row 2 has a part of type 'image', .*texts alone are read; write \{"),
    ([{"prompt": ASKED_FOR, "completion": "so"}], CHATML, "the completion of .*row 1 holds 'so', and no list of mes"),
    ([{"prompt": ASKED_FOR, "completion": [{}]}], CHATML, "message 1 of the completion of .*row 1 is {}, without a"),
    ([{"q": "why", "a": "so"}], CHATML, "it has q, a; write data.text=.*data.messages=.*data.completion="),
])  # fmt: skip
def test_what_cannot_be_learned_is_named(tmp_path, tokenizer, rows, template, words):
    with pytest.raises(DataError, match=words):
        prepared(tmp_path, tokenizer, rows, template)


def test_what_an_assistant_says_beside_its_content_is_learned_or_refused(tmp_path, tokenizer):
    turns = say("tea?", "tea", "why", "so")["messages"]
    rows = [{"messages": [turns[0], {**turns[1], "reasoning": "the fox", "weight": 1}, *turns[2:]]}]
    found, _ = prepared(tmp_path, tokenizer, rows, packing=False)  # which the template does not write
    assert learned_texts(found, tokenizer) == ["tea<|im_end|>", "so<|im_end|>"]
    thinking = [each.replace("{{ message['content']", "{{ message['reasoning'] }}{{ message['content']")
                for each in (CHATML, MARKED)]
    for template in thinking:
        found, _ = prepared(tmp_path, tokenizer, rows, template, packing=False)
        assert learned_texts(found, tokenizer) == ["the foxtea<|im_end|>", "so<|im_end|>"]
    in_the_last = thinking[0].replace("{{ message['reasoning']", "{{ message['reasoning'] if loop.last")
    twice = [{"messages": rows[0]["messages"][:2] * 2}]
    found, _ = prepared(tmp_path, tokenizer, twice, in_the_last, packing=False)
    assert learned_texts(found, tokenizer) == ["tea<|im_end|>", "the foxtea<|im_end|>"]
    found, _ = prepared(tmp_path, tokenizer, twice, "{{ messages | length }}" + in_the_last, packing=False)
    assert learned_texts(found, tokenizer) == ["tea<|im_end|>", "the foxtea<|im_end|>"]
    found, _ = prepared(tmp_path, tokenizer, rows, CHATML.replace("| trim", "| upper"), packing=False)
    assert learned_texts(found, tokenizer) == ["TEA<|im_end|>", "SO<|im_end|>"]


CALLING = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% for call in message.tool_calls or [] %}
call {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {"type": "function", "function": {"name": "serve", "parameters": {"properties": {"what": {"type": "string"}}}}}
CALL = {"role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "serve", "arguments": {"what": "tea"}}}]}
CALLED = [{"role": "user", "content": "tea?"}, CALL, {"role": "tool", "content": "served"},
          {"role": "assistant", "content": "a fox serves tea"}]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_calls_of_functions_are_learned_and_the_functions_shown(tmp_path, tokenizer, kind):
    rows = [{"messages": CALLED, "tools": [TOOL]}, {"messages": CALLED, "tools": json.dumps([TOOL])}]
    if kind == "jsonl":
        rows.append({"messages": CALLED})
    else:
        other = {"type": "function", "function": {"name": "ask", "parameters": {"properties": {"whom": {"type": "x"}}}}}
        asking = json.loads(json.dumps(CALLED).replace('"what"', '"whom"'))  # a table gives each call both names
        rows = [rows[0], {"messages": asking, "tools": [other]}, {"messages": CALLED, "tools": None}]
        table = Dataset.from_list(rows)  # which gives each function the names of all
        table.save_to_disk(tmp_path / "saved") if kind == "dataset" else table.to_parquet(tmp_path / "chat.parquet")
    place = {"jsonl": "chat.jsonl", "parquet": "chat.parquet", "dataset": "saved"}[kind]
    found, _ = prepared(tmp_path, tokenizer, rows, CALLING, source=str(tmp_path / place))
    said = ['call serve({"what": "tea"})<|im_end|>', "a fox serves tea<|im_end|>"]
    second = [said[0].replace("what", "whom"), said[1]] if kind != "jsonl" else said
    assert learned_texts(found, tokenizer) == [*said, *second, *said]
    shown = AutoTokenizer.from_pretrained(tokenizer).decode(found.train.stream.tokens)
    assert shown.count(json.dumps([TOOL])) == (2 if kind == "jsonl" else 1)
    assert shown.count("<|im_start|>system") == 2


def test_what_a_template_leaves_out_of_calls_is_refused(tmp_path, tokenizer):
    for template in (CHATML, MARKED):
        with pytest.raises(DataError, match=r"does not write the tool_calls in .*row 1"):
            prepared(tmp_path, tokenizer, [{"messages": CALLED}], template)
    apart = CALLING.replace(CONTENT + " }}", CONTENT + " if not message.tool_calls or loop.last }}"
                            "{{ loop.previtem.content if message.role == 'tool' }}")
    turns = [CALLED[0], {**CALL, "content": "so"}, *CALLED[2:]]
    with pytest.raises(DataError, match=r"an assistant's turn of .*row 1 cannot be found"):
        prepared(tmp_path, tokenizer, [{"messages": turns}], apart)  # whose content stands behind the call's result
    plain = [{**message, "tool_calls": []} for message in CHATS[0]["messages"]]
    found, _ = prepared(tmp_path, tokenizer, [{"messages": plain}], CALLING)
    assert learned_texts(found, tokenizer) == [" a fox <|im_end|>"]
    as_text = json.loads(json.dumps(CALLED).replace('{"what": "tea"}', json.dumps('{"what": "tea"}')))
    found, _ = prepared(tmp_path, tokenizer, [{"messages": as_text}], CALLING)
    assert learned_texts(found, tokenizer)[0] == 'call serve({"what": "tea"})<|im_end|>'


@pytest.mark.parametrize("template", [
    CALLING.replace("{{ message['content'] }}", "{{ '<think></think>' if loop.last and message.role == 'assistant' }}"
                    "{{ message['content'] }}"),
    CALLING.replace("{% for message in messages %}", "{% for message in messages %}"
                    "{% if message.role == 'assistant' and loop.index0 % 2 == 0 or "
                    "message.role == 'tool' and not loop.previtem.tool_calls %}"
                    "{{ raise_exception('roles must alternate') }}{% endif %}", 1),
    CALLING.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"),
], ids=["writes more of the last", "wants calls before results", "wants arguments as text"])
def test_calls_are_learned_of_templates_that_see_the_conversation(tmp_path, tokenizer, template):
    found, _ = prepared(tmp_path, tokenizer, [{"messages": CALLED}], template)
    call, answer = learned_texts(found, tokenizer)
    assert call == 'call serve({"what": "tea"})<|im_end|>'
    assert answer.endswith("a fox serves tea<|im_end|>")


def test_a_last_turn_may_end_in_more_than_the_others(tmp_path, tokenizer):
    template = CHATML.replace("<|im_end|>", "<|im_end|>{{ '</s>' if loop.last and message.role == 'assistant' }}", 1)
    found, _ = prepared(tmp_path, tokenizer, [say("who", "a fox", "tea?", "tea")], template)
    first, last = learned_texts(found, tokenizer)
    assert (first, last.startswith("tea<|im_end|>")) == ("a fox<|im_end|>", True)
    assert AutoTokenizer.from_pretrained(tokenizer).decode([found.turn_end]) == "<|im_end|>"


@pytest.mark.parametrize(("turns", "words"), [
    ([{"from": "human", "value": "a"}, {"from": "gptt", "value": "b"}],
     r"message 2 of .* is from 'gptt'; did you mean"),
    ("[" * 100_000, "holds text that is no JSON list"),
    ([{"role": "user\ud800", "content": "a"}], "message 1 of .*half of a character"),
    ([{**CALL, "tool_calls": "x"}], "tool_calls of message 1 of .*no list of mappings"),
])  # fmt: skip
def test_conversations_that_are_none_are_named(tmp_path, tokenizer, turns, words):
    with pytest.raises(DataError, match=words):
        prepared(tmp_path, tokenizer, [{"messages": turns}])


def test_sharegpts_conversations_are_messages(tmp_path, tokenizer):
    rows = [{"conversations": [{"from": "system", "value": "the dog"}, {"from": "human", "value": "tea?"},
                               {"from": "gpt", "value": "a fox"}]}]
    found, _ = prepared(tmp_path, tokenizer, rows)
    assert learned_texts(found, tokenizer) == ["a fox<|im_end|>"]
    shown = AutoTokenizer.from_pretrained(tokenizer).decode(found.train.stream.tokens)
    assert "<|im_start|>system\nthe dog<|im_end|>\n<|im_start|>user\ntea?<|im_end|>" in shown


@pytest.mark.parametrize("turns", ["hello", '{"role": 3}', None, 7, [None, {"content": 3}]])
def test_a_tokenizer_trained_on_damaged_messages_leaves_the_saying_to_the_reader(tmp_path, turns):
    with pytest.raises(DataError, match=r"^data.messages: (message 1 of )?\S+chat.jsonl row 2 .*; write "):
        prepared(tmp_path, Path("train"), row_of(turns))


STRICT = ("{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message first, please') }}{% endif %}"
          + CHATML)


@pytest.mark.parametrize("template", [STRICT, STRICT.replace(CHATML, MARKED)], ids=["found", "marked"])
def test_a_turns_end_is_that_of_the_conversations_themselves(tmp_path, tokenizer, template):
    rows = [{"messages": [{"role": "system", "content": "be brief"}, *chat["messages"]]} for chat in CHATS[:2]]
    rows.append({"messages": [*rows[0]["messages"], {"role": "user", "content": "tea?"}]})  # ends with no answer
    found, _ = prepared(tmp_path, tokenizer, rows, template, packing=False)
    assert learned_texts(found, tokenizer) == [*ANSWERS[0], *ANSWERS[1], *ANSWERS[0]]
    assert found.turn_end == AutoTokenizer.from_pretrained(tokenizer).convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("named", "chats", "then"), [
    (7, True, [7, 5]), (5, True, 5), ([7, 8], True, [7, 8, 5]), ([7, 5], True, [7, 5]), (None, True, [3, 5]),
    (7, False, 7), ([7], False, [7]), (None, False, 3),
])
def test_the_end_of_a_turn_is_added_to_what_a_model_names(tmp_path, named, chats, then):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": named, "pad_token_id": 1}))
    for _ in range(2):
        name_end(tmp_path, 3, 5 if chats else None)
        for name in ("config.json", "generation_config.json"):
            assert json.loads((tmp_path / name).read_text()) == {"eos_token_id": then, "pad_token_id": 1}


def test_plain_text_ends_no_turns(tmp_path, tokenizer):
    rows = [{"text": "the dog jumps over the fox"}]
    assert prepared(tmp_path, tokenizer, rows, packing=False)[0].turn_end is None


def test_a_messages_field_may_hold_json(tmp_path, tokenizer):
    found, _ = prepared(tmp_path, tokenizer, [{"messages": json.dumps(CHATS[0]["messages"])}])
    assert learned_texts(found, tokenizer) == ANSWERS[0]


def test_blank_training_texts_are_no_text_whatever_is_held_out(tmp_path, tokenizer):
    held = str(write_jsonl(tmp_path / "held.jsonl", [{"text": "the dog"}]))
    with pytest.raises(DataError, match=r"chat.jsonl holds no text"):
        prepared(tmp_path, tokenizer, [{"text": " "}], None, eval_source=held)


def test_other_documents_are_held_out_by_name(tmp_path, tokenizer):
    held = str(write_jsonl(tmp_path / "held.jsonl", [CHATS[1], say("bad")["messages"][0] | {"messages": []}]))
    with pytest.raises(DataError, match=r"held.jsonl row 2 holds \[\]"):
        prepared(tmp_path, tokenizer, CHATS, eval_source=held)
    write_jsonl(Path(held), [CHATS[1]])
    found, _ = prepared(tmp_path, tokenizer, CHATS, eval_source=held, packing=False)
    assert found.evaluation is not None
    assert (len(found.train), len(found.evaluation)) == (3, 1)
    batch: MicroBatch = found.evaluation.batch(np.array([0]), 0)
    assert torch.equal(torch.from_numpy(batch.labels), torch.from_numpy(found.train.batch(np.array([1]), 0).labels))


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_learns_the_same_however_its_answers_are_spread(tmp_path, tokenizer, tiny, packing):
    (tmp_path / "template.jinja").write_text(CHATML)
    source = write_jsonl(tmp_path / "chat.jsonl", CHATS[:2] * 4)
    values = {**tiny, "tokenizer": str(tokenizer), "vocab_size": 400, "max_steps": 2, "seq_len": 16 if packing else 100,
              "model_overrides": {**tiny["model_overrides"], "n_positions": 100}, "data": {
        "source": str(source), "packing": packing, "chat_template": str(tmp_path / "template.jinja"),
        "eval_source": str(source)}}
    losses = [Trainer(recipe={**values, "micro_batch_size": size, "output_dir": str(tmp_path / str(size))}).train()
              for size in (1, 3, 8)]
    for other in losses[1:]:
        assert other.losses == pytest.approx(losses[0].losses, abs=1e-5)
        assert other.eval_loss == pytest.approx(losses[0].eval_loss, abs=1e-5)
    saved = AutoTokenizer.from_pretrained(tmp_path / "1" / "model")
    assert saved.apply_chat_template(CHATS[0]["messages"], tokenize=False).endswith("a fox<|im_end|>\n")


def test_a_trained_tokenizer_has_the_templates_markers_and_the_model_ends_its_turns(tmp_path, tiny):
    (tmp_path / "template.jinja").write_text(CHATML)
    source = write_jsonl(tmp_path / "chat.jsonl", CHATS[:2] * 4)
    values = {**tiny, "tokenizer": "train", "vocab_size": 300, "max_steps": 1, "output_dir": str(tmp_path / "run"),
              "data": {"source": str(source), "chat_template": str(tmp_path / "template.jinja"), "eval_fraction": 0}}
    Trainer(recipe=values).train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    end = saved.convert_tokens_to_ids("<|im_end|>")
    assert saved.tokenize("<|im_start|>user")[0] == "<|im_start|>"
    kept = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())["eos_token_id"]
    ends = [saved.convert_tokens_to_ids("<|endoftext|>"), end]
    assert kept == ends
    adapter = {**values, "trainable": "lora", "output_dir": str(tmp_path / "adapter")}
    Trainer(recipe=adapter).train()
    run_export(tmp_path / "adapter", merge=True, output=None)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "adapter" / "merged" / name).read_text())["eos_token_id"] == ends


def test_a_prompt_is_asked_by_the_user_of_a_conversation(tmp_path, tokenizer):
    data, _ = prepared(tmp_path, tokenizer, CHATS)
    asked = data.tokenizer.backend.decode(question(data.tokenizer, "Who?"))
    assert asked == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
