"""The service of our own engine: turns a request into prompts, sampling parameters and a grammar, and submits it."""

import asyncio
import itertools
from dataclasses import replace

from fledge import __version__
from fledge.errors import FledgeError
from fledge.server.async_engine import AsyncEngine, Generation
from fledge.server.base_service import BaseService, load_baseline
from fledge.server.completions import ChatChoice, CompletionChoice, OpenAIResponse, TokenTexts, token_texts
from fledge.server.drift_monitor import script_of
from fledge.server.engine_process import EngineProcess
from fledge.server.errors import RequestError, refuse
from fledge.server.harmony import HarmonyParser, HarmonyTools
from fledge.server.metrics import Metrics
from fledge.server.options import ServeOptions
from fledge.server.parsers import AnswerParser
from fledge.server.prompts import NO_TEMPLATE, Prompts, Template
from fledge.server.protocol import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SamplingRequest,
    StreamOptions,
)
from fledge.server.reasoning_parsers import reasoning_parser
from fledge.server.request_log import RequestLogEntry
from fledge.server.responses_api import ResponsesApiResponse, to_chat_request, with_own_field
from fledge.server.structured import Grammar, call_grammar, read_format, read_tools
from fledge.server.tool_parsers import HermesParser, tool_parser


class Service(BaseService):
    """Our own engine behind OpenAI's endpoints."""

    engine: AsyncEngine

    def __init__(self, process: EngineProcess, options: ServeOptions) -> None:
        """`process` has loaded its models."""
        drafter = process.info.drafter
        metrics = Metrics(
            model_name=options.model_name,
            has_drafter=drafter is not None,
            version=__version__,
            drafter=drafter,
            baseline=load_baseline(drafter),
        )
        super().__init__(options, metrics)
        self._requests = itertools.count()
        self.tokenizer = process.tokenizer
        self.engine = AsyncEngine(process, max_queue=options.max_queue, metrics=self.metrics, seed=options.seed)
        self.prompts = Prompts(self.tokenizer, options, max_model_len=process.info.max_model_len)
        self._tool_parser = tool_parser(options.tool_call_parser, self.prompts.chat_template)
        self._reasoning = reasoning_parser(options.reasoning_parser, self.prompts.chat_template)
        if self._tool_parser is HarmonyTools:  # one parser for reasoning and calls
            self._reasoning = HarmonyParser
        self._texts = {as_ids: token_texts(self.tokenizer, as_ids=as_ids) for as_ids in (False, True)}

    async def close(self) -> None:
        await super().close()
        self.prompts.close()

    @property
    def status(self) -> str:
        """The state for load balancers and supervisors: ok, draining, stalled or dead."""
        if not self.engine.is_healthy:
            return "dead"
        return "draining" if self.is_draining else "stalled" if self.engine.is_stalled else "ok"

    async def _swap_drafter(self, model: str) -> None:
        await self.engine.load_drafter(model)
        await self.engine.exchange_drafter(model, await asyncio.to_thread(load_baseline, model))

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.served_model_names:
            message = f"there is no model '{name[:100]}' here, but {', '.join(self.options.served_model_names)}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    async def chat(self, request: ChatRequest, entry: RequestLogEntry) -> OpenAIResponse:
        """Submit a chat request."""
        self._check(request, entry)
        with self.engine.reserve(request.num_choices):
            tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
            if tools is not None and self._tool_parser is None and not tools.required_tools:
                message = "it is not known how this model writes tool calls; start the server with --tool-call-parser"
                refuse("tools", f"{message}, or demand a call with 'tool_choice'", code="no_tool_parser")
            # A required call follows the grammar, so it can be parsed for any model.
            parser = None if tools is None else self._tool_parser or HermesParser
            if tools is not None and tools.required_tools and parser is not None and parser.TOOL_RULE is None:
                parser = HermesParser
            is_excluded = tools is None and self.options.exclude_tools_when_tool_choice_none
            prompt = await self.prompts.chat(request, with_tools=not is_excluded)
            is_opened = self._reasoning is not None and self._reasoning.opened_by(prompt.ending)
            grammar = read_format(**request.structured_fields())
            if tools is not None and parser is not None and tools.required_tools:
                if grammar is not None:
                    refuse(grammar.param, "cannot be had together with a demanded tool call")
                grammar = call_grammar(parser, tools)
            if grammar is not None and self._reasoning is not None:
                grammar = replace(grammar, reasoning=self._reasoning, reasoning_opened=is_opened)
            special = set(() if self.tokenizer is None else self.tokenizer.all_special_tokens)
            has_special_end = self._reasoning is not None and not special.isdisjoint(self._reasoning.END_MARKERS)
            if has_special_end or (parser is not None and parser.uses_special_tokens):  # the parsers need them
                request = request.model_copy(update={"skip_special_tokens": False})
            script, template = script_of(prompt.ending), prompt.template
            generation = await self._generate(
                request, entry, [prompt.token_ids], grammar, script=script, template=template
            )

        def answer_parser() -> AnswerParser:
            calls = None if parser is None or tools is None else parser(tools=tools.tools)
            markers = () if parser is None else parser.start_markers
            reasoning = None if self._reasoning is None else self._reasoning(opened=is_opened, calls=markers)
            return AnswerParser(reasoning, calls, parallel=tools is None or tools.parallel)

        texts = self._texts_for(request)
        # A continued message keeps its role.
        role = self.options.response_role if request.add_generation_prompt else str(request.messages[-1]["role"])
        choices = [
            ChatChoice(number, request, texts, answer_parser(), role) for number in range(generation.num_choices)
        ]
        return OpenAIResponse(request, generation, entry, choices)

    async def respond(self, request: ResponsesRequest, entry: RequestLogEntry) -> ResponsesApiResponse:
        """Submit a request of the Responses API."""
        self._check_length("max_output_tokens", request.max_output_tokens)
        try:
            return ResponsesApiResponse(request, await self.chat(to_chat_request(request), entry))
        except FledgeError as refused:
            raise with_own_field(RequestError.of(refused)) from None

    async def complete(self, request: CompletionRequest, entry: RequestLogEntry) -> OpenAIResponse:
        """Submit a completion request."""
        self._check(request, entry)
        prompts = request.prompts
        if len(prompts) * request.num_choices > MAX_CHOICES:
            refuse("prompt", f"found {len(prompts)} prompts, too many")
        with self.engine.reserve(len(prompts) * request.num_choices):
            special = request.add_special_tokens
            encoded = [await self.prompts.encode(one, special) if isinstance(one, str) else one for one in prompts]
            echoes = [""] * len(prompts)
            if request.echo:
                echoes = [one if isinstance(one, str) else await self.prompts.decode(one) for one in prompts]
            grammar = read_format(**request.structured_fields())
            script = next((script_of(one) for one in prompts if isinstance(one, str)), "unknown")
            generation = await self._generate(request, entry, encoded, grammar, script=script)
        starts: list[list[int]] = [[] for _ in prompts]
        if request.echo and request.num_logprobs is not None:
            starts = [await self.prompts.offsets(*pair) for pair in zip(generation.prompts, echoes, strict=True)]
        by_prompt = zip(generation.prompts, echoes, starts, strict=True)
        per_choice = [parts for parts in by_prompt for _ in range(generation.n)]
        texts = self._texts_for(request)
        choices = [CompletionChoice(number, request, texts, *parts) for number, parts in enumerate(per_choice)]
        return OpenAIResponse(request, generation, entry, choices)

    def _texts_for(self, request: SamplingRequest) -> TokenTexts:
        return self._texts[bool(request.return_tokens_as_token_ids) or self.options.return_tokens_as_token_ids]

    def _check(self, request: SamplingRequest, entry: RequestLogEntry) -> None:
        self.check_model(request.model)
        entry.model = request.model or self.options.model_name
        entry.stream = bool(request.stream)
        entry.ignored = request.ignored_fields()
        if request.priority and self.engine.info.scheduling_policy != "priority":
            entry.ignored.append("priority")
        if request.stream_options is not None and not request.stream:
            refuse("stream_options", "needs 'stream' to be true")
        if self.options.enable_force_include_usage and request.stream:
            options = request.stream_options or StreamOptions()
            request.stream_options = options.model_copy(update={"include_usage": True})
        self._check_length(*request.max_tokens_field)
        limit, field = self.options.max_logprobs, "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        for name, number in ((field, request.num_logprobs), ("prompt_logprobs", request.num_prompt_logprobs)):
            if (number or 0) > limit:
                refuse(name, f"found {number}, this server gives at most {limit}")

    def _check_length(self, field: str, max_tokens: int | None) -> None:
        """Refuse a length that exceeds the context. If only the prompt leaves less room, generation ends there."""
        if (max_tokens or 0) > (limit := self.engine.info.max_model_len):
            refuse(field, f"found {max_tokens}, the context has {limit} tokens")

    async def _generate(
        self,
        request: SamplingRequest,
        entry: RequestLogEntry,
        prompts: list[list[int]],
        grammar: Grammar | None,
        *,
        script: str,
        template: Template = NO_TEMPLATE,
    ) -> Generation:
        """Submit a request to the engine. Raises FledgeError if it is invalid."""
        if request.bad_words and self.tokenizer is None:
            refuse("bad_words", "needs a tokenizer, which this model lacks")
        if grammar is not None:
            if self.tokenizer is None:
                refuse(grammar.param, "needs a tokenizer, which this model lacks")
            any_whitespace = grammar.any_whitespace and not self.options.disable_any_whitespace
            grammar = replace(grammar, any_whitespace=any_whitespace)
            await self.engine.compile(grammar)
        if (kept := request.truncate_prompt_tokens) is not None:
            limit = self.engine.info.max_model_len
            if kept == 0 or kept > limit:
                refuse("truncate_prompt_tokens", f"found {kept}, allowed are 1 to {limit}, and -1 for what fits")
            kept = limit - 1 if kept == -1 else kept
            is_right = request.truncation_side == "right"
            prompts = [prompt[:kept] if is_right else prompt[max(0, len(prompt) - kept) :] for prompt in prompts]
        generation = self.engine.generate(
            prompts,
            request.sampling_params(self.options.default_sampling),
            request_id=f"{entry.id}-{next(self._requests)}",  # clients may send the same id twice
            n=request.num_choices,
            draft_limit=request.speculation_depth,
            cache_salt=request.cache_salt_digest,
            priority=request.priority or 0,
            grammar=grammar,
            template=template,
            script=script,
            timeout=self.options.request_timeout,
        )
        entry.answers, entry.prompt_tokens = generation.num_choices, generation.prompt_tokens
        return generation
