"""What the endpoints do: a request's fields become a generation, and a generation becomes a response."""

import uuid
from collections.abc import Callable
from typing import Any

from fledge import __version__
from fledge.engine.llm import LLM
from fledge.server.async_engine import AsyncEngine, RequestOptions
from fledge.server.auth import ApiKeys
from fledge.server.chat import ChatAnswer
from fledge.server.completions import CompletionAnswer
from fledge.server.engine_link import CompiledGrammar, EngineLink, ThreadLink
from fledge.server.errors import RequestError
from fledge.server.generation import Asked, Generation
from fledge.server.logprobs import TokenTexts
from fledge.server.metrics import Metrics
from fledge.server.options import ServeOptions
from fledge.server.prompts import ChatPrompt, ChatSource, Prompts
from fledge.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from fledge.server.reasoning import AnswerSplitter, detect_reasoning_parser, get_reasoning_parser
from fledge.server.request_log import RequestRecord
from fledge.server.structured import GrammarCompiler, read_format
from fledge.server.tools import ToolParser, ToolRequest, call_grammar, detect_parser, get_parser, read_tools
from fledge.server.tools.hermes import HermesParser

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class Service:
    """A model behind endpoints. Made before there is an event loop; `start` in it, `close` at the end."""

    def __init__(self, engine: LLM | EngineLink, options: ServeOptions) -> None:
        self.options = options
        self.keys = ApiKeys(options.api_keys)
        self.is_draining = False
        link = ThreadLink(engine) if isinstance(engine, LLM) else engine
        self.tokenizer, self.facts = link.tokenizer, link.facts
        self.max_model_len, self.vocab_size = link.facts.bounds.max_model_len, link.facts.bounds.vocab_size
        has_drafter = link.facts.has_drafter
        self.metrics = Metrics(model_name=options.model_name, has_drafter=has_drafter, version=__version__)
        self.engine = AsyncEngine(link, max_queue=options.max_queue, observers=[self.metrics], seed=options.seed)
        self.prompts = Prompts(
            self.tokenizer,
            max_model_len=self.max_model_len,
            limits=options.limits,
            chat_template=options.chat_template,
            chat_template_name=options.chat_template_name,
            allow_client_templates=options.allow_client_templates,
        )
        self._tool_parser = _chosen(options.tool_call_parser, get_parser, detect_parser, self.prompts.chat_template)
        self._reasoning = _chosen(
            options.reasoning_parser, get_reasoning_parser, detect_reasoning_parser, self.prompts.chat_template
        )
        self._texts = {as_ids: TokenTexts(self.tokenizer, as_ids=as_ids) for as_ids in (False, True)}
        self._grammars: GrammarCompiler | None = None
        if self.tokenizer is not None:
            self._grammars = GrammarCompiler(self.tokenizer, vocab_size=self.vocab_size, eos_ids=link.facts.eos_ids)

    def start(self) -> None:
        self.engine.start()

    async def close(self) -> None:
        await self.engine.close()
        self.prompts.close()
        if self._grammars is not None:
            self._grammars.close()

    @property
    def is_ready(self) -> bool:
        return self.engine.is_healthy and not self.is_draining

    def admit(self) -> None:
        """Raise RequestError while the server takes no new work."""
        if self.is_draining:
            self.engine.reject("draining")
            raise RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.served_model_names:
            served = ", ".join(self.options.served_model_names)
            raise RequestError(
                f"there is no model '{name[:100]}' here, but {served}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def chat(self, request: ChatRequest, record: RequestRecord) -> tuple[ChatAnswer, Generation]:
        """Begin to answer a conversation."""
        self._begin(request, record)
        tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        parser = self._tool_parser_for(tools)
        extra = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", request.reasoning_effort)
        prompt = await self.prompts.chat(
            ChatSource(
                messages=request.messages,
                tools=request.tools if tools is not None and tools.is_active else None,
                documents=request.documents,
                chat_template=request.chat_template,
                chat_template_kwargs=extra,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
            )
        )
        is_opened = self._reasoning is not None and self._reasoning.opened_by(prompt.ending)
        grammar = await self._grammar(request, tools, parser, is_opened=is_opened)
        if self._needs_special_tokens(parser):
            request = request.model_copy(update={"skip_special_tokens": False})
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        asked = self._asked(
            request,
            record,
            [self._cut(prompt.token_ids, request)],
            max_tokens=most,
            logprobs=request.logprobs_wanted,
            grammar=grammar,
            prompt=prompt,
        )

        def new_splitter() -> AnswerSplitter:
            return AnswerSplitter(
                reasoning=None if self._reasoning is None else self._reasoning.stream(opened=is_opened),
                tools=None if parser is None or tools is None else parser.stream(parallel=tools.parallel),
            )

        generation = Generation(self.engine, asked)
        answer = ChatAnswer(
            request,
            generation,
            request_id=record.id,
            model=request.model or self.options.model_name,
            texts=self._texts[bool(request.return_tokens_as_token_ids)],
            new_splitter=new_splitter,
        )
        return answer, generation

    async def complete(self, request: CompletionRequest, record: RequestRecord) -> tuple[CompletionAnswer, Generation]:
        """Begin to complete prompts."""
        self._begin(request, record)
        if request.echo and request.logprobs is not None:
            raise RequestError("echo: log-probabilities are given for answers only, not for prompts", param="echo")
        prompts = await self._encode_prompts(request)
        echoes = [""] * len(prompts)
        if request.echo:
            given = request.prompt
            texts = [given] if isinstance(given, str) else given if given and isinstance(given[0], str) else None
            echoes = [str(text) for text in texts] if texts else [await self.prompts.decode(ids) for ids in prompts]
        grammar = await self._grammar(request, None, None, is_opened=False)
        most = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        asked = self._asked(request, record, prompts, max_tokens=most, logprobs=request.logprobs, grammar=grammar)
        generation = Generation(self.engine, asked)
        answer = CompletionAnswer(
            request,
            generation,
            request_id=record.id,
            model=request.model or self.options.model_name,
            texts=self._texts[bool(request.return_tokens_as_token_ids)],
            echoes=echoes,
        )
        return answer, generation

    def _begin(self, request: SamplingRequest, record: RequestRecord) -> None:
        self.check_model(request.model)
        record.model = request.model or self.options.model_name
        record.stream = bool(request.stream)
        record.ignored = request.ignored_fields()
        request.check_sizes(self.options.limits)
        self.engine.check_room()  # before any work is done for it

    def _asked(
        self,
        request: SamplingRequest,
        record: RequestRecord,
        prompts: list[list[int]],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        grammar: CompiledGrammar | None,
        prompt: ChatPrompt | None = None,
    ) -> Asked:
        limits = self.options.limits
        params = request.sampling_params(self.options.default_sampling, max_tokens=max_tokens, logprobs=logprobs)
        asked = Asked(
            request_id=record.id,
            prompts=prompts,
            params=params,
            n=request.answers,
            options=RequestOptions(
                speculation_depth=request.speculation_depth,
                template_name=None if prompt is None else prompt.template_name,
                template_hash=None if prompt is None else prompt.template_hash,
                grammar=grammar,
            ),
        )
        if asked.answers > limits.max_answers:
            raise RequestError(f"the request asks for {asked.answers} answers, allowed are {limits.max_answers}")
        record.answers, record.prompt_tokens = asked.answers, asked.prompt_tokens
        return asked

    async def _encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        given: Any = request.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise RequestError("prompt: expected text or token ids, or a list of such", param="prompt")
        if len(given) * request.answers > self.options.limits.max_answers:
            raise RequestError(f"prompt: found {len(given)} prompts, too many", param="prompt")
        encoded = []
        for one in given:
            ids = one
            if isinstance(one, str):
                ids = await self.prompts.encode(one, add_special_tokens=request.add_special_tokens)
            encoded.append(self._cut(ids, request))
        return encoded

    def _cut(self, token_ids: list[int], request: SamplingRequest) -> list[int]:
        most = request.truncate_prompt_tokens
        return token_ids if most is None else token_ids[-most:]

    def _tool_parser_for(self, tools: ToolRequest | None) -> ToolParser | None:
        if tools is None or not tools.is_active:
            return None
        if self._tool_parser is None and not tools.must_call:
            raise RequestError(
                "tools: it is not known how this model writes tool calls; start the server with --tool-call-parser, "
                "or demand a call with 'tool_choice'",
                param="tools",
                code="no_tool_parser",
            )
        return self._tool_parser or HermesParser()  # a call that must come is written as the grammar says

    def _needs_special_tokens(self, parser: ToolParser | None) -> bool:
        """Whether the markers that parsers look for would be dropped from the text."""
        if parser is not None and parser.special_markers:
            return True
        special = [] if self.tokenizer is None else self.tokenizer.all_special_tokens
        return self._reasoning is not None and self._reasoning.end in special

    async def _grammar(
        self, request: SamplingRequest, tools: ToolRequest | None, parser: ToolParser | None, *, is_opened: bool
    ) -> CompiledGrammar | None:
        grammar = read_format(**request.structured_fields())
        if tools is not None and parser is not None and tools.must_call:
            if grammar is not None:
                raise RequestError(
                    f"{grammar.param}: cannot be had together with a demanded tool call", param=grammar.param
                )
            assert self._grammars is not None
            grammar = call_grammar(parser, tools, marker=self._grammars.marker)
        if grammar is None:
            return None
        if self._grammars is None:
            raise RequestError(f"{grammar.param}: needs a tokenizer, which this model lacks", param=grammar.param)
        reasoning = self._reasoning if isinstance(request, ChatRequest) else None
        markers = None if reasoning is None else reasoning.markers(opened=is_opened)
        factory = await self._grammars.compile(grammar, markers)
        return CompiledGrammar(factory=factory, grammar=grammar, reasoning=markers)


def check_options(options: ServeOptions) -> None:
    """Raise ConfigError for what can be known to be wrong before a model is loaded."""
    ApiKeys(options.api_keys)
    _chosen(options.tool_call_parser, get_parser, lambda _template: None, None)
    _chosen(options.reasoning_parser, get_reasoning_parser, lambda _template: None, None)


def _chosen(name: str | None, by_name: Callable[[str], Any], detect: Callable[[str | None], Any], template: Any) -> Any:
    """Return the parser of that name; None or "auto": what the template suggests; "none": none."""
    if name == "none":
        return None
    return detect(template) if name in (None, "auto") else by_name(name)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
