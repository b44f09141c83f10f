"""Conversations, and prompts with their completions: which of a document's tokens are learned.

A conversation is rendered by the tokenizer's chat template. Where that marks what the assistant says (its `generation`
blocks) the marks are taken; else a second rendering, with a placeholder for each of the assistant's turns, shows where
they lie: so the template's own text between turns is not learned, but for what ends a turn of the assistant's. A turn
that holds more than its content, such as calls of functions, is what the rendering up to it adds to the one before.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.data.readers import LEARNED, MESSAGES, TEXT, TOOLS, Row, Wanted
from tightfit.data.tokenizer_choice import read_chat_template
from tightfit.data.tokenizing import Tokenizer, load_tokenizer
from tightfit.errors import DataError, one_line, shown
from tightfit.files import digest
from tightfit.recipe import Data
from tightfit.tasks import Array

ASSISTANT = "assistant"
MARKS = re.compile(r"\{%-?\s*generation\b")
"""A template's own marks around what the assistant says."""
HOLDERS = re.compile("\ue000\\d+\ue001")
"""Placeholders of turns, in characters that no text has a meaning for."""

SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT}
"""Roles by ShareGPT's names for them; others are as they are."""

Span = tuple[int, int]
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call, as JSON schemas. origin: the row, for messages."""

    messages: list[Message]
    tools: list[Any] | None
    origin: str


def texts_of(row: Row) -> Iterator[str]:
    """The texts in a row's messages, whatever else they hold: what is wrong with them is said where they are read."""
    with suppress(DataError):
        yield from (message["content"] for message in _conversation(row, "a row").messages)


def with_template(tokenizer: Tokenizer, data: Data, name: str) -> Tokenizer:
    """The tokenizer with a chat template: the recipe's, or its own. Raises DataError where there is none."""
    if not hasattr(tokenizer.backend, "apply_chat_template"):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            tokenizer = load_tokenizer(folder, trust_remote_code=False)
    if (template := read_chat_template(data)) is not None:
        tokenizer.backend.chat_template = template
    if not tokenizer.backend.chat_template:
        raise DataError(f"data.messages: the tokenizer (tokenizer={name}) has no chat template to write messages with; "
                        "write data.chat_template=<a file with a Jinja template>, or tokenizer=<a chat model's>")
    return replace(tokenizer, fingerprint=digest([tokenizer.fingerprint, str(tokenizer.backend.chat_template)]))


def encode(wanted: Wanted, rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]) -> dict[str, list[Array]]:
    """The ids of each row, int64 (tokens,), and which of them are learned, 0 or 1. origins: of the rows, for messages.

    Raises DataError naming the row that cannot be written so.
    """
    documents = _conversations(rows, tokenizer, origins) if MESSAGES in wanted else _completions(rows, tokenizer)
    pairs = [(np.array(ids, dtype=np.int64), np.array(learned, dtype=np.int64)) for ids, learned in documents]
    return {TEXT: [ids for ids, _ in pairs], LEARNED: [learned for _, learned in pairs]}


def _completions(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each prompt and completion as one text with its end token, and which of them are learned."""
    found = tokenizer.located([prompt + completion for prompt, completion in rows], True)
    for (prompt, completion), (ids, offsets) in zip(rows, found, strict=True):
        learned = _inside(offsets, [(len(prompt), len(prompt) + len(completion))])
        if ids[-1:] == [tokenizer.end_id]:
            learned[-1] = 1
            yield ids, learned
        else:
            yield [*ids, tokenizer.end_id], [*learned, 1]


def _conversations(
    rows: Sequence[Row], tokenizer: Tokenizer, origins: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    template = _Template(tokenizer.backend)
    texts, spans = [], []
    for row, origin in zip(rows, origins, strict=True):
        text, inside = template.learned(_conversation(row, origin))
        texts.append(text)
        spans.append(inside)
    for (ids, offsets), inside in zip(tokenizer.located(texts, False), spans, strict=True):
        yield ids, _inside(offsets, inside)


class _Template:
    """A tokenizer's chat template. marked: whether it marks what the assistant says."""

    def __init__(self, backend: Any) -> None:
        self._source = backend.get_chat_template()
        self._special_tokens = backend.special_tokens_map
        self._marked = MARKS.search(self._source) is not None

    def learned(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """A conversation's text, and where the assistant's turns lie in it. Raises DataError where that cannot be
        told."""
        if conversation.tools and TOOLS not in self._source:
            raise DataError(f"data: {conversation.origin} has {TOOLS}, which the chat template does not write; write "
                            "data.chat_template=<one that does>, or leave the field out of the data")
        messages, origin = conversation.messages, conversation.origin
        text, spans = self._written(conversation)
        if self._marked:
            return text, spans
        bare = [{"role": ASSISTANT, "content": m["content"]} if m["role"] == ASSISTANT else m for m in messages]
        if bare != messages and self._written(conversation, bare)[0] != text:
            return text, self._added(conversation, text)
        held, last = _held(messages)
        between = HOLDERS.split(self._written(conversation, held)[0])
        whole = last in (0, len(held))
        ending = _ending(between if whole else HOLDERS.split(self._written(conversation, held[:last])[0]))
        said = [message["content"] for message in messages if message["role"] == ASSISTANT]
        return text, _turns(text, between, said, ending, origin)

    def _added(self, conversation: Conversation, text: str) -> list[Span]:
        """Spans of what each of the assistant's turns adds to the conversation up to it."""
        spans: list[Span] = []
        for place, message in enumerate(conversation.messages):
            if message["role"] == ASSISTANT:
                before, _ = self._written(conversation, conversation.messages[:place], prompt=True)
                until = self._written(conversation, conversation.messages[: place + 1])[0].rstrip()
                if not (text.startswith(until) and until.startswith(before)):
                    raise DataError(f"data.messages: the chat template writes more of an assistant's message in "
                                    f"{conversation.origin} than its content, such as calls of tools or reasoning, and "
                                    "not all of it in every turn, so that it cannot be told from the rest; write "
                                    "data.chat_template=<one with {% generation %} around it>, or all of it as content")
                spans.append((len(before), len(until)))
        return spans

    def _written(
        self, conversation: Conversation, messages: list[Message] | None = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, or of other messages in its place, and where the template's marks lie. prompt:
        with what begins the assistant's turn."""
        from transformers.utils.chat_template_utils import render_jinja_template  # slow as a tokenizer's own library

        try:
            (text,), spans = render_jinja_template(
                [conversation.messages if messages is None else messages], tools=conversation.tools,
                chat_template=self._source, return_assistant_tokens_mask=self._marked, add_generation_prompt=prompt,
                **self._special_tokens,
            )  # fmt: skip
        except Exception as error:  # of Jinja, and of the template's own
            raise DataError(f"data.messages: the chat template refuses {conversation.origin}: {one_line(error)}; "
                            "change that row, or write data.chat_template=<another>") from None
        return text, spans[0] if self._marked else []


def _held(messages: list[Message]) -> tuple[list[Message], int]:
    """A conversation with a placeholder for each of the assistant's turns, and how many messages end with the last."""
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    held = [{**m, "content": f"\ue000{i}\ue001"} if i in turns else m for i, m in enumerate(messages)]
    return held, turns[-1] + 1 if turns else 0


def _ending(between: list[str]) -> str:
    """The end of the assistant's turn. between: the template's text around those of messages that end with one."""
    return between[-1].rstrip()


def turn_end(tokenizer: Tokenizer, rows: Iterable[Row]) -> int | None:
    """The token with which the chat template ends the assistant's turn in the first of the conversations that has one;
    None where it does so by no single one."""
    backend = tokenizer.backend
    for row in rows:
        held, last = _held(_conversation(row, "a row").messages)
        if last:
            shown = backend.apply_chat_template(held[:last], tokenize=False)
            ids = backend(_ending(HOLDERS.split(str(shown))), add_special_tokens=False)["input_ids"]
            return int(ids[0]) if len(ids) == 1 else None
    return None


def _turns(text: str, between: list[str], said: list[str], ending: str, origin: str) -> list[Span]:
    """Spans of the assistant's turns in a rendered conversation. between: the template's text around them. said: the
    turns. ending: what the template ends a turn with."""
    spans: list[Span] = []
    place = len(between[0])
    if len(between) == len(said) + 1 and text.startswith(between[0]):
        for turn, after in zip(said, between[1:], strict=True):
            shown = next((s for s in (turn, turn.strip(), turn.rstrip(), turn.lstrip())
                          if text.startswith(s + after, place)), None)
            if shown is None:
                break
            stop = place + len(shown)
            spans.append((place, stop + len(ending) * after.startswith(ending)))
            place = stop + len(after)
    if len(spans) < len(said) or place != len(text):
        raise DataError(f"data.messages: the chat template changes what the assistant says in {origin}, so that it "
                        "cannot be told from the rest; write data.chat_template=<one with {% generation %} around it>")
    return spans


def _inside(offsets: Iterable[Span], spans: Sequence[Span]) -> list[int]:
    """For each token, by its characters, 1 where any of them lies in a span, else 0."""
    begins, ends = np.array(list(offsets), dtype=np.int64).reshape(-1, 2).T
    begins = np.minimum(begins, ends - 1)  # of spaces alone, some tokenizers say where they end and that they are empty
    found = np.zeros(len(ends), dtype=np.int64)
    for start, stop in spans:
        found |= (ends > np.maximum(begins, start)) & (begins < stop)
    return found.tolist()


def _conversation(row: Row, origin: str) -> Conversation:
    """A row's messages and functions, or those of its instruction, input and output, checked: mappings with a role and
    a text. Raises DataError."""
    match row:
        case (asked, given, said):
            parts = [part for part in (asked, given) if part not in ("", None)]  # most have no input
            whole = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else parts
            found: Any = [{"role": "user", "content": whole}, {"role": ASSISTANT, "content": said}]
            return Conversation(_messages(found, origin), None, origin)
        case (found, tools):
            return Conversation(_messages(_read(found, MESSAGES, origin), origin), _tools(tools, origin), origin)
    raise AssertionError(row)


def _read(value: Any, field: str, origin: str) -> Any:
    """A list, or what JSON in a text holds."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            meant = "; write the text's field as data.text" if field == MESSAGES else ""
            raise DataError(f"{field}: {origin} holds text that is no JSON list{meant}") from None
    return value


def _tools(value: Any, origin: str) -> list[Any] | None:
    """JSON schemas, without the names that a table of many has given to each."""
    found = _read(value or None, TOOLS, origin)
    if found is None or (isinstance(found, list) and all(isinstance(tool, Mapping) for tool in found)):
        return _without_none(found) or None
    raise DataError(f"{TOOLS}: {origin} holds {shown(found)}, and no list of JSON schemas of functions; write them so, "
                    "or leave the field out of the data")


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _messages(value: Any, origin: str) -> list[Message]:
    """A conversation's messages, checked."""
    usual = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(value, list) or not value:
        raise DataError(f"data.messages: {origin} holds {shown(value)}, and no list of messages; {usual}")
    return [_message(message, f"message {number} of {origin}", usual) for number, message in enumerate(value, 1)]


def _message(value: Any, origin: str, usual: str) -> Message:
    if isinstance(value, Mapping) and "role" not in value and isinstance(value.get("from"), str):  # as ShareGPT has it
        value = {"role": SHAREGPT_ROLES.get(value["from"], value["from"]), "content": value.get("value")}
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(f"data.messages: {origin} is {shown(value)}, without a role; {usual}")
    message = {name: item for name, item in value.items() if item is not None}
    if message.get("tool_calls"):  # beside which most say nothing
        message.setdefault("content", "")
    if not isinstance(message.get("content"), str):
        raise DataError(f"data.messages: the content of {origin} is {shown(message.get('content'))}, not text; {usual}")
    try:
        message["content"].encode()
    except UnicodeEncodeError:
        raise DataError(f"data.messages: the content of {origin} holds half of a character; mend that text") from None
    return message
