"""What drafters are probed on: prompts that come with the package, or what `fledge eval` knows by name or reads.

Of a conversation the last user turn is answered and probed. Earlier turns without an answer (MT-Bench has such) are
answered by the target first, so that every drafter meets the same history.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fledge.decoding.params import SamplingParams
from fledge.drift.segments import ProbePrompt
from fledge.errors import ConfigError, nearest_name_hint
from fledge.evaluation.conversations import split_turns
from fledge.evaluation.dialogue import Dialogue, Generator, answer_dialogues
from fledge.evaluation.workloads import HUB, Prompt, Workload, canonical, load_workload, workload_names

DEFAULT = "mixed"
BUILT_IN = (DEFAULT, "chat", "code", "maths", "docs", "dialogue", "instructions", "multi-turn")  # all, or one category
_BUILT_IN_FILE = Path(__file__).parent / "data" / "prompts.jsonl"


def load_probe_workload(source: str | Path, *, sample: int | None = None, seed: int = 0) -> Workload:
    """Return a built-in workload, or what `evaluation` loads by that name; `sample` of its prompts, drawn with `seed`.

    A built-in name comes before one of evaluation's: `instructions` is our own, `natural_instructions` the public set.
    """
    name = str(source)
    if name in BUILT_IN:
        whole = load_workload(_BUILT_IN_FILE)
        chosen = tuple(prompt for prompt in whole.prompts if name in (DEFAULT, prompt.category))
        return replace(whole, name=name, prompts=chosen).sampled(sample, seed)
    known = {*BUILT_IN, *workload_names(), *HUB}
    if not (Path(source).is_file() or Path(source).suffix or {"/", ":"} & set(name) or canonical(name) in known):
        raise ConfigError(f"unknown workload '{name}', and no file has that name.{nearest_name_hint(name, known)}")
    return load_workload(source, sample=sample, seed=seed, as_written=True)


def has_open_turns(prompt: Prompt) -> bool:
    """Whether an earlier user turn has no answer yet."""
    return len(split_turns(prompt.messages, keep_answers=True)) > 1


def with_earlier_answers(prompts: Sequence[ProbePrompt], llm: Generator, max_tokens: int) -> list[ProbePrompt]:
    """Have the target answer the turns before the last, without randomness. What leaves no room for it gets none."""
    turns = [split_turns(prompt.messages, keep_answers=True) for prompt in prompts]
    dialogues = [Dialogue(number=i, turns=several[:-1]) for i, several in enumerate(turns)]
    answer_dialogues(llm, dialogues, SamplingParams(temperature=0.0, max_tokens=max_tokens), least_room=max_tokens)
    done = []
    for prompt, several, dialogue in zip(prompts, turns, dialogues, strict=True):
        unanswered = [message for turn in several[len(dialogue.answers) :] for message in turn]
        done.append(replace(prompt, messages=(*dialogue.history, *unanswered)) if dialogue.answers else prompt)
    return done
