"""What a request means: its fields become prompts, parameters and a grammar, and these a generation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fledge import __version__
from fledge.errors import ConfigError, PromptError
from fledge.server.async_engine import AsyncEngine, Generation
from fledge.server.engine_process import EngineProcess
from fledge.server.errors import RequestError
from fledge.server.grammar import Grammar
from fledge.server.logprobs import TokenTexts
from fledge.server.metrics import Metrics
from fledge.server.options import ApiKeys, ServeOptions
from fledge.server.prompts import NO_TEMPLATE, Prompts, Template
from fledge.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from fledge.server.reasoning import END, AnswerParser, ReasoningParser, detect_reasoning_parser, get_reasoning_parser
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses import ChatResponse, CompletionResponse
from fledge.server.structured import read_format
from fledge.server.tools import (
    HermesParser,
    ToolParser,
    ToolRequest,
    call_grammar,
    detect_parser,
    get_parser,
    read_tools,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class Service:
    """A model behind endpoints. Made before there is an event loop; start its engine in one, `close` at the end."""

    def __init__(self, process: EngineProcess, options: ServeOptions) -> None:
        """`process` has loaded its models."""
        self.options = options
        self.keys = ApiKeys(options.api_keys)
        self.is_draining = False
        self.tokenizer = process.tokenizer
        has_drafter = process.info.drafter is not None
        self.metrics = Metrics(model_name=options.model_name, has_drafter=has_drafter, version=__version__)
        self.engine = AsyncEngine(process, max_queue=options.max_queue, metrics=self.metrics, seed=options.seed)
        self.prompts = Prompts(
            self.tokenizer,
            max_model_len=process.info.max_model_len,
            limits=options.limits,
            chat_template=options.chat_template,
            chat_template_name=options.chat_template_name,
            allow_client_templates=options.allow_client_templates,
        )
        template = self.prompts.chat_template
        self._tool_parser: type[ToolParser] | None = _chosen(
            options.tool_call_parser, get_parser, detect_parser, template
        )
        self._reasoning: type[ReasoningParser] | None = _chosen(
            options.reasoning_parser, get_reasoning_parser, detect_reasoning_parser, template
        )
        self._texts = {as_ids: TokenTexts(self.tokenizer, as_ids=as_ids) for as_ids in (False, True)}

    async def close(self) -> None:
        await self.engine.close()
        self.prompts.close()

    @property
    def is_ready(self) -> bool:
        return self.engine.is_healthy and not self.is_draining

    def admit(self) -> None:
        """Raise RequestError while the server takes no new work."""
        if self.is_draining:
            self.metrics.on_rejected("draining")
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

    async def chat(self, request: ChatRequest, entry: RequestLogEntry) -> ChatResponse:
        """Begin to answer a conversation."""
        self._check(request, entry)
        with self.engine.reserve(request.answers):
            tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
            parser = self._tool_parser_for(tools)
            extra = dict(request.chat_template_kwargs or {})
            if request.reasoning_effort is not None:
                extra.setdefault("reasoning_effort", request.reasoning_effort)
            prompt = await self.prompts.chat(
                request,
                request.messages,
                tools=request.tools if tools is not None and tools.is_active else None,
                documents=request.documents,
                chat_template_kwargs=extra,
            )
            is_opened = self._reasoning is not None and self._reasoning.opened_by(prompt.ending)
            grammar = self._chat_grammar(request, tools, parser, is_opened=is_opened)
            if grammar is not None:
                await self.engine.compile(grammar)
            if self._needs_special_tokens(parser):
                request = request.model_copy(update={"skip_special_tokens": False})
            most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
            generation = self._generate(
                request,
                entry,
                [prompt.token_ids],
                max_tokens=most,
                logprobs=request.logprobs_wanted,
                grammar=grammar,
                template=prompt.template,
            )

        def new_parser() -> AnswerParser:
            return AnswerParser(
                reasoning=None if self._reasoning is None else self._reasoning(opened=is_opened),
                tools=None if parser is None or tools is None else parser(parallel=tools.parallel),
            )

        return ChatResponse(
            request,
            generation,
            request_id=entry.id,
            model=request.model or self.options.model_name,
            texts=self._texts[bool(request.return_tokens_as_token_ids)],
            new_parser=new_parser,
        )

    async def complete(self, request: CompletionRequest, entry: RequestLogEntry) -> CompletionResponse:
        """Begin to complete prompts."""
        self._check(request, entry)
        if request.echo and request.logprobs is not None:
            raise RequestError("echo: log-probabilities are given for answers only, not for prompts", param="echo")
        prompts = request.prompts
        if len(prompts) * request.answers > self.options.limits.max_answers:
            raise RequestError(f"prompt: found {len(prompts)} prompts, too many", param="prompt")
        with self.engine.reserve(len(prompts) * request.answers):
            encoded = [await self._encode(prompt, request) for prompt in prompts]
            echoes = [""] * len(prompts)
            if request.echo:
                echoes = [
                    prompt if isinstance(prompt, str) else await self.prompts.decode(ids)
                    for prompt, ids in zip(prompts, encoded, strict=True)
                ]
            grammar = read_format(**request.structured_fields())
            if grammar is not None:
                self._check_tokenizer(grammar)
                await self.engine.compile(grammar)
            most = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
            generation = self._generate(
                request, entry, encoded, max_tokens=most, logprobs=request.logprobs, grammar=grammar
            )
        return CompletionResponse(
            request,
            generation,
            request_id=entry.id,
            model=request.model or self.options.model_name,
            texts=self._texts[bool(request.return_tokens_as_token_ids)],
            echoes=echoes,
        )

    def _check(self, request: SamplingRequest, entry: RequestLogEntry) -> None:
        self.check_model(request.model)
        entry.model = request.model or self.options.model_name
        entry.stream = bool(request.stream)
        entry.ignored = request.ignored_fields()
        request.check_sizes(self.options.limits)

    def _generate(
        self,
        request: SamplingRequest,
        entry: RequestLogEntry,
        prompts: list[list[int]],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
        template: Template = NO_TEMPLATE,
    ) -> Generation:
        """Submit. Raises RequestError if something is wrong with the request."""
        if request.truncate_prompt_tokens is not None:
            prompts = [prompt[-request.truncate_prompt_tokens :] for prompt in prompts]
        defaults: Mapping[str, float | int] = self.options.default_sampling
        try:
            params = request.sampling_params(defaults, max_tokens=max_tokens, logprobs=logprobs)
            generation = self.engine.generate(
                prompts,
                params,
                request_id=entry.id,
                n=request.answers,
                draft_limit=request.speculation_depth,
                grammar=grammar,
                template=template,
                timeout=self.options.request_timeout,
            )
        except (ConfigError, PromptError) as error:
            raise RequestError.of(error) from None
        entry.answers, entry.prompt_tokens = generation.answers, generation.prompt_tokens
        return generation

    async def _encode(self, prompt: str | list[int], request: SamplingRequest) -> list[int]:
        if isinstance(prompt, str):
            return await self.prompts.encode(prompt, add_special_tokens=request.add_special_tokens)
        return prompt

    def _tool_parser_for(self, tools: ToolRequest | None) -> type[ToolParser] | None:
        if tools is None or not tools.is_active:
            return None
        if self._tool_parser is None and not tools.must_call:
            raise RequestError(
                "tools: it is not known how this model writes tool calls; start the server with --tool-call-parser, "
                "or demand a call with 'tool_choice'",
                param="tools",
                code="no_tool_parser",
            )
        return self._tool_parser or HermesParser  # a call that must come is written as the grammar says

    def _needs_special_tokens(self, parser: type[ToolParser] | None) -> bool:
        """Whether the markers that parsers look for would be dropped from the text."""
        if parser is not None and parser.special_markers:
            return True
        special = [] if self.tokenizer is None else self.tokenizer.all_special_tokens
        return self._reasoning is not None and END in special

    def _chat_grammar(
        self, request: ChatRequest, tools: ToolRequest | None, parser: type[ToolParser] | None, *, is_opened: bool
    ) -> Grammar | None:
        grammar = read_format(**request.structured_fields())
        if tools is not None and parser is not None and tools.must_call:
            if grammar is not None:
                raise RequestError(
                    f"{grammar.param}: cannot be had together with a demanded tool call", param=grammar.param
                )
            grammar = call_grammar(parser, tools)
        if grammar is None:
            return None
        self._check_tokenizer(grammar)
        markers = None if self._reasoning is None else self._reasoning.markers(opened=is_opened)
        return replace(grammar, reasoning=markers)

    def _check_tokenizer(self, grammar: Grammar) -> None:
        if self.tokenizer is None:
            raise RequestError(f"{grammar.param}: needs a tokenizer, which this model lacks", param=grammar.param)


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
