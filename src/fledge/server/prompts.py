"""From OpenAI's messages, and from text, to token ids; outside the event loop when it takes long.

Chat templates are the tokenizer's or the operator's. A client's own is refused unless the operator allows it; all of
them run in transformers' sandbox, which knows no files and no attributes of Python's.
"""

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

from jinja2 import TemplateError

from fledge.server.errors import RequestError
from fledge.server.options import RequestLimits
from fledge.server.protocol import ChatRequest, TokenizeRequest

_T = TypeVar("_T")

INLINE_CHARACTERS = 4000  # what is read in the event loop itself: a millisecond or two
# Arguments of `apply_chat_template`, and what it defines for templates: a client's keywords must not reach them.
_RESERVED = frozenset(
    """conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize
    sanitize_control_tokens padding truncation max_length return_tensors return_dict return_assistant_tokens_mask
    tokenizer_kwargs self raise_exception strftime_now""".split()  # noqa: SIM905
)


_ROLES = {"system", "developer", "user", "assistant", "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Template(NamedTuple):
    """A chat template, as labels and tables name it."""

    name: str
    digest: str

    @property
    def label(self) -> str:
        return f"{self.name} ({self.digest[:8]})" if self.digest else self.name


NO_TEMPLATE = Template("none", "")  # of plain prompts


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation, ready to be answered."""

    token_ids: list[int]
    ending: str  # the last characters of the prompt's text
    template: Template


class Prompts:
    """Renders and tokenizes for one model."""

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        max_model_len: int,
        limits: RequestLimits,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        allow_client_templates: bool = False,
    ) -> None:
        """`chat_template` takes the place of the tokenizer's own."""
        self.tokenizer = tokenizer
        own = None if tokenizer is None else tokenizer.chat_template
        self.chat_template: str | None = chat_template or (own if isinstance(own, str) else _default_of(own))
        self._name = chat_template_name or "default"
        self._max_model_len = max_model_len
        self._limits = limits
        self._allows_client_templates = allow_client_templates
        # A tokenizer is not to be used by two threads at once: the pool's only thread has one of its own.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._pool_tokenizer = copy.deepcopy(tokenizer)
        self._longest_token = 1
        if tokenizer is not None:
            self._longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)

    async def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of plain text."""
        special = True if add_special_tokens is None else add_special_tokens
        return await self._run(len(text), lambda tokenizer: self._encode(tokenizer, text, special))

    async def chat(
        self,
        request: ChatRequest | TokenizeRequest,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Render and tokenize a conversation, as the request's own fields say."""
        template, name = self._template(request.chat_template)
        conversation = normalised(messages, self._limits.max_messages)
        extra = dict(chat_template_kwargs or {})
        reserved = sorted(_RESERVED & set(extra))
        if reserved:
            raise RequestError(f"chat_template_kwargs: '{reserved[0]}' cannot be set", param="chat_template_kwargs")
        continues = bool(request.continue_final_message)
        if continues and conversation[-1]["role"] != "assistant":
            raise RequestError(
                "continue_final_message: the last message must be the assistant's", param="continue_final_message"
            )
        size = sum(len(message["content"]) for message in conversation) + 1000 * len(tools or ())

        def work(tokenizer: Any) -> tuple[str, list[int]]:
            try:
                text = tokenizer.apply_chat_template(
                    conversation,
                    tools=None if not tools else [dict(tool) for tool in tools],
                    documents=None if not documents else [dict(document) for document in documents],
                    chat_template=template,
                    add_generation_prompt=request.add_generation_prompt is not False and not continues,
                    continue_final_message=continues,
                    tokenize=False,
                    **extra,
                )
            except TemplateError as error:
                raise _refused(str(error) or type(error).__name__) from None
            except Exception as error:  # what a template does with messages that it was not written for
                raise _refused(type(error).__name__) from None
            # Templates write special tokens themselves.
            return text, self._encode(tokenizer, text, bool(request.add_special_tokens))

        text, token_ids = await self._run(size if template is self.chat_template else 2**62, work)
        return ChatPrompt(
            token_ids=token_ids,
            ending=text[-64:],
            template=Template(name, hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()[:12]),
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return await self._run(4 * len(token_ids), lambda tokenizer: str(tokenizer.decode(list(token_ids))))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, characters: int, work: Callable[[Any], _T]) -> _T:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: it takes and gives token ids only", code="no_tokenizer")
        if characters <= INLINE_CHARACTERS:
            return work(self.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, self._pool_tokenizer)

    def _encode(self, tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
        most = self._max_model_len * self._longest_token
        if len(text) > most:  # not worth the time to find out by how much
            raise RequestError(
                f"the prompt has {len(text)} characters, which cannot fit into {self._max_model_len} tokens",
                code="context_length_exceeded",
            )
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def _template(self, asked_for: str | None) -> tuple[str, str]:
        """Return the template to use and its name; `asked_for` is a client's own."""
        if asked_for is not None:
            if not self._allows_client_templates:
                raise RequestError(
                    "chat_template: this server uses its own; the operator can allow others (--allow-client-templates)",
                    param="chat_template",
                    status=403,
                )
            if len(asked_for.encode()) > self._limits.max_template_bytes:
                raise RequestError(
                    f"chat_template: larger than {self._limits.max_template_bytes} bytes", param="chat_template"
                )
            return asked_for, "client"
        if self.chat_template is None:
            raise RequestError(
                "this model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template"
            )
        return self.chat_template, self._name


def _default_of(templates: Any) -> str | None:
    """A tokenizer may have several templates, by name."""
    if isinstance(templates, Mapping):
        found = templates.get("default")
        return found if isinstance(found, str) else None
    return None


def _refused(reason: str) -> RequestError:
    return RequestError(
        f"messages: the chat template refuses them: {reason.strip().splitlines()[0][:200]}", param="messages"
    )


def normalised(messages: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return messages with roles that templates know, content as one string, and tool arguments as objects."""
    if not messages:
        _refuse("messages", "expected at least one message")
    if len(messages) > most:
        _refuse("messages", f"found {len(messages)}, allowed are {most}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        _refuse(f"{where}.role", f"expected one of {', '.join(sorted(_ROLES))}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = _content(message.get("content"), f"{where}.content", may_be_missing=role == "assistant")
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                _refuse(f"{where}.{name}", "expected a string")
            made[name] = value
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            _refuse(f"{where}.tool_calls", "expected a list, in a message of the assistant's")
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _content(content: Any, where: str, *, may_be_missing: bool) -> str:
    if content is None and may_be_missing:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "expected a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        _refuse(where, "expected {'type': 'text', 'text': ...}; this server reads text only")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        _refuse(f"{where}.{_TEXT_PARTS[kind]}", "expected a string")
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(where, "expected {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': '...'}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            _refuse(f"{where}.function.arguments", "expected a string with JSON in it")
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "expected a string with a JSON object in it")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param="messages")
