"""The probe on tiny pairs: it changes nothing, it agrees with the engine, and its figures add up."""

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge import LLM, SamplingParams
from fledge.checkpoints.drafter import save_drafter
from fledge.checkpoints.target import load_target, save_target
from fledge.drift import sources
from fledge.drift.perturb import Perturbation
from fledge.drift.probe import Prober, ProbeSettings, trained_depth
from fledge.drift.prompts import ProbePrompt
from fledge.drift.result import DriftResult
from fledge.drift.sources import EngineSource, VllmServers, VllmSource
from fledge.evaluation.results import statistics_of
from fledge.models.config import DrafterConfig
from fledge.training.capture import FledgeCapture
from fledge.vllm_states import hosts
from tests import engine_cases
from tests.fake_states import FakeVllm
from tests.tiny_models import TINY_TARGET, drafter_configs, make_drafter, make_target
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

PROMPTS = [(3, 4, 5, 2), (5, 5, 0, 3, 2, 4, 4), (2,)]
IDS = [ProbePrompt(id=f"p{i}", category="ids", token_ids=ids) for i, ids in enumerate(PROMPTS)]
SETTINGS = ProbeSettings(depth=4, max_tokens=30)


@pytest.fixture(name="ids_pair", scope="module")
def _ids_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tokens and no tokenizer: an untrained drafter is right now and then."""
    config = replace(engine_cases.TARGET, num_layers=8)  # for ascending aux layers
    return _save_pairs(tmp_path_factory.mktemp("ids"), config, drafter_configs(config))


@pytest.fixture(name="text_pair", scope="module")
def _text_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY_TARGET, vocab_size=VOCAB_SIZE, eos_ids=(VOCAB_SIZE - 1,))
    root = _save_pairs(tmp_path_factory.mktemp("text"), config, {"eagle3.1": drafter_configs(config)["eagle3.1"]})
    save_tokenizer(root / "target")
    return root


def _save_pairs(root: Path, config: Any, drafters: dict[str, DrafterConfig]) -> Path:
    target = make_target(config)
    save_target(target, root / "target")
    for name in ("eagle1", "eagle3", "eagle3.1", "two-layers", "reduced-vocabulary"):
        if name in drafters:
            save_drafter(make_drafter(drafters[name], target, seed=2), root / name)
    return root


def loaded(root: Path, name: str, settings: ProbeSettings = SETTINGS, **options: Any) -> Prober:
    prober = Prober(str(root / "target"), "ids", settings, {"device": "cpu", **options})
    prober.load(str(root / name))
    return prober


def own(prober: Prober) -> LLM:
    assert isinstance(prober.source, EngineSource)
    return prober.source.llm


def steady(root: Path, name: str, settings: ProbeSettings = SETTINGS, **options: Any) -> Prober:
    """An end-of-text token every sixth token or so would leave few rounds."""
    prober = loaded(root, name, settings, **options)
    own(prober).eos_ids = ()
    return prober


def probe(prober: Prober, prompts: Any = IDS, settings: ProbeSettings | None = None) -> DriftResult:
    prober.settings = settings or prober.settings
    return perturbed(prober, prompts=prompts)


def perturbed(prober: Prober, *steps: str, prompts: Any = IDS) -> DriftResult:
    perturbation = Perturbation(steps=steps)
    return prober.probe(prober.answered(prompts, perturbation), perturbation, lambda *_, **__: None)


def decoded(root: Path, name: str, depth: int = SETTINGS.depth, **options: Any) -> LLM:
    """The engine as it serves, with this drafter, which has answered IDS."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 30, **options.pop("sampling", {})})
    speculation = {"model": str(root / name), "num_speculative_tokens": depth, "adaptive": False}
    llm = LLM(root / "target", device="cpu", speculative_config=speculation, **options)
    llm.eos_ids = ()
    seeded = [replace(params, seed=(params.seed or 0) + i) for i in range(len(PROMPTS))]
    llm.generate([list(ids) for ids in PROMPTS], seeded)
    return llm


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3.1", "two-layers", "reduced-vocabulary"])
def test_the_probe_sees_what_the_engine_does_and_changes_nothing(ids_pair: Path, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    alone = LLM(ids_pair / "target", device="cpu")
    alone.eos_ids = ()
    plain = alone.generate([list(ids) for ids in PROMPTS], params)
    prober = steady(ids_pair, name)
    result = probe(prober)
    assert [" ".join(t.text for t in e.tokens) for e in sorted(result.examples, key=lambda e: e.id)] == [
        " ".join(f"[{token}]" for token in output.outputs[0].token_ids) for output in plain
    ]
    assert result.tally == result.engine_tally
    assert result.acceptance.tally == decoded(ids_pair, name).engine.stats().acceptance.tally
    assert result.acceptance.rounds == sum(row.acceptance.rounds for row in result.prompt_rows)
    accepted = [sum(row.acceptance.accepted_by_depth) for row in result.prompt_rows]
    assert sum(accepted) == sum(result.acceptance.accepted_by_depth)
    assert [depth.depth for depth in result.by_depth] == [1, 2, 3, 4]
    assert result.by_depth[0].attention.mass["drafted"] == 0.0
    assert result.by_depth[0].rounds == result.acceptance.rounds
    for depth in result.by_depth:
        assert sum(depth.attention.mass.values()) == pytest.approx(1, abs=1e-6)
        assert sum(depth.uniform_mass.values()) == pytest.approx(1)
    assert len(result.by_depth[0].heads) == (4 if name == "two-layers" else 2)
    assert sum(share.share for share in result.fusion_shares) == pytest.approx(1)
    assert 0 < result.repeated_share < 1  # six tokens leave little else to say
    assert 0 < result.fresh_acceptance.rounds < result.acceptance.rounds
    # Rounds that reach a depth and what they miss there are the acceptance seen from the other side. The text ends
    # in the middle of a round or two.
    assert result.by_depth[0].reached == result.acceptance.rounds
    assert sum(depth.missed for depth in result.by_depth) <= result.acceptance.rounds
    outside = sum(depth.missed_outside_vocabulary for depth in result.by_depth)
    assert (outside > 0) == (name == "reduced-vocabulary")


def test_the_probe_drafts_deeper_than_the_engine(ids_pair: Path) -> None:
    prober = steady(ids_pair, "eagle3.1", replace(SETTINGS, depth=1))
    shallow = probe(prober, settings=replace(SETTINGS, depth=6))
    assert (shallow.depth, shallow.engine_depth) == (6, 1)
    assert len(shallow.by_depth) == 6
    engine = statistics_of(shallow.engine_tally)
    assert engine.tally == decoded(ids_pair, "eagle3.1", depth=1).engine.stats().acceptance.tally
    assert engine.depth == 1
    assert shallow.acceptance.depth > 1
    assert shallow.acceptance.rounds == engine.rounds
    assert shallow.acceptance.accepted_by_depth[0] == engine.accepted_by_depth[0]


def test_pieces_do_not_change_the_result(ids_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prober = steady(ids_pair, "eagle3")
    whole = probe(prober)
    monkeypatch.setattr(sources, "MAX_ROWS_ON_CPU", 1)  # each text by itself, the shortest first
    pieces = probe(prober, settings=replace(SETTINGS, max_scores=40))
    assert pieces.tally == whole.tally
    assert [row.tally for row in pieces.prompt_rows] == [row.tally for row in whole.prompt_rows]
    for one, other in zip(whole.by_depth, pieces.by_depth, strict=True):
        assert one.attention.mass == pytest.approx(other.attention.mass, abs=1e-6)
        assert one.feature_rms == pytest.approx(other.feature_rms, rel=1e-5)


def test_a_state_that_is_tampered_with_is_judged_by_the_text(ids_pair: Path) -> None:
    """The engine's rounds are not those that such a drafter takes; the answer is the target's all the same."""
    prober = steady(ids_pair, "eagle3")
    plain, noisy, pinned = perturbed(prober), perturbed(prober, "noise:1.0"), perturbed(prober, "pin")
    for other in (noisy, pinned):
        assert other.output_tokens == plain.output_tokens
        assert other.by_depth[3].confidence != pytest.approx(plain.by_depth[3].confidence, rel=1e-4)
    # What hardly differs takes the rounds of the drafter left alone, to the end of the text.
    barely = perturbed(prober, "noise:0.000000001")
    assert [row.tally for row in barely.prompt_rows] == [row.tally for row in plain.prompt_rows]
    assert [row.tally for row in noisy.prompt_rows] != [row.tally for row in plain.prompt_rows]
    assert barely.by_depth[1].confidence == pytest.approx(plain.by_depth[1].confidence, rel=0.1)
    # The first draft of a round is as ever.
    assert noisy.by_depth[0].hidden_rms == pytest.approx(plain.by_depth[0].hidden_rms, rel=0.2)
    assert pinned.by_depth[-1].hidden_growth < plain.by_depth[-1].hidden_growth


def test_sampled_text_is_probed_too(ids_pair: Path) -> None:
    prober = steady(ids_pair, "eagle3.1")
    result = probe(prober, settings=replace(SETTINGS, temperature=0.8, seed=4))
    llm = decoded(ids_pair, "eagle3.1", sampling={"temperature": 0.8, "seed": 4})
    assert result.acceptance.tally == llm.engine.stats().acceptance.tally
    assert result.temperature == 0.8
    assert result == probe(prober)
    assert result.tally != probe(prober, settings=SETTINGS).tally


def test_near_the_end_of_the_context_less_is_drafted(ids_pair: Path) -> None:
    prober = steady(ids_pair, "eagle3", replace(SETTINGS, max_tokens=8), max_model_len=15)
    whole, result = probe(prober), probe(prober, IDS[1:2])
    llm = decoded(ids_pair, "eagle3", max_model_len=15, sampling={"max_tokens": 8})
    assert whole.acceptance.tally == llm.engine.stats().acceptance.tally
    assert result.output_tokens == 8
    assert result.tally == result.engine_tally
    counts = result.prompt_rows[0].rounds_by_depth
    assert counts[0] == result.acceptance.rounds
    assert counts[-1] < counts[0]


def test_an_answer_without_rounds_counts_as_a_prompt_only(ids_pair: Path) -> None:
    result = probe(steady(ids_pair, "eagle3"), IDS[:1], replace(SETTINGS, max_tokens=1))
    assert (result.prompts, result.acceptance.rounds, result.by_depth, result.examples) == (1, 0, (), ())
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_conversation_by_its_segments(text_pair: Path) -> None:
    chat = (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is a sink?"},
    )
    seen: list[str] = []
    conversations = [
        ProbePrompt(id="chat", category="", messages=chat),
        ProbePrompt(id="text", category="", text="Once upon"),
    ]
    settings = ProbeSettings(depth=3, max_tokens=20, sink_tokens=2, keep_examples=1)
    prober = loaded(text_pair, "eagle3.1", settings)
    answered = prober.answered(conversations, Perturbation(), lambda _, note: seen.append(note))
    result = prober.probe(answered, Perturbation(), lambda _, note: seen.append(note))
    assert result.variant == "EAGLE-3.1"
    assert all(result.by_depth[1].attention.mass[label] > 0 for label in ("system", "user", "assistant", "template"))
    assert result.by_depth[1].attention.mass["prompt"] > 0
    assert result.by_depth[1].attention.mass["tool"] == 0
    assert [row.id for row in result.prompt_rows] == ["chat", "text"]
    assert seen[-1] == "unperturbed: replay 2/2"
    assert "unperturbed: answer 2/2" in seen
    (example,) = result.examples
    assert (
        example.prompt
        == {
            "chat": "<system>Be kind.\n<user>Hi\n<assistant>Hello!\n<user>What is a sink?\n<assistant>",
            "text": "Once upon",
        }[example.id]
    )


@pytest.mark.parametrize("sinks", [0, 2])
def test_the_first_tokens_are_the_sink(ids_pair: Path, sinks: int) -> None:
    """One token an answer, so one round each: the first draft sees the prompt, and nothing of the answer yet."""
    settings = ProbeSettings(depth=2, max_tokens=2, sink_tokens=sinks)
    first, second = probe(steady(ids_pair, "eagle3"), IDS[1:2], settings).by_depth
    assert first.uniform_mass["sink"] == pytest.approx(sinks / 7)
    assert first.uniform_mass["prompt"] == pytest.approx((7 - sinks) / 7)
    assert second.uniform_mass["drafted"] == pytest.approx(1 / 8)
    assert first.uniform_mass["output"] == 0


def test_examples_say_what_became_of_every_token(ids_pair: Path) -> None:
    prober = steady(ids_pair, "reduced-vocabulary")
    result = probe(prober)
    drafter = prober.source.drafter
    assert drafter is not None
    assert drafter.vocabulary is not None
    draftable = set(drafter.vocabulary.target_ids.tolist())
    assert [e.acceptance_length for e in result.examples] == sorted(e.acceptance_length for e in result.examples)
    for example in result.examples:
        row = next(row for row in result.prompt_rows if row.id == example.id)
        statuses = [token.status for token in example.tokens]
        assert statuses[0] == "own"  # the target chooses the first token by itself
        accepted = sum(row.acceptance.accepted_by_depth)
        assert sum(status == "accepted" for status in statuses) in range(accepted - 4, accepted + 1)
        for token in example.tokens:
            outside = int(token.text[1:-1]) not in draftable
            if token.status in ("rejected", "outside"):
                assert outside == (token.status == "outside")
                assert token.draft not in (None, token.text)
            else:
                assert token.draft is None
                assert not (outside and token.status == "accepted")


def test_the_trained_depth_is_known_from_the_recipe(ids_pair: Path, tmp_path: Path) -> None:
    assert trained_depth(ids_pair / "eagle3") is None
    (tmp_path / "fledge_provenance.json").write_text(json.dumps({"recipe": {"fit": {"depth": 5}}}))
    assert trained_depth(tmp_path) == 5


@pytest.mark.parametrize("name", ["eagle1", "reduced-vocabulary"])
def test_from_states_that_vllm_writes_it_sees_the_same_without_loading_the_target(
    ids_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One server for drafters of other layers. The rounds follow from the text: no engine drafts."""
    expected = probe(steady(ids_pair, name))
    both = tuple(str(ids_pair / one) for one in dict.fromkeys((name, "eagle3", "eagle1")))
    vllm = VllmServers(drafters=both, storage=tmp_path / "states")
    path = str(ids_pair / "target")
    fake = FakeVllm(FledgeCapture(load_target(ids_pair / "target")), vllm.layers(path), vllm.storage)
    monkeypatch.setattr(sources, "stop_ids", lambda _directory: ())  # see `steady`
    monkeypatch.setattr(hosts, "start_host", lambda *_, **__: nullcontext(fake))
    monkeypatch.setattr(LLM, "__init__", None)  # nothing is decoded here
    prober = Prober(path, "ids", SETTINGS, {"device": "cpu"}, vllm)
    prober.load(str(ids_pair / name))
    assert isinstance(prober.source, VllmSource)
    assert len(prober.source._ends.layers) == 0
    found = probe(prober)
    prober.load(str(ids_pair / "eagle3"))
    assert probe(prober).output_tokens == found.output_tokens
    assert fake.answered == len(PROMPTS)  # once for all drafters
    prober.close()
    assert not list(vllm.storage.glob("*.states"))
    # Where a text ends the engine would have accepted more than is left of it, which vLLM does not tell.
    theirs, ours = ({(d, n): count for d, n, count in one.tally} for one in (expected, found))
    assert expected.acceptance.rounds == found.acceptance.rounds > 50
    assert (Counter(theirs) - Counter(ours)).total() <= len(PROMPTS)
    for a, b in zip(expected.by_depth, found.by_depth, strict=True):
        for field in ("reached", "missed", "missed_outside_vocabulary", "rounds"):
            assert getattr(b, field) == getattr(a, field)
        assert b.attention.mass == pytest.approx(a.attention.mass, abs=1e-5)
        for field in ("hidden_rms", "feature_growth", "confidence", "head_cosine", "feature_cosine"):
            assert getattr(b, field) == pytest.approx(getattr(a, field), rel=1e-4)
    assert [share.norm for share in found.fusion_shares] == pytest.approx(
        [s.norm for s in expected.fusion_shares], rel=1e-4
    )
    assert found.engine_depth == SETTINGS.depth
    assert [e.tokens for e in sorted(found.examples, key=lambda e: e.id)] == [
        e.tokens for e in sorted(expected.examples, key=lambda e: e.id)
    ]
