"""Conversations in rows of data: messages by role, ShareGPT's and Alpaca's forms of them, and the functions that an
assistant may call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tightfit.data.readers import COMPLETION, INPUT, MESSAGES, OUTPUT, TOOLS, Row, Wanted
from tightfit.errors import DataError, cut, nearest, one_line, shown

ASSISTANT = "assistant"
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, ASSISTANT: ASSISTANT,
                  "system": "system", "tool": "tool", "observation": "tool"}
"""Roles by ShareGPT's names for them."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call, as JSON schemas. origin: the row, for messages.
    prompt_messages: how many messages are a prompt, where all behind them is learned; 0 where the assistant's turns
    are."""

    messages: list[Message]
    tools: list[Any] | None
    origin: str
    prompt_messages: int = 0


def texts_of(wanted: Wanted, row: Row) -> Iterator[str]:
    """The texts in a row's messages, whatever else they hold: what is wrong with them is said where they are read."""
    with suppress(DataError):
        yield from (message["content"] or "" for message in read_conversation(wanted, row, "a row").messages)


def roles_in(wanted: Wanted, rows: Iterable[Row]) -> str:
    """The roles in conversations, as a list to read."""
    found = {message["role"] for row in rows for message in read_conversation(wanted, row, "a row").messages}
    return cut(", ".join(map(repr, sorted(found))), 300)


def read_conversation(wanted: Wanted, row: Row, origin: str) -> Conversation:
    """A row's messages and functions, those of its prompt and completion, or of its instruction, input and output,
    checked: mappings with a role and a text. Raises DataError."""
    values = dict(zip(wanted, row, strict=True))
    found = values[MESSAGES]
    if OUTPUT in values:
        parts = [part for part in (found, values[INPUT]) if part not in ("", None)]  # most have no input
        whole = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else parts
        found = [{"role": "user", "content": whole}, {"role": ASSISTANT, "content": values[OUTPUT]}]
        return Conversation(_messages(found, origin), None, origin)
    tools = _tools(values[TOOLS], origin)
    if COMPLETION in values:
        asked, said = (_messages(values[key], f"the {key.removeprefix('data.')} of {origin}")
                       for key in (MESSAGES, COMPLETION))
        return Conversation(asked + said, tools, origin, len(asked))
    return Conversation(_messages(_read(found, MESSAGES, origin), origin), tools, origin)


def arguments_as_text(conversation: Conversation) -> Conversation:
    """The conversation with the arguments of calls as JSON text, as few templates want them."""
    as_text = partial(_with_arguments, kind=Mapping, convert=partial(json.dumps, ensure_ascii=False))
    return replace(conversation, messages=[
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]} if "tool_calls" in message
        else message for message in conversation.messages])  # fmt: skip


def _read(value: Any, field: str, origin: str) -> Any:
    """A list, or what JSON in a text holds."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            meant = "; write the text's field as data.text" if field == MESSAGES else ""
            raise DataError(f"{field}: {origin} holds text that is no JSON list{meant}") from None
    return value


def _tools(value: Any, origin: str) -> list[Any] | None:
    """JSON schemas; None where there are none."""
    found = _read(value or None, TOOLS, origin)
    if found is None or (isinstance(found, list) and all(isinstance(tool, Mapping) for tool in found)):
        _writable(found, f"{TOOLS}: {origin}")
        return found or None
    raise DataError(f"{TOOLS}: {origin} holds {shown(found)}, and no list of JSON schemas of functions; write them so, "
                    "or leave the field out of the data")


def _writable(value: Any, what: str) -> None:
    """Raises DataError unless a value can be written in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} holds half of a character; mend that text") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} cannot be written as JSON: {one_line(error)}; mend it") from None


def _messages(value: Any, origin: str) -> list[Message]:
    """A conversation's messages, checked."""
    usual = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(value, list) or not value:
        raise DataError(f"data.messages: {origin} holds {shown(value)}, and no list of messages; {usual}")
    return [_message(message, f"message {number} of {origin}", usual) for number, message in enumerate(value, 1)]


def _message(value: Any, origin: str, usual: str) -> Message:
    message = {name: item for name, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    if "role" not in message and isinstance(said := message.get("from"), str):  # as ShareGPT has it
        if said not in SHAREGPT_ROLES:
            raise DataError(f"data.messages: {origin} is from {shown(said)}; {nearest(said, SHAREGPT_ROLES)}")
        message = {"role": SHAREGPT_ROLES[said], "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise DataError(f"data.messages: {origin} is {shown(value)}, without a role; {usual}")
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError(f"data.messages: tool_calls of {origin} are {shown(calls)}, and no list of mappings; write "
                            '[{"type": "function", "function": {"name": "...", "arguments": {}}}]')
        message["tool_calls"] = [_with_arguments(call, kind=str, convert=_as_mapping) for call in calls]
        message.setdefault("content", None)  # beside which most say nothing
    if isinstance(parts := message.get("content"), list) and parts and all(isinstance(p, Mapping) for p in parts):
        message["content"] = _joined(parts, origin)
    if not isinstance(message.get("content"), str) and (not calls or message["content"] is not None):
        raise DataError(f"data.messages: the content of {origin} is {shown(message.get('content'))}, not text; {usual}")
    _writable(message, f"data.messages: {origin}")
    return message


def _joined(parts: list[Mapping[str, Any]], origin: str) -> str:
    """The text of a message in parts, one behind the other as templates write them. Raises DataError for others."""
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"data.messages: the content of {origin} has a part of type {shown(part.get('type'))}, "
                            f"{shown(part)}, and texts alone are read; "
                            'write {"type": "text", "text": "..."}, or leave that row out')
    return "".join(part["text"] for part in parts)


def _with_arguments(call: Mapping[str, Any], kind: type, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A call of a function, its arguments converted where they are of that kind."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), kind):
        return dict(call)
    return {**call, "function": {**function, "arguments": convert(function["arguments"])}}


def _as_mapping(text: str) -> Any:
    """Arguments in JSON text as a mapping, for templates would write the text in quotes; other text as it is."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), Mapping):
            return found
    return text
