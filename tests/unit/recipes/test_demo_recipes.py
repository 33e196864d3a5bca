"""The recipes of the bundled target, end to end at toy size on the CPU."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo import chat_tune, conversations, jsonlines, pretrain, samples
from recipes.demo import tokenizer as tokenizer_recipe
from recipes.demo.data import Encoder, Mixture
from recipes.demo.model import SHAPES, Llama, Shape, huggingface_config, save_huggingface, widen_heads
from recipes.demo.muon import StackedMuon
from recipes.demo.training import Budget, rate_factor

WORDS = "the a list of numbers returns value and text for each item in order with name 12 7 x = y + 1 def if not"


def sentences(rng: random.Random, count: int) -> str:
    return "\n".join(" ".join(rng.choices(WORDS.split(), k=9)).capitalize() + "." for _ in range(count))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pretraining text, conversations and a tokenizer of 512 entries."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for group in ("docs", "code"):
        records = ({"text": sentences(rng, 12), "source": group} for _ in range(40))
        jsonlines.write(folder / f"pretrain/{group}-00.jsonl.xz", records)
    jsonlines.write(folder / "pretrain/validation.jsonl.xz", [{"text": sentences(rng, 20), "source": "mdn"}] * 2)
    talk = [
        {
            "messages": [
                {"role": "user", "content": sentences(rng, 1)},
                {"role": "assistant", "content": sentences(rng, 2)},
            ],
            "source": "docs-qa/mdn",
        }
        for _ in range(150)
    ]
    jsonlines.write(folder / "chat/chat-00.jsonl.xz", talk)
    # Random letters give the trainer enough different pairs for the vocabulary.
    letters = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(3000)]
    texts = [sentences(rng, 50), " ".join(letters)]
    tokenizer_recipe.save(tokenizer_recipe.train(iter(texts), 512), folder / "tokenizer")
    return folder


def pretrain_tiny(corpus: Path, out: Path, **changes: object) -> None:
    settings = {
        "chat": corpus / "chat",
        "shape": "tiny",
        "steps": 6,
        "batch_tokens": 512,
        "length": 64,
        "long_length": 256,
        "compiled": False,
        "device": "cpu",
        "workers": 1,
        "evaluations": 1,
    } | changes
    pretrain.main(data=corpus / "pretrain", tokenizer=corpus / "tokenizer", out=out, **settings)


def log_of(out: Path, event: str) -> list[dict[str, object]]:
    return [r for r in jsonlines.read(out / "log.jsonl") if r["event"] == event]


def test_pretrain_tune_and_sample(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain_tiny(corpus, tmp_path / "base", export=tmp_path / "export")
    assert {p.name for p in (tmp_path / "export").iterdir()} == {
        "config.json",
        "log.jsonl",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert {"chat", "code", "docs", "all"} <= set(log_of(tmp_path / "base", "validation")[-1])

    chat_tune.main(
        base=tmp_path / "base/model",
        data=corpus / "chat",
        tokenizer=corpus / "tokenizer",
        out=tmp_path / "tuned",
        epochs=1,
        steps=4,
        length=256,
        rows=2,
        compiled=False,
        device="cpu",
        workers=1,
    )
    assert log_of(tmp_path / "tuned", "stopped")[0]["step"] == 4
    samples.main(model=tmp_path / "tuned/model", out=tmp_path / "samples.json", max_new_tokens=4, device="cpu")
    answered = json.loads((tmp_path / "samples.json").read_text())
    assert len(answered) == 2 * len(samples.PROMPTS)
    assert capsys.readouterr().out


def test_a_base_is_trained_on_and_tuned_with_its_own_tokenizer_only(corpus: Path, tmp_path: Path) -> None:
    pretrain_tiny(corpus, tmp_path / "base")
    pretrain_tiny(corpus, tmp_path / "more", warm_start=tmp_path / "base/model")
    losses = [log_of(tmp_path / name, "train")[0]["loss"] for name in ("base", "more")]
    assert losses[1] < losses[0]  # the second began where the first ended
    kept = tmp_path / "base/model/tokenizer.json"
    assert kept.read_bytes() == (corpus / "tokenizer/tokenizer.json").read_bytes()
    kept.write_bytes(kept.read_bytes() + b"\n")
    with pytest.raises(SystemExit, match="another tokenizer"):
        pretrain_tiny(corpus, tmp_path / "other", warm_start=kept.parent)
    with pytest.raises(SystemExit, match="another tokenizer"):
        chat_tune.main(
            base=kept.parent, data=corpus / "chat", tokenizer=corpus / "tokenizer", out=tmp_path / "tuned", steps=1
        )


def test_a_resumed_run_ends_where_an_unbroken_one_does(corpus: Path, tmp_path: Path) -> None:
    pretrain_tiny(corpus, tmp_path / "whole")
    pretrain_tiny(corpus, tmp_path / "parts", session_minutes=0.0)  # over before the first step
    assert not (tmp_path / "parts/model").exists()
    pretrain_tiny(corpus, tmp_path / "parts", resume=True)
    whole, parts = (AutoModelForCausalLM.from_pretrained(tmp_path / n / "model") for n in ("whole", "parts"))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name]), name


def test_bad_input_is_one_line(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: --shape must be one of"):
        pretrain_tiny(corpus, tmp_path / "o", shape="huge")
    with pytest.raises(SystemExit, match="does not exist"):
        pretrain_tiny(corpus, tmp_path / "o", resume=True)
    with pytest.raises(SystemExit, match="give --minutes, --steps or both"):
        pretrain_tiny(corpus, tmp_path / "o", steps=None)


def test_exported_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Shape(hidden=48, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=80, vocabulary=128, positions=64)
    ours = Llama(shape, torch.float32)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05).copy_(parameter.bfloat16())  # survives the bf16 file
    files = save_huggingface(ours, tmp_path, huggingface_config(shape, 0, [3, 1], 1), shard_bytes=20_000)
    assert len(files) > 4
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(128, (2, 40))
    torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("old", "new"), [((5, 1), (6, 2)), ((4, 2), (8, 4)), ((2, 2), (6, 2))])
def test_added_heads_change_nothing_at_first_and_are_trained(old: tuple[int, int], new: tuple[int, int]) -> None:
    torch.manual_seed(0)
    sizes = Shape(hidden=40, layers=2, heads=old[0], kv_heads=old[1], head_dim=16, ffn=48, vocabulary=64, positions=64)
    small = Llama(sizes, torch.float32)
    large = Llama(replace(sizes, heads=new[0], kv_heads=new[1]), torch.float32)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.mul_(3.0)  # attention that is not nearly uniform
    widen_heads(small, large)
    tokens = torch.randint(64, (2, 20))
    torch.testing.assert_close(large.logits(tokens), small.logits(tokens), atol=1e-4, rtol=1e-4)
    large.losses(tokens, tokens.roll(-1, 1)).mean().backward()
    gradient = large.stacks["o"].grad
    assert gradient is not None
    assert (gradient.abs().sum(1) > 0).all()  # every head is about to be heard
    with pytest.raises(SystemExit, match="only heads may be added"):
        widen_heads(large, small)


def test_shapes_fit_what_can_be_bundled() -> None:
    for name in ("deep", "tower", "mid", "wide"):
        assert SHAPES[name].layers >= 10
        assert SHAPES[name].parameters * 2 <= 63.5 * 2**20  # two drafters of 8 MiB and less than 80 in all
        assert SHAPES[name].hidden % SHAPES[name].heads == 0, "transformers refuses others"
    counted = sum(p.numel() for p in Llama(SHAPES["tiny"]).parameters())
    assert counted == SHAPES["tiny"].parameters


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24), (32, 32)])
def test_stacked_muon_steps_as_torch_does(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(5, rows, columns))
    single = [torch.nn.Parameter(m.clone()) for m in stack.detach()]
    ours = StackedMuon([stack], lr=0.01, weight_decay=0.1)
    theirs = torch.optim.Muon(single, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for parameter, gradient in zip(single, stack.grad, strict=True):
            parameter.grad = gradient.clone()
        ours.step()
        theirs.step()
    # The iteration runs in bf16, and a batched product may round differently from a single one.
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), atol=2e-3, rtol=0)


def test_conversation_ids_and_mask_are_the_chat_template_s(corpus: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List 12 names\nin order."},
        {"role": "assistant", "content": "x = 1\n\n    y"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "<|im_end|> is text here"},
    ]
    ids, produced = Encoder(corpus / "tokenizer").conversation(messages[:4])
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    wanted = tokenizer.apply_chat_template(
        messages[:4], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == list(wanted["input_ids"])
    assert [int(p) for p in produced] == list(wanted["assistant_masks"])
    assert Encoder(corpus / "tokenizer").conversation(messages)[0].count(tokenizer.eos_token_id) == 5
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True).endswith(
        "<|im_start|>assistant\n"
    )


def test_packed_documents_do_not_see_each_other(corpus: Path) -> None:
    torch.manual_seed(0)
    records = [
        {"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": c * 2}], "source": "math"}
        for c in ("the list ", "a value of each item ", "order ")
    ]
    rows = conversations.rows_of(records, corpus / "tokenizer", 256, 1, 1, random.Random(1))
    assert len(rows) == 1
    assert rows.documents.max() == 2
    model = Llama(SHAPES["tiny"], torch.float32)
    tokens, targets, documents = (
        torch.from_numpy(a.astype("int64")) for a in (rows.tokens, rows.targets, rows.documents)
    )
    packed = model.losses(tokens, targets, chat_tune.DocumentMask(1, 256, torch.device("cpu"), dense=True)(documents))
    for number in range(3):
        here = documents[0] == number
        alone = model.losses(tokens[:, here], targets[:, here])
        torch.testing.assert_close(packed[:, here], alone, atol=1e-4, rtol=1e-4)
    trained = tokens.new_tensor([t for t in targets[0].tolist() if t >= 0])
    assert (trained == 3).sum() == 3  # every answer's end is trained


def test_mixture_covers_each_group_once_per_pass() -> None:
    mixture = Mixture({"a": 1001, "b": 5001}, {"a": 1.0, "b": 1.0}, seed=3)
    starts = mixture.windows(40, 100)
    in_a = starts[starts < 1001]
    assert len(set(in_a.tolist())) == len(in_a) or mixture.passes["a"] > 0
    state = mixture.state()
    following = mixture.windows(30, 100)
    again = Mixture({"a": 1001, "b": 5001}, {"a": 1.0, "b": 1.0}, seed=3)
    again.restore(state)
    assert (again.windows(30, 100) == following).all()


def test_schedule_warms_up_holds_and_ends_at_zero() -> None:
    factors = [rate_factor(p / 100, 0.1, 0.4) for p in range(101)]
    assert factors[0] < 0.01
    assert factors[30] == 1.0
    assert factors[80] == pytest.approx(0.5)
    assert factors[100] == 0.0
    assert Budget(minutes=10, steps=100, spent=300.0, step=10).progress == pytest.approx(0.5, abs=0.01)
