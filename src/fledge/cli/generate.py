"""`fledge generate`: text of any target with any drafter; `fledge demo`: the bundled models."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from fledge.cli.command import from_options, options, read_speculation
from fledge.errors import ConfigError, PromptError
from fledge.files import read_json_lines

if TYPE_CHECKING:
    from fledge.decoding.params import SamplingParams
    from fledge.engine.llm import LLM
    from fledge.engine.outputs import RequestOutput


INTRODUCTION = (
    "[bold]Fledge[/bold] answers with a small bundled chat model: alone, with its EAGLE-3 drafter, and with its "
    "EAGLE-3.1 drafter. The tokens are the same each time; those that a drafter had proposed are [green]green[/green]."
)


@options("generate", "dtype", "quantization", "device", "max_model_len", "kv_cache_dtype", "batch_invariant")
def generate(
    prompt: str | None = None,
    *,
    target: str,
    drafter: str | None = None,
    speculative_config: str | None = None,
    depth: int | None = None,
    tree: bool = False,
    tree_width: int = 8,
    tree_budget: int = 32,
    prompts: Path | None = None,
    chat: bool = False,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: list[str] | None = None,
    ignore_eos: bool = False,
    as_json: bool = False,
    backend: str = "fledge",
    vllm_python: str | None = None,
    vllm_option: list[str] | None = None,
    engine: Mapping[str, Any],
) -> None:
    """Generate text, with accepted draft tokens in colour.

    Acceptance statistics follow.
    """
    speculation = read_speculation(drafter, speculative_config, depth, (tree_width, tree_budget) if tree else None)
    requests = _read_requests(prompt, prompts, chat)

    from fledge import LLM, SamplingParams  # noqa: PLC0415 - torch takes seconds, and --help should not
    from fledge.decoding.statistics import AcceptanceStatistics  # noqa: PLC0415

    params = from_options(SamplingParams, locals(), stop=stop or ())
    more = {"vllm_options": vllm_option} if vllm_option else {}
    llm = LLM(target, engine=backend, vllm_python=vllm_python, speculative_config=speculation, **engine, **more)
    encoded = [llm.encode_chat(r["messages"]) if "messages" in r else r for r in requests]
    started = time.perf_counter()
    if as_json:
        with Console(stderr=True).status(f"answering {len(encoded)} prompts") as status:
            outputs = llm.generate(
                encoded, params, progress=lambda done, total: status.update(f"answered {done} of {total} prompts")
            )
        total = _total(outputs, time.perf_counter() - started)
        print(json.dumps({"outputs": [_as_dict(output) for output in outputs], "total": total}))
        return
    outputs = list(_generate_in_turn(llm, encoded, params))
    total = _total(outputs, time.perf_counter() - started)
    lines = [f"{total['tokens']} tokens, {total['tokens_per_second']:.1f} tokens/s"]
    if total["acceptance_length"] is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in total["rate_by_depth"])
        lines.append(f"acceptance length {total['acceptance_length']:.2f} over {total['rounds']} rounds")
        lines.append(f"accepted by depth: {rates}")
    if AcceptanceStatistics.merge(output.metrics.acceptance for output in outputs).is_hopeless:
        lines.append("hardly any draft stands: another target's drafter? See `fledge inspect DRAFTER --target TARGET`")
    Console(stderr=True, highlight=False).print("\n" + "\n".join(lines), style="dim")


def _read_requests(prompt: str | None, file: Path | None, chat: bool) -> list[dict[str, Any]]:
    if (prompt is None) == (file is None):
        raise PromptError("give either a prompt or --prompts FILE")
    if prompt is not None:
        return [{"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}]
    assert file is not None
    requests = []
    for number, record in read_json_lines(file):
        keys = ("messages", "prompt", "prompt_token_ids")
        key = next((key for key in keys if isinstance(record, dict) and key in record), None)
        if key is None:
            raise PromptError(f"{file}:{number}: expected an object with 'prompt', 'messages' or 'prompt_token_ids'")
        requests.append({key: record[key]})
    if not requests:
        raise PromptError(f"{file}: no prompts in it")
    return requests


def _generate_in_turn(llm: "LLM", requests: list[Any], params: "SamplingParams") -> Iterator["RequestOutput"]:
    """Generate for one prompt after another, and print the text as it comes."""
    console = Console(highlight=False, soft_wrap=True)
    for number, request in enumerate(requests, start=1):
        if len(requests) > 1:
            console.rule(f"{number} of {len(requests)}", align="left")
        for event in llm.stream(request, params):
            for piece in event.pieces:
                console.print(piece.text, style="green" if piece.drafted else None, end="", markup=False)
            if event.output is not None:
                answer = event.output.outputs[0]
                if not event.pieces and not answer.text:  # a target without tokenizer
                    console.print(" ".join(map(str, answer.token_ids)), end="")
                yield event.output
        console.print()


def _as_dict(output: "RequestOutput") -> dict[str, Any]:
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


def _total(outputs: "list[RequestOutput]", seconds: float) -> dict[str, Any]:
    from fledge.engine.outputs import RequestMetrics  # noqa: PLC0415

    pooled = replace(RequestMetrics.pooled([output.metrics for output in outputs]), seconds=seconds)
    return pooled.to_dict(sum(len(output.outputs[0].token_ids) for output in outputs))


@options("demo")
def demo(
    prompt: list[str] | None = None,
    *,
    depth: int = 3,
    max_tokens: int = 120,
    repeats: int = 3,
    device: str = "auto",
    threads: int | None = None,
    as_json: bool = False,
) -> None:
    """Run the bundled models with and without speculation.

    transformers is timed on the same prompts.
    """
    for name, value in (("--max-tokens", max_tokens), ("--repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name}: found {value}, allowed is 1 or more")

    import torch  # noqa: PLC0415

    from fledge.bench.demo import PLAIN, PROMPTS, Demo, table  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(highlight=False, stderr=as_json)
    it = Demo(prompt or PROMPTS, depth=depth, max_tokens=max_tokens, device=device)  # refuses what cannot be run
    console.print(INTRODUCTION)
    it.stream(console)
    with console.status("timing, beside transformers"):
        figures = it.measure(repeats)
    if as_json:
        print(json.dumps(figures))
    else:
        caption = f"speed: against transformers; by drafting: against {PLAIN}"
        console.print("", *table(figures).to_rich(console.width), caption, sep="\n")
    if figures["identical"]:
        others = ", and from transformers" if figures["identical_to_transformers"] else ""
        console.print(f"Lossless: the same {figures['tokens']} tokens with and without drafters{others}.")
    elif figures["device"] == "cpu":
        console.print("[red]Not lossless: the tokens differ.[/red] This is a bug; please report it.")
        raise typer.Exit(1)
    else:
        console.print("Some tokens differ: in bfloat16 a batch of another size may round a near-tie the other way.")
