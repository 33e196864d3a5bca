"""Examples on disk and in rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.errors import DataError
from fledge.files import SEAL_BYTES, remove_temporaries, seal
from fledge.training.data.examples import TokenStore, collate, packed_rows

EXAMPLES = [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6, 65535], [0, 1, 1]), ([7, 8], [0, 1])]


def write(directory: Path, examples: list[tuple[list[int], list[int]]], vocab_size: int = 65536) -> TokenStore:
    with TokenStore.writer(directory, vocab_size) as writer:
        for tokens, answer in examples:
            writer.add(tokens, [bool(a) for a in answer])
    return TokenStore(directory)


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, width: int) -> None:
    store = write(tmp_path / "s", EXAMPLES, vocab_size)
    assert (tmp_path / "s" / "tokens.bin").stat().st_size == 9 * width + SEAL_BYTES
    assert (len(store), store.total_tokens, store.answer_tokens) == (3, 9, 5)
    assert store.lengths.tolist() == [4, 3, 2]
    for i, (tokens, answer) in enumerate(EXAMPLES):
        found, mask = store.example(i)
        assert (found.tolist(), mask.tolist()) == (tokens, [bool(a) for a in answer])


def test_the_digest_follows_from_the_content(tmp_path: Path) -> None:
    digest = write(tmp_path / "1", EXAMPLES).digest
    assert write(tmp_path / "elsewhere", EXAMPLES).digest == digest
    changed = [
        EXAMPLES[::-1],
        EXAMPLES[:2],
        [([1, 2, 3, 5], [0, 0, 1, 1]), *EXAMPLES[1:]],
        [([1, 2, 3, 4], [0, 1, 1, 1]), *EXAMPLES[1:]],
        [([1, 2, 3], [0, 0, 1]), ([4, 5, 6, 65535], [1, 0, 1, 1]), EXAMPLES[2]],
    ]
    assert digest not in {write(tmp_path / "2", examples).digest for examples in changed}


@pytest.mark.parametrize("name", ["tokens.bin", "answer.bin", "offsets.bin", "index.json"])
def test_a_truncated_store_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    write(tmp_path / "s", EXAMPLES)
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-1] if name != "index.json" else b'{"format": 1')
    with pytest.raises(DataError, match=f"{name}.*make it again") as caught:
        TokenStore(tmp_path / "s")
    assert "\n" not in str(caught.value)


def test_an_unfinished_store_is_not_there(tmp_path: Path) -> None:
    unfinished = TokenStore.writer(tmp_path / "s", 10)
    unfinished.__enter__().add([1], [True])
    with pytest.raises(DataError, match="no finished examples"):
        TokenStore(tmp_path / "s")
    remove_temporaries(tmp_path)  # killed here: another start begins anew
    assert len(write(tmp_path / "s", EXAMPLES[:1])) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token id 10 is outside"):
        write(tmp_path / "s", [([1, 10], [0, 1])], vocab_size=10)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=400), st.integers(1, 32), st.integers(0, 5), st.integers(0, 3))
def test_every_example_is_packed_once_and_every_row_fits(
    lengths: list[int], length: int, seed: int, epoch: int
) -> None:
    rows = packed_rows(lengths, length=length, seed=seed, epoch=epoch)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    assert all(sum(min(lengths[example], length) for example in row) <= length for row in rows)
    assert rows == packed_rows(np.array(lengths, dtype=np.int64), length=length, seed=seed, epoch=epoch)


def test_packing_is_close_and_shuffled_anew_each_epoch() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, 20_000), 4, 2048).astype(np.int64)
    rows = packed_rows(lengths, length=2048, seed=0, epoch=0)
    assert lengths.sum() > 0.97 * 2048 * len(rows)
    assert rows != packed_rows(lengths, length=2048, seed=0, epoch=1)
    assert rows != packed_rows(lengths, length=2048, seed=1, epoch=0)
    assert packed_rows([], length=8, seed=0, epoch=0) == []


def test_rows_become_tensors(tmp_path: Path) -> None:
    store = write(tmp_path / "s", EXAMPLES)
    batch = collate(store, [(0, 2), (1,)], 7)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 7, 8, 0], [5, 6, 65535, 0, 0, 0, 0]]
    assert batch.document.tolist() == [[0, 0, 0, 0, 1, 1, -1], [0, 0, 0, -1, -1, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 0, 0, 0, 0]]
    assert batch.answer.int().tolist() == [[0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="more than 5 tokens"):
        collate(store, [(0, 2)], 5)
    assert collate(store, [(0,)], 3).tokens.tolist() == [[1, 2, 3]]


def test_the_first_drafted_position_after_the_prompt_is_taught(tmp_path: Path) -> None:
    # Mistake 2: the slot that predicts the first answer token is two before it; an unshifted mask would leave it out.
    store = write(tmp_path / "s", [([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1])])
    batch = collate(store, [(0,)], 8)
    assert batch.supervised(0).nonzero()[:, 1].tolist() == [1, 2, 3]
    assert batch.supervised(1).nonzero()[:, 1].tolist() == [0, 1, 2]


def test_damage_and_ids_of_no_token_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "s", EXAMPLES[:1], vocab_size=100)
    path = tmp_path / "s" / "tokens.bin"
    content = path.read_bytes()
    path.write_bytes(b"\xff\xff" + content[2:])
    with pytest.raises(DataError, match=r"tokens\.bin: damaged, "):
        TokenStore(tmp_path / "s")
    path.write_bytes(b"\xff\xff" + content[2:-SEAL_BYTES])
    seal(path)
    with pytest.raises(DataError, match=r"tokens\.bin: token id 65535 is outside the vocabulary of 100; remove"):
        TokenStore(tmp_path / "s")
