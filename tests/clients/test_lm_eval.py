"""lm-eval's tasks (multiple choice, perplexity, generation) from local files, scored by a running server.

No tokenizer is needed on this side: lm-eval asks the server for token ids (`/tokenizer_info`, `/tokenize`).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Server

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (make test-clients)")

OPENINGS = ("The capital of France is", "Once upon a time there was", "Water is made of", "My name is")
NONSENSE = " qz xq zzv kq"
TEXT = "The sun rises in the east and sets in the west. It gives light and warmth to everything that lives."
TASKS: dict[str, dict[str, Any]] = {
    "own_words": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{opening}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "continuation": {
        "output_type": "generate_until",
        "doc_to_text": "{{opening}}",
        "doc_to_target": "{{wanted}}",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def evaluate(server: Server, directory: Path, task: str, documents: list[dict[str, Any]], **options: Any) -> Any:
    """Return lm-eval's scores of one task over these documents."""
    file = directory / f"{task}.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    config = {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(directory / "cache")},
        "test_split": "test",
        **TASKS[task],
    }
    chat = options.pop("chat", False)
    endpoint = "chat/completions" if chat else "completions"
    return lm_eval.simple_evaluate(
        model="local-chat-completions" if chat else "local-completions",
        model_args={"model": server.model, "base_url": f"{server.v1}/{endpoint}", "max_length": 512, **options},
        tasks=[config],
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),  # else it reads thousands of files first
        apply_chat_template=chat,
        bootstrap_iters=0,
        log_samples=True,
    )


@pytest.fixture(autouse=True)
def _key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", server.key)


def continuation(server: Server, opening: str) -> str:
    answer = server.post("/v1/completions", model=server.model, prompt=opening, temperature=0, max_tokens=12)
    return answer["choices"][0]["text"].split("\n\n")[0]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_multiple_choice(server: Server, tmp_path: Path, batch_size: int) -> None:
    documents = [
        {"opening": opening, "choices": [NONSENSE, continuation(server, opening), NONSENSE[::-1]], "answer": 1}
        for opening in OPENINGS
    ]
    found = evaluate(
        server, tmp_path, "own_words", documents, auth_token=server.key, num_concurrent=2, batch_size=batch_size
    )
    assert found["results"]["own_words"]["acc,none"] == 1.0  # its own greedy words are likelier than nonsense
    assert found["results"]["own_words"]["acc_norm,none"] == 1.0
    for sample in found["samples"]["own_words"]:
        nonsense, own, _ = (answer[0] for answer in sample["resps"])
        assert float(nonsense[0]) < float(own[0]) < 0
        assert str(nonsense[1]) == "False"


def test_perplexity(server: Server, tmp_path: Path) -> None:
    scores = []
    for text in (TEXT, " ".join(sorted(TEXT.split(), key=lambda word: word[::-1]))):
        found = evaluate(server, tmp_path, "perplexity", [{"text": text}], auth_token=server.key)
        scores.append(found["results"]["perplexity"])
    plain, shuffled = (score["byte_perplexity,none"] for score in scores)
    assert 1 < plain < shuffled
    assert scores[0]["word_perplexity,none"] > plain


def test_generation(server: Server, tmp_path: Path) -> None:
    documents = [{"opening": opening, "wanted": continuation(server, opening)} for opening in OPENINGS]
    found = evaluate(server, tmp_path, "continuation", documents, auth_token=server.key)
    assert found["results"]["continuation"]["exact_match,none"] == 1.0


def test_generation_by_chat(server: Server, tmp_path: Path) -> None:
    documents = [{"opening": opening, "wanted": "-"} for opening in OPENINGS[:2]]
    found = evaluate(server, tmp_path, "continuation", documents, chat=True)
    assert all(sample["resps"][0][0] for sample in found["samples"]["continuation"])
