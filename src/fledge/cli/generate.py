"""`fledge generate`: one-off generation from any target and any drafter."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fledge.cli.options import MaxTokens, engine_options, read_speculation
from fledge.errors import PromptError

if TYPE_CHECKING:
    from fledge.decoding.params import SamplingParams
    from fledge.engine.llm import LLM
    from fledge.engine.outputs import RequestOutput

DRAFTED_STYLE = "green"


@engine_options("dtype", "device", "max_model_len")
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Or use --prompts.")] = None,
    *,
    target: Annotated[str, typer.Option(help="Target model: a directory or a Hugging Face name.")],
    drafter: Annotated[
        str | None, typer.Option(help="Drafter checkpoint; without one there is no speculation.")
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="vLLM's JSON, instead of --drafter, --depth and the --tree options.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Tokens to draft ahead, 1 to 16 (3 if not given).")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Draft EAGLE-2 trees instead of chains.")] = False,
    tree_width: Annotated[int, typer.Option(help="Nodes that go on at each level of a tree.")] = 8,
    tree_budget: Annotated[int, typer.Option(help="Nodes of a tree that are verified.")] = 32,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each with 'prompt', 'messages' or 'prompt_token_ids'; '-' for standard input."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user turn through the chat template.")
    ] = False,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    engine: Mapping[str, Any],
) -> None:
    """Generate text, with accepted draft tokens in colour, and say how the speculation went."""
    speculation = read_speculation(drafter, speculative_config, depth, (tree_width, tree_budget) if tree else None)
    requests = _read_requests(prompt, prompts, chat)

    from fledge import LLM, SamplingParams  # noqa: PLC0415 - torch takes seconds, and --help should not
    from fledge.engine.outputs import RequestMetrics  # noqa: PLC0415

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    llm = LLM(target, speculative_config=speculation, seed=seed, **engine)
    encoded = [llm.encode_chat(r["messages"]) if "messages" in r else r for r in requests]
    started = time.perf_counter()
    outputs = _answer_together(llm, encoded, params) if as_json else list(_answer_in_turn(llm, encoded, params))
    metrics = replace(RequestMetrics.pooled([o.metrics for o in outputs]), seconds=time.perf_counter() - started)
    total = metrics.to_dict(sum(len(output.outputs[0].token_ids) for output in outputs))
    if as_json:
        print(json.dumps({"outputs": [_output(output) for output in outputs], "total": total}))
    else:
        _print_summary(total)


def _read_requests(prompt: str | None, file: Path | None, chat: bool) -> list[dict[str, Any]]:
    if (prompt is None) == (file is None):
        raise PromptError("give either a prompt or --prompts FILE")
    if prompt is not None:
        return [{"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}]
    assert file is not None
    try:
        lines = sys.stdin.read().splitlines() if str(file) == "-" else file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    requests = [_parse_line(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not requests:
        raise PromptError(f"{file}: no prompts in it")
    return requests


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not valid JSON: {error}") from None
    for key in ("messages", "prompt", "prompt_token_ids"):
        if isinstance(record, dict) and key in record:
            return {key: record[key]}
    raise PromptError(f"{where}: expected an object with 'prompt', 'messages' or 'prompt_token_ids'")


def _answer_together(llm: "LLM", requests: list[Any], params: "SamplingParams") -> "list[RequestOutput]":
    """All prompts at once, in continuous batches, with a progress line on standard error."""
    with Console(stderr=True).status(f"answering {len(requests)} prompts") as status:
        return llm.generate(
            requests, params, progress=lambda done, total: status.update(f"answered {done} of {total} prompts")
        )


def _answer_in_turn(llm: "LLM", requests: list[Any], params: "SamplingParams") -> Iterator["RequestOutput"]:
    """One prompt after another, streamed for a person to read."""
    console = Console(highlight=False, soft_wrap=True)
    for number, request in enumerate(requests, start=1):
        if len(requests) > 1:
            console.rule(f"{number} of {len(requests)}", align="left")
        for event in llm.stream(request, params):
            for piece in event.pieces:
                console.print(piece.text, style=DRAFTED_STYLE if piece.drafted else None, end="", markup=False)
            if event.output is not None:
                answer = event.output.outputs[0]
                if not answer.text:  # a target without tokenizer
                    console.print(" ".join(map(str, answer.token_ids)), end="")
                yield event.output
        console.print()


def _output(output: "RequestOutput") -> dict[str, Any]:
    """What --json prints of an answer."""
    answer = output.outputs[0]
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **output.metrics.to_dict(len(answer.token_ids)),
    }


def _print_summary(total: dict[str, Any]) -> None:
    lines = [f"{total['tokens']} tokens, {total['tokens_per_second']:.1f} tokens/s"]
    if total["acceptance_length"] is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in total["rate_by_depth"])
        lines.append(f"acceptance length {total['acceptance_length']:.2f} over {total['rounds']} rounds")
        lines.append(f"accepted by depth: {rates}")
    Console(stderr=True, highlight=False).print("\n" + "\n".join(lines), style="dim")
