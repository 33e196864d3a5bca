"""Chat templates and tokenization: from messages or text to token ids. Long inputs are handled in a thread.

The chat template is the tokenizer's or the operator's. A client's own is refused unless the operator allows it. All run
in transformers' Jinja sandbox, without access to files or Python attributes.
"""

import asyncio
import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from jinja2 import Environment, TemplateError, nodes

from fledge.decoding.params import SamplingParams
from fledge.engine.detokenizer import Detokenizer
from fledge.server.errors import RequestError, refuse
from fledge.server.options import ServeOptions
from fledge.server.protocol import MAX_CONTAINERS, ChatRequest, TokenizeRequest, has_too_many_containers

_T = TypeVar("_T")

NO_TOKENIZER = "this model has no tokenizer: it takes and gives token ids only"
MAX_MESSAGES = 2048
MAX_TEMPLATE_BYTES = 64 * 1024
ENDING_CHARACTERS = 1024
INLINE_CHARACTERS = 4000  # handled in the event loop itself, in a millisecond or two
# Arguments of `apply_chat_template`, and names that it defines for templates: clients must not set them.
_RESERVED = frozenset(
    """conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize
    sanitize_control_tokens padding truncation max_length return_tensors return_dict return_assistant_tokens_mask
    tokenizer_kwargs self raise_exception strftime_now""".split()  # noqa: SIM905
)
_JSON_SCALARS = (str, int, float, bool, type(None))
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Template(NamedTuple):
    """Name and digest of a chat template, for metrics and tables."""

    name: str
    digest: str  # of its text; empty if there is none, or it is not known

    @classmethod
    def of(cls, name: str, text: str) -> "Template":
        return cls(name, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12])

    @property
    def label(self) -> str:
        return f"{self.name} ({self.digest[:8]})" if self.digest else self.name


NO_TEMPLATE = Template("none", "")  # of text completions


class ChatPrompt(NamedTuple):
    """A conversation as a prompt."""

    token_ids: list[int]
    ending: str  # the last characters of the prompt's text
    template: Template


class Prompts:
    """Renders chat templates and tokenizes, for one model."""

    def __init__(self, tokenizer: Any | None, options: ServeOptions, *, max_model_len: int) -> None:
        """`options.chat_template` replaces the tokenizer's."""
        self.tokenizer = tokenizer
        own = None if tokenizer is None else tokenizer.chat_template
        own = own.get("default") if isinstance(own, Mapping) else own  # there may be several
        self.chat_template: str | None = options.chat_template or own
        self._options = options
        self._max_model_len = max_model_len
        # Tokenizers are not thread-safe: the only thread of the pool has a copy.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._pool_tokenizer = copy.deepcopy(tokenizer)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary), default=1)

    async def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of plain text."""
        special = True if add_special_tokens is None else add_special_tokens
        return await self._run(len(text), lambda tokenizer: self._encode(tokenizer, text, special))

    async def chat(self, request: ChatRequest | TokenizeRequest, *, with_tools: bool = True) -> ChatPrompt:
        """Render and tokenize a conversation."""
        template, name = self._template(request.chat_template)
        conversation = normalize_messages(request.messages or ())
        form = self._options.chat_template_content_format
        takes_parts = loops_over_content(template) if form == "auto" else form == "openai"
        extra = {**self._options.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
        if reserved := sorted(_RESERVED & set(extra)):
            refuse("chat_template_kwargs", f"'{reserved[0]}' cannot be set")
        if isinstance(request, ChatRequest):
            extra["documents"] = request.documents or None
            if request.reasoning_effort is not None:
                extra.setdefault("reasoning_effort", request.reasoning_effort)
        continues = bool(request.continue_final_message)
        if continues and conversation[-1]["role"] != "assistant":
            refuse("continue_final_message", "the last message must be the assistant's")
        tools = request.tools if with_tools else None
        calls = [message["tool_calls"] for message in conversation if "tool_calls" in message]
        size = sum(len(message["content"]) for message in conversation) + len(json.dumps([tools, calls, extra]))

        if takes_parts:
            for message in conversation:
                message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []

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
            except Exception as error:  # TemplateError, or anything that the template does with unexpected messages
                reason = str(error).strip() if isinstance(error, TemplateError) else ""
                reason = (reason or type(error).__name__).splitlines()[0][:200]
                refuse("messages", f"the chat template refuses them: {reason}")
            # Templates write special tokens themselves, so by default none are added.
            return text, self._encode(tokenizer, text, bool(request.add_special_tokens))

        text, token_ids = await self._run(size if template is self.chat_template else 2**62, work)
        return ChatPrompt(token_ids, text[-ENDING_CHARACTERS:], Template.of(name, template))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return await self._run(4 * len(token_ids), lambda tokenizer: str(tokenizer.decode(list(token_ids))))

    async def offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the position of each token in the text, which may be with or without special tokens."""

        def work(tokenizer: Any) -> list[int]:
            for hides_special in (False, True):
                read = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=hides_special))
                for token in token_ids:
                    read.push(token)
                if read.text == text:
                    break
            return [min(at, len(text)) for at in read.offsets()]

        return await self._run(4 * len(token_ids), work)

    def tokenizer_info(self) -> dict[str, Any]:
        """Return vLLM's response: the tokenizer's class and saved settings, and the chat template."""
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER, code="no_tokenizer")
        settings = {
            name: value for name, value in self.tokenizer.init_kwargs.items() if isinstance(value, _JSON_SCALARS)
        }
        special = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items() if value}
        named = {"tokenizer_class": type(self.tokenizer).__name__, "chat_template": self.chat_template}
        return {**settings, **special, **named}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, characters: int, work: Callable[[Any], _T]) -> _T:
        """Call `work` with a tokenizer; in the thread if the input is long."""
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER, code="no_tokenizer")
        if characters <= INLINE_CHARACTERS:
            return work(self.tokenizer)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, self._pool_tokenizer)

    def _encode(self, tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > self._max_model_len * self._longest_token:  # too long in any case, so it is not tokenized
            message = f"the prompt has {len(text)} characters, which cannot fit into {self._max_model_len} tokens"
            raise RequestError(message, code="context_length_exceeded")
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def _template(self, from_client: str | None) -> tuple[str, str]:
        """Return the template to use, and its name."""
        if from_client is not None:
            if not self._options.allow_client_templates:
                message = "this server uses its own; the operator can allow others (--allow-client-templates)"
                refuse("chat_template", message, status=403)
            if len(from_client.encode()) > MAX_TEMPLATE_BYTES:
                refuse("chat_template", f"larger than {MAX_TEMPLATE_BYTES} bytes")
            return from_client, "client"
        if self.chat_template is None:
            message = "this model's tokenizer has no chat template; use /v1/completions, or start the server with"
            raise RequestError(f"{message} --chat-template")
        return self.chat_template, self._options.chat_template_name or "default"


@functools.lru_cache(maxsize=8)
def loops_over_content(template: str) -> bool:
    """Whether a template iterates over the content of messages, which is then a list of parts. vLLM's rule."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return False  # it has unknown tags
    in_macros = {loop for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for source in (loop.iter for loop in tree.find_all(nodes.For) if loop not in in_macros):
        match source:
            case (
                nodes.Name(name="content")
                | nodes.Getattr(attr="content")
                | nodes.Getitem(arg=nodes.Const(value="content"))
            ):
                return True
    return False


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with content as one string, and tool arguments as objects. Raises RequestError."""
    _expect(bool(messages), "messages", "at least one message")
    _expect(len(messages) <= MAX_MESSAGES, "messages", f"at most {MAX_MESSAGES}, found {len(messages)}")
    calls = [call for message in messages for call in _as_list(message.get("tool_calls"))]
    arguments = [text.encode() for text in map(_arguments, calls) if isinstance(text, str)]
    is_small = not has_too_many_containers(b"".join(arguments))
    _expect(is_small, "messages", f"at most {MAX_CONTAINERS} arrays and objects in the arguments of tool calls")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    _expect(isinstance(role, str) and role in _ROLES, f"{where}.role", f"one of {', '.join(sorted(_ROLES))}")
    if content is None and role == "assistant":
        content = ""
    _expect(isinstance(content, str | list), f"{where}.content", "a string or a list of text parts")
    parts = [content] if isinstance(content, str) else content or ()
    text = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    normalized: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            normalized[name] = message[name]
            _expect(isinstance(normalized[name], str), f"{where}.{name}", "a string")
    if reasoning := normalized.get("reasoning") or normalized.get(
        "reasoning_content"
    ):  # templates use one name or the other
        normalized |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if not (text and calls):  # gpt-oss's name; its template refuses content and thinking in one message with calls
            normalized["thinking"] = reasoning
    if calls:
        is_list = role == "assistant" and isinstance(calls, list)
        _expect(is_list, f"{where}.tool_calls", "a list, in a message of the assistant's")
        normalized["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return normalized


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    _expect(kind in _TEXT_PARTS, where, "{'type': 'text', 'text': ...}; this server reads text only")
    text = part.get(_TEXT_PARTS[kind])
    _expect(isinstance(text, str), f"{where}.{_TEXT_PARTS[kind]}", "a string")
    return str(text)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = _arguments(call)
    shape = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': '...'}}"
    _expect(isinstance(name, str), where, shape)
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    _expect(isinstance(arguments, dict), f"{where}.function.arguments", "a string with a JSON object in it")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _expect(condition: bool, where: str, expected: str) -> None:
    if not condition:
        refuse(where, f"expected {expected}", param="messages")
