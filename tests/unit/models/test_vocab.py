import torch

from fledge.models.drafter.base import DraftVocabulary

IDS = [0, 2, 3, 7]


def test_checkpoints_hold_offsets() -> None:
    """target_id = i + d2t[i], in int64, and nothing else is stored."""
    vocabulary = DraftVocabulary.from_target_ids(torch.tensor(IDS), vocab_size=9)
    stored = vocabulary.state_dict()
    assert list(stored) == ["d2t"]
    assert stored["d2t"].tolist() == [0, 1, 1, 4]
    assert stored["d2t"].dtype == torch.int64

    loaded = DraftVocabulary(4, vocab_size=9)
    loaded.load_state_dict(stored)
    assert loaded.target_ids.tolist() == IDS


def test_ways_between_draft_and_target() -> None:
    vocabulary = DraftVocabulary.from_target_ids(torch.tensor(IDS), vocab_size=9)
    assert vocabulary.target_ids[torch.tensor([[3, 0], [1, 2]])].tolist() == [[7, 0], [2, 3]]
    assert vocabulary.in_draft.nonzero().flatten().tolist() == IDS
    assert len(vocabulary.in_draft) == 9

    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert vocabulary.spread(values).tolist() == [[1, 0, 2, 3, 0, 0, 0, 4, 0]]
    assert vocabulary.spread(values.bfloat16(), fill=-torch.inf).dtype == torch.bfloat16
    assert vocabulary.spread(values, fill=-torch.inf).softmax(-1)[0, [1, 4, 5, 6, 8]].sum() == 0
