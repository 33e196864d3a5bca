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
from typing import Any, NamedTuple, NoReturn, TypeVar

from jinja2 import TemplateError

from fledge.server.errors import RequestError
from fledge.server.options import ServeOptions
from fledge.server.protocol import ChatRequest, TokenizeRequest

_T = TypeVar("_T")

MAX_MESSAGES = 2048
MAX_TEMPLATE_BYTES = 64 * 1024
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


class ChatPrompt(NamedTuple):
    """A conversation, ready to be answered."""

    token_ids: list[int]
    ending: str  # the last characters of the prompt's text
    template: Template


class Prompts:
    """Renders and tokenizes for one model."""

    def __init__(self, tokenizer: Any | None, options: ServeOptions, *, max_model_len: int) -> None:
        """The options' chat template takes the place of the tokenizer's own."""
        self.tokenizer = tokenizer
        own = None if tokenizer is None else tokenizer.chat_template
        own = own.get("default") if isinstance(own, Mapping) else own  # there may be several, by name
        self.chat_template: str | None = options.chat_template or own
        self._options = options
        self._max_model_len = max_model_len
        # A tokenizer is not to be used by two threads at once: the pool's only thread has one of its own.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._pool_tokenizer = copy.deepcopy(tokenizer)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary), default=1)

    async def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of plain text."""
        special = True if add_special_tokens is None else add_special_tokens
        return await self._run(len(text), lambda tokenizer: self._encode(tokenizer, text, special))

    async def chat(self, request: ChatRequest | TokenizeRequest, *, with_tools: bool = True) -> ChatPrompt:
        """Render and tokenize a conversation, as the request's own fields say."""
        template, name = self._template(request.chat_template)
        conversation = normalised(request.messages or ())
        extra = dict(request.chat_template_kwargs or {})
        if reserved := sorted(_RESERVED & set(extra)):
            raise RequestError(f"chat_template_kwargs: '{reserved[0]}' cannot be set", param="chat_template_kwargs")
        if isinstance(request, ChatRequest):
            extra["documents"] = request.documents or None
            if request.reasoning_effort is not None:
                extra.setdefault("reasoning_effort", request.reasoning_effort)
        continues = bool(request.continue_final_message)
        if continues and conversation[-1]["role"] != "assistant":
            message = "continue_final_message: the last message must be the assistant's"
            raise RequestError(message, param="continue_final_message")
        tools = request.tools if with_tools else None
        size = sum(len(message["content"]) for message in conversation) + 1000 * len(tools or ())

        def work(tokenizer: Any) -> tuple[str, list[int]]:
            try:
                text = tokenizer.apply_chat_template(
                    conversation,
                    tools=tools or None,
                    chat_template=template,
                    add_generation_prompt=request.add_generation_prompt is not False and not continues,
                    continue_final_message=continues,
                    tokenize=False,
                    **extra,
                )
            except Exception as error:  # its own, or what it does with messages that it was not written for
                reason = str(error).strip() if isinstance(error, TemplateError) else ""
                reason = (reason or type(error).__name__).splitlines()[0][:200]
                message = f"messages: the chat template refuses them: {reason}"
                raise RequestError(message, param="messages") from None
            # Templates write special tokens themselves.
            return text, self._encode(tokenizer, text, bool(request.add_special_tokens))

        text, token_ids = await self._run(size if template is self.chat_template else 2**62, work)
        digest = hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        return ChatPrompt(token_ids, text[-64:], Template(name, digest))

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
        param = "chat_template"
        if asked_for is not None:
            if not self._options.allow_client_templates:
                message = "this server uses its own; the operator can allow others (--allow-client-templates)"
                raise RequestError(f"{param}: {message}", param=param, status=403)
            if len(asked_for.encode()) > MAX_TEMPLATE_BYTES:
                raise RequestError(f"{param}: larger than {MAX_TEMPLATE_BYTES} bytes", param=param)
            return asked_for, "client"
        if self.chat_template is None:
            raise RequestError(
                "this model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template"
            )
        return self.chat_template, self._options.chat_template_name or "default"


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with roles that templates know, content as one string, and tool arguments as objects."""
    if not messages:
        _refuse("messages", "expected at least one message")
    if len(messages) > MAX_MESSAGES:
        _refuse("messages", f"found {len(messages)}, allowed are {MAX_MESSAGES}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        _refuse(f"{where}.role", f"expected one of {', '.join(sorted(_ROLES))}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str | list):
        _refuse(f"{where}.content", "expected a string or a list of text parts")
    parts = [content] if isinstance(content, str) else content
    made["content"] = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            made[name] = message[name]
            if not isinstance(made[name], str):
                _refuse(f"{where}.{name}", "expected a string")
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            _refuse(f"{where}.tool_calls", "expected a list, in a message of the assistant's")
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        _refuse(where, "expected {'type': 'text', 'text': ...}; this server reads text only")
    name = _TEXT_PARTS[kind]
    if not isinstance(part.get(name), str):
        _refuse(f"{where}.{name}", "expected a string")
    return str(part[name])


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(where, "expected {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': '...'}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "expected a string with a JSON object in it")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param}: {message}", param="messages")
