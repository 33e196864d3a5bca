"""Whether the tensors of a checkpoint are the ones its config describes, and hold sensible values."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.checkpoints.finding import Finding, error, warning
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


@dataclass(frozen=True)
class _Kind:
    """A group of tensors that share a finding: the first match in a list wins."""

    prefix: str
    name: str
    advice: str


_MISSING = (
    _Kind(
        "fusion.fc_norm.",
        "fc-norm-missing",
        "fc_norm is true, but vLLM would leave the norms at ones; fetch the complete checkpoint",
    ),
    _Kind(
        "fusion.input_norm.",
        "input-norm-missing",
        "norm_before_fc is true, but vLLM would leave the norm at ones; fetch the complete checkpoint",
    ),
    _Kind(D2T, "d2t-missing", "draft_vocab_size is reduced, and vLLM would take draft ids for token ids"),
    _Kind("lm_head.", "lm-head-missing", "draft_vocab_size is reduced, and the target's head has other rows"),
    _Kind("", "tensor-missing", "vLLM would use uninitialised memory; fetch the complete checkpoint"),
)
_UNEXPECTED = (
    _Kind(
        "fusion.fc_norm.",
        "fc-norm-flag-off",
        "set fc_norm (and, for EAGLE 3.1, norm_output) at the top level of config.json as the drafter was trained",
    ),
    _Kind(
        "fusion.input_norm.",
        "input-norm-flag-off",
        "set norm_before_fc in config.json as the drafter was trained; vLLM would silently skip the norm",
    ),
    _Kind(
        "", "tensor-unexpected", "config.json describes a drafter without it; correct num_hidden_layers or the class"
    ),
)
_SHAPE = (
    _Kind("fusion.fc.", "fc-width", "check target_hidden_size, hidden_size and num_aux_hidden_states"),
    _Kind("embed_tokens.", "embedding-shape", "check vocab_size and hidden_size"),
    _Kind("lm_head.", "head-shape", "check draft_vocab_size and hidden_size"),
    _Kind(D2T, "d2t-shape", "check draft_vocab_size"),
    _Kind("", "tensor-shape", "check hidden_size, intermediate_size, head_dim and the numbers of heads"),
)


def tensor_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """Missing, unexpected and misshapen tensors; one finding for each kind, naming the first."""
    expected = expected_shapes(checkpoint.config, checkpoint.weight_format)
    stored = checkpoint.stored_names.keys() - {T2D}
    if D2T in stored and D2T not in expected:
        stored -= {D2T}
        yield _unneeded_d2t(checkpoint)
    for kind, names in _grouped(expected.keys() - stored, _MISSING):
        shape = list(expected[names[0]])
        yield _tensor_error(checkpoint, kind, names, found="no such tensor", expected=f"one of shape {shape}")
    unexpected = _UNEXPECTED[1:] if checkpoint.config.fc_norm else _UNEXPECTED  # a norm too many is no missing flag
    for kind, names in _grouped(stored - expected.keys(), unexpected):
        yield _tensor_error(checkpoint, kind, names, found="a tensor", expected="none")
    wrong = [n for n in stored & expected.keys() if checkpoint.info(n).shape != expected[n]]
    for kind, names in _grouped(wrong, _SHAPE):
        found, shape = list(checkpoint.info(names[0]).shape), list(expected[names[0]])
        yield _tensor_error(checkpoint, kind, names, found=f"shape {found}", expected=f"shape {shape}")


def _grouped(names: Iterable[str], kinds: tuple[_Kind, ...]) -> Iterator[tuple[_Kind, list[str]]]:
    remaining = sorted(names)
    for kind in kinds:
        if matching := [name for name in remaining if name.startswith(kind.prefix)]:
            yield kind, matching
        remaining = [name for name in remaining if not name.startswith(kind.prefix)]


def _tensor_error(
    checkpoint: DrafterCheckpoint, kind: _Kind, names: list[str], *, found: str, expected: str
) -> Finding:
    first, more = names[0], f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
    stored = first in checkpoint.stored_names
    return error(
        kind.name,
        checkpoint.stored_names[first] if stored else _spelling(checkpoint).to_theirs(first),
        file=(checkpoint.info(first).file if stored else checkpoint.files.files[0]).name,
        found=found + more,
        expected=expected,
        advice=kind.advice,
    )


def _spelling(checkpoint: DrafterCheckpoint) -> NameTable:
    """How this checkpoint would call a tensor it does not have."""
    if checkpoint.config.architecture is Architecture.EAGLE1:
        return EAGLE_1
    midlayer = any("midlayer." in name for name in checkpoint.files.infos)
    return EAGLE_3_MIDLAYER if midlayer else EAGLE_3


def _unneeded_d2t(checkpoint: DrafterCheckpoint) -> Finding:
    identity = not checkpoint.read(D2T).any()
    return error(
        "d2t-without-reduction",
        "d2t",
        file=checkpoint.info(D2T).file.name,
        found="a map, although draft_vocab_size is vocab_size",
        expected="none",
        advice="vLLM refuses it" if identity else "it is not the identity: correct draft_vocab_size or vocab_size",
        fixed_by_convert=identity,
    )


def vocabulary_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """The draft vocabulary. Wants a checkpoint whose tensors are all there, in their shapes."""
    config = checkpoint.config
    if not config.reduced_vocab:
        return
    file = checkpoint.info(D2T).file.name

    def finding(name: str, found: str, expected: str, advice: str, how: Callable[..., Finding] = error) -> Finding:
        return how(name, "d2t", file=file, found=found, expected=expected, advice=advice)

    d2t = checkpoint.read(D2T)
    if d2t.dtype not in (torch.int64, torch.int32):
        yield finding("d2t-dtype", str(d2t.dtype), "int64", "store integer offsets: d2t[i] = target id - i")
        return
    d2t = d2t.to(torch.int64)
    t2d = checkpoint.read(T2D).bool() if T2D in checkpoint.stored_names else None
    target_ids = d2t + torch.arange(len(d2t))
    if t2d is not None and t2d.shape == (config.vocab_size,) and torch.equal(t2d.nonzero().flatten(), d2t):
        advice = "subtract the draft id from each: d2t[i] = target id - i"
        yield finding("d2t-absolute", "target ids (t2d marks exactly these)", "offsets", advice)
    elif target_ids.min() < 0 or target_ids.max() >= config.vocab_size:
        found = f"target ids from {target_ids.min()} to {target_ids.max()}"
        yield finding(
            "d2t-out-of-range", found, f"0 to {config.vocab_size - 1}", "the map belongs to another vocabulary"
        )
    elif (distinct := len(set(target_ids.tolist()))) < len(target_ids) and INFLATED not in checkpoint.fields:
        found = f"{len(target_ids)} draft ids for {distinct} target ids"
        yield finding("d2t-not-injective", found, "a target id of its own for each", "rebuild the map")
    elif t2d is not None and (t2d.shape != (config.vocab_size,) or not torch.equal(t2d, _mask(target_ids, t2d))):
        expected = f"a mask of {config.vocab_size} with these {len(d2t)} target ids"
        yield finding(
            "t2d-mismatch", f"a t2d with {int(t2d.sum())} of {t2d.numel()} ids", expected, "rebuild both maps"
        )
    elif not d2t.any():
        expected, advice = "the frequent tokens of the training data", "it may never have been filled in"
        yield finding("d2t-all-zero", "only zeros: the first token ids", expected, advice, warning)
    elif (target_ids.diff() < 0).any():
        advice = "equal logits resolve to the lowest draft id here and to the lowest target id in vLLM"
        yield finding("d2t-not-sorted", "target ids out of order", "ascending", advice, warning)


def _mask(target_ids: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[target_ids] = True
    return mask


def value_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    for name in sorted(checkpoint.stored_names):
        tensor = checkpoint.read(name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield error(
                "weights-not-finite",
                checkpoint.stored_names[name],
                file=checkpoint.info(name).file.name,
                found="NaN or infinity",
                expected="finite weights",
                advice="the training run diverged or the file is damaged; use an earlier checkpoint",
            )
            return
