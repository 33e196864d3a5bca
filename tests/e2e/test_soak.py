"""Thousands of short requests with random cancellations: nothing is left behind when they are gone.

Half of them are read at once, half one launch late. FLEDGE_SOAK=n runs n requests instead of 5,000,
of which a single object left by each is still found.
"""

import gc
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import save_target
from fledge.engine.config import EngineConfig
from fledge.engine.engine import LLMEngine
from fledge.models.drafter.variants import EAGLE_3_1
from tests.engine_cases import TARGET, AnyDepth, speculation
from tests.tiny_models import make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

REQUESTS = int(os.environ.get("FLEDGE_SOAK", "5000"))
CONFIG = replace(
    TARGET,
    vocab_size=VOCAB_SIZE,
    num_layers=1,
    layer=replace(TARGET.layer, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8),
    eos_ids=(VOCAB_SIZE - 1,),
)
DRAFTER = replace(EAGLE_3_1.config_for(CONFIG), aux_layer_ids=(0, 1), num_aux_states=2)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def random_params(chance: random.Random) -> SamplingParams:
    params = SamplingParams(temperature=chance.choice([0.0, 0.9]), max_tokens=chance.randint(1, 12))
    if chance.random() < 0.05:
        params = replace(params, **chance.choice([{"logprobs": 1}, {"presence_penalty": 0.5}, {"top_k": 5}]))
    return params


def random_prompt(chance: random.Random) -> list[int]:
    stem = [7, 8, 9, 10] * chance.randint(0, 4)
    return [*stem, *(chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 6)))]


def soak(engine: LLMEngine, count: int, chance: random.Random) -> None:
    """Send `count` requests through, cancelling some at some moment."""
    alive: list[str] = []
    sent = 0
    while sent < count or engine.has_unfinished:
        while sent < count and len(engine.scheduler.waiting) < 16:
            identity = str(sent)
            limit = None if chance.random() < 0.9 else 0
            engine.add_request(identity, random_prompt(chance), random_params(chance), draft_limit=limit)
            alive.append(identity)
            sent += 1
        for _ in range(chance.randint(0, 6)):
            recent = alive[-100:]
            if recent:
                engine.abort(chance.choice(recent))  # which may be waiting, running, or gone
        engine.step()
        if chance.random() < 0.05:
            engine.check_integrity()
    for _ in range(2):
        engine.step()  # a launch of requests that are all gone may still be in flight


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory and handles from /proc")
@pytest.mark.parametrize("read_late", [False, True], ids=["at once", "late"])
def test_thousands_of_requests_leave_nothing_behind(read_late: bool) -> None:
    target = make_target(CONFIG)
    depths = random.Random(1)
    engine = LLMEngine(
        target,
        make_drafter(DRAFTER, target),
        # Too few blocks for 64 requests, so that some are preempted.
        EngineConfig(
            speculative_config=speculation(2),
            max_model_len=40,
            max_num_seqs=64,
            num_blocks=320,
            block_size=2,
            read_late=read_late,
        ),
        AnyDepth(lambda _: depths.choice([0, 1, 2, 2, 2, 2, 2])),
    )
    chance = random.Random(0)
    soak(engine, REQUESTS // 4, chance)  # caches, allocators and the like reach their size
    gc.collect()
    objects, memory, files = len(gc.get_objects()), resident_bytes(), open_files()
    soak(engine, REQUESTS // 4, chance)
    gc.collect()

    engine.check_integrity()
    assert engine.block_manager.used == 0
    assert not engine.requests
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert sorted(engine.scheduler._free_rows) == list(range(64))
    assert len(engine.block_manager._key_of) <= 320
    statistics = engine.stats()
    assert statistics.finished + statistics.aborted == REQUESTS // 4 * 2
    assert statistics.aborted > REQUESTS // 20
    assert statistics.finished > REQUESTS // 4
    assert engine.scheduler.preemptions > 0
    assert len(gc.get_objects()) - objects < 500
    # A coarse net below the fine one: oneDNN keeps code for every batch size it meets, and is still meeting new ones.
    assert resident_bytes() - memory < 64 * 2**20
    assert open_files() == files


def test_streams_and_calls_that_are_dropped_leave_nothing_behind(tmp_path: Path) -> None:
    target = make_target(CONFIG)
    save_target(target, tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    save_drafter(make_drafter(DRAFTER, target), tmp_path / "drafter")
    llm = LLM(
        tmp_path / "target", speculative_config={"model": str(tmp_path / "drafter")}, max_num_seqs=16, max_model_len=64
    )
    chance = random.Random(0)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    def round_of_use() -> None:
        prompts = [random_prompt(chance) for _ in range(12)]
        llm.generate(prompts, [random_params(chance) for _ in prompts])
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, SamplingParams(max_tokens=4, n=2), progress=interrupt)
        stream = llm.stream("some text", SamplingParams(max_tokens=8, stop=["x"]))
        next(stream)
        stream.close()  # type: ignore[attr-defined]

    round_of_use()
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(8):
        round_of_use()
    gc.collect()
    llm.engine.check_integrity()
    assert not llm._answers
    assert not llm.engine.has_unfinished
    assert llm.engine.block_manager.used == 0
    assert len(gc.get_objects()) - objects < 500
