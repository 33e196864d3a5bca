"""Whether the tensors of a checkpoint are the ones its config describes, and hold sensible values."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fledge.checkpoints.finding import Finding, finding
from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.names import EAGLE_1, EAGLE_3, EAGLE_3_MIDLAYER, T2D, NameTable
from fledge.checkpoints.reading import D2T, DrafterCheckpoint
from fledge.checkpoints.weights import DENSE, stored_shapes
from fledge.models.config import Architecture, DrafterConfig
from fledge.models.drafter.variants import build

# In the config of a drafter that `fledge bench inflate` enlarged: it has rows of its head, and ids, several times.
INFLATED = "fledge_inflated"


def expected_shapes(config: DrafterConfig, form: WeightFormat = DENSE) -> dict[str, tuple[int, ...]]:
    """The tensors a config asks for, under our names before joining."""
    with torch.device("meta"):
        return stored_shapes(build(config), form)


# Tensors that share a finding, by how their names begin; the first that fits is taken.
_MISSING = {
    "fusion.fc_norm.": "fc-norm-missing",
    "fusion.input_norm.": "input-norm-missing",
    D2T: "d2t-missing",
    "lm_head.": "lm-head-missing",
    "": "tensor-missing",
}
_UNEXPECTED = {
    "fusion.fc_norm.": "fc-norm-flag-off",
    "fusion.input_norm.": "input-norm-flag-off",
    "": "tensor-unexpected",
}
_MISSHAPEN = {
    "fusion.fc.": "fc-width",
    "embed_tokens.": "embedding-shape",
    "lm_head.": "head-shape",
    D2T: "d2t-shape",
    "": "tensor-shape",
}


def tensor_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """Missing, unexpected and misshapen tensors; one finding for each kind, naming the first."""
    expected = expected_shapes(checkpoint.config, checkpoint.weight_format)
    stored = checkpoint.stored_names.keys() - {T2D}
    if D2T in stored and D2T not in expected:
        stored -= {D2T}
        yield _unneeded_d2t(checkpoint)
    for name, tensors in _grouped(expected.keys() - stored, _MISSING):
        shape = list(expected[tensors[0]])
        yield _tensor_finding(checkpoint, name, tensors, "no such tensor", f"one of shape {shape}")
    # With fc_norm on, a norm too many is no missing flag.
    unexpected = {**_UNEXPECTED, "fusion.fc_norm.": "tensor-unexpected"} if checkpoint.config.fc_norm else _UNEXPECTED
    for name, tensors in _grouped(stored - expected.keys(), unexpected):
        yield _tensor_finding(checkpoint, name, tensors, "a tensor", "none")
    wrong = [n for n in stored & expected.keys() if checkpoint.info(n).shape != expected[n]]
    for name, tensors in _grouped(wrong, _MISSHAPEN):
        found, shape = list(checkpoint.info(tensors[0]).shape), list(expected[tensors[0]])
        yield _tensor_finding(checkpoint, name, tensors, f"shape {found}", f"shape {shape}")


def _grouped(tensors: Iterable[str], findings: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Tensors by the name of their finding."""
    found: dict[str, list[str]] = {}
    for tensor in sorted(tensors):
        name = next(name for prefix, name in findings.items() if tensor.startswith(prefix))
        found.setdefault(name, []).append(tensor)
    return found.items()


def _tensor_finding(checkpoint: DrafterCheckpoint, name: str, tensors: list[str], found: str, expected: str) -> Finding:
    first, more = tensors[0], f" (and {len(tensors) - 1} more like it)" if len(tensors) > 1 else ""
    stored = first in checkpoint.stored_names
    field = checkpoint.stored_names[first] if stored else _spelling(checkpoint).to_theirs(first)
    file = checkpoint.info(first).file if stored else checkpoint.files.files[0]
    return finding(name, field, found + more, expected, file=file.name)


def _spelling(checkpoint: DrafterCheckpoint) -> NameTable:
    """How this checkpoint would call a tensor it does not have."""
    if checkpoint.config.architecture is Architecture.EAGLE1:
        return EAGLE_1
    midlayer = any("midlayer." in name for name in checkpoint.files.infos)
    return EAGLE_3_MIDLAYER if midlayer else EAGLE_3


def _unneeded_d2t(checkpoint: DrafterCheckpoint) -> Finding:
    identity, file = not checkpoint.read(D2T).any(), checkpoint.info(D2T).file.name
    advice = "vLLM refuses it" if identity else "it is not the identity: correct draft_vocab_size or vocab_size"
    found = "a map, although draft_vocab_size is vocab_size"
    return finding("d2t-without-reduction", "d2t", found, "none", file=file, fixed_by_convert=identity, advice=advice)


def vocabulary_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """The draft vocabulary. Wants a checkpoint whose tensors are all there, in their shapes."""
    config = checkpoint.config
    if not config.reduced_vocab:
        return

    def about_d2t(name: str, found: str, expected: str) -> Finding:
        return finding(name, "d2t", found, expected, file=checkpoint.info(D2T).file.name)

    d2t = checkpoint.read(D2T)
    if d2t.dtype not in (torch.int64, torch.int32):
        yield about_d2t("d2t-dtype", str(d2t.dtype), "int64")
        return
    d2t = d2t.to(torch.int64)
    t2d = checkpoint.read(T2D).bool() if T2D in checkpoint.stored_names else None
    target_ids = d2t + torch.arange(len(d2t))
    if t2d is not None and t2d.shape == (config.vocab_size,) and torch.equal(t2d.nonzero().flatten(), d2t):
        yield about_d2t("d2t-absolute", "target ids (t2d marks exactly these)", "offsets")
    elif target_ids.min() < 0 or target_ids.max() >= config.vocab_size:
        found = f"target ids from {target_ids.min()} to {target_ids.max()}"
        yield about_d2t("d2t-out-of-range", found, f"0 to {config.vocab_size - 1}")
    elif (distinct := len(set(target_ids.tolist()))) < len(target_ids) and INFLATED not in checkpoint.fields:
        found = f"{len(target_ids)} draft ids for {distinct} target ids"
        yield about_d2t("d2t-not-injective", found, "a target id of its own for each")
    elif t2d is not None and (t2d.shape != (config.vocab_size,) or not torch.equal(t2d, _mask(target_ids, t2d))):
        expected = f"a mask of {config.vocab_size} with these {len(d2t)} target ids"
        yield about_d2t("t2d-mismatch", f"a t2d with {int(t2d.sum())} of {t2d.numel()} ids", expected)
    elif not d2t.any():
        expected = "the frequent tokens of the training data"
        yield about_d2t("d2t-all-zero", "only zeros: the first token ids", expected)
    elif (target_ids.diff() < 0).any():
        yield about_d2t("d2t-not-sorted", "target ids out of order", "ascending")


def _mask(target_ids: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[target_ids] = True
    return mask


def value_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    for name in sorted(checkpoint.stored_names):
        tensor = checkpoint.read(name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            field, file = checkpoint.stored_names[name], checkpoint.info(name).file.name
            yield finding("weights-not-finite", field, "NaN or infinity", "finite weights", file=file)
            return
