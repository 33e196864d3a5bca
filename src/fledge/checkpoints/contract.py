"""The contract between a drafter's files, its config and its target.

vLLM lets most violations pass: a missing tensor stays uninitialised, a missing d2t maps to the wrong tokens, a wrong
layer id feeds the wrong features. Output stays correct, since every draft is verified, so the only symptom is a
drafter that accepts less than it should. Here each of them is a finding with a name; docs/checkpoints.md lists them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

import torch

from fledge.checkpoints.finding import Finding, Severity, finding
from fledge.checkpoints.formats.dense import DENSE, WeightFormat
from fledge.checkpoints.formats.drafter_config import AUX_IDS, as_outputs
from fledge.checkpoints.formats.names import D2T, EAGLE_1, EAGLE_3, EAGLE_3_MIDLAYER, T2D
from fledge.checkpoints.reading import DrafterCheckpoint
from fledge.checkpoints.weights import stored_shapes
from fledge.layers.config import RopeConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.variants import build
from fledge.models.drafter.vocab import DraftVocabulary
from fledge.models.target import FAMILIES

# In the config of a drafter that `fledge bench inflate` enlarged: it has rows of its head, and ids, several times.
INFLATED = "fledge_inflated"


def check(checkpoint: DrafterCheckpoint, target: TargetConfig | None = None) -> list[Finding]:
    """Every finding about a checkpoint, and about its fit with `target` where one is given. Errors come first.

    Reads the weights once, to look for values that are not finite.
    """
    tensors = list(_tensor_findings(checkpoint))
    findings = [*checkpoint.findings, *tensors, *_config_findings(checkpoint.config)]
    if all(found.fixed_by_convert for found in tensors):
        findings += [*_vocabulary_findings(checkpoint), *_value_findings(checkpoint)]
    if target is not None:
        findings += [*_aux_findings(checkpoint.config, target), *_target_findings(checkpoint, target)]
    elif checkpoint.config.architecture is Architecture.EAGLE3 and checkpoint.config.aux_layer_ids is None:
        findings.append(_aux_ids_omitted("(2, L//2, L-3) of an L-layer target"))
    return sorted(findings, key=lambda found: found.severity is not Severity.ERROR)


def _config_findings(config: DrafterConfig) -> Iterator[Finding]:
    """What a config says that cannot work with any target."""
    widths_differ = config.target_hidden_size != config.hidden_size
    for shared, name, what in (
        (not config.own_embedding, "shared-embedding-width", "embed_tokens"),
        (not config.own_head, "shared-head-width", "lm_head"),
    ):
        if shared and widths_differ:
            found = f"{config.target_hidden_size}, with hidden_size {config.hidden_size} and no {what} tensor"
            expected = f"a {what} of the drafter's own, since the target's has another width"
            yield finding(name, "target_hidden_size", found, expected)
    if config.fc_bias:
        yield finding("fc-bias", "bias", "a bias on fc", "none")


def _aux_ids_omitted(default: str) -> Finding:
    return finding("aux-ids-omitted", AUX_IDS, "nothing", "the layers the drafter was trained on", default=default)


def _aux_findings(config: DrafterConfig, target: TargetConfig) -> Iterator[Finding]:
    if config.architecture is Architecture.EAGLE1:
        return
    ids, layers, default = config.aux_layer_ids, target.num_layers, target.default_aux_layer_ids
    usual = f"{list(default)}, the usual layers as block inputs"
    if ids is None:
        if len(default) != config.num_aux_states or list(default) != sorted(set(default)) or min(default) < 0:
            expected = f"{config.num_aux_states} ids"
            yield finding("aux-ids-required", AUX_IDS, "nothing", expected, default=list(default), layers=layers)
        else:
            yield _aux_ids_omitted(f"{list(default)} (outputs {as_outputs(default)})")
    elif max(ids) > layers:
        expected = f"block inputs from 0 to {layers}"
        yield finding("aux-ids-out-of-range", AUX_IDS, list(ids), expected, layers=layers)
    elif list(ids) == as_outputs(default):
        yield finding("aux-ids-look-like-outputs", AUX_IDS, list(ids), usual)
    elif list(ids) == [i + 1 for i in default]:
        yield finding("aux-ids-shifted-twice", AUX_IDS, list(ids), usual)


def _target_findings(checkpoint: DrafterCheckpoint, target: TargetConfig) -> Iterator[Finding]:
    config, reference = checkpoint.config, checkpoint.target
    if config.vocab_size != target.vocab_size:
        yield finding("vocabulary-size", "vocab_size", config.vocab_size, f"{target.vocab_size}, the target's")
    if config.target_hidden_size != target.hidden_size:
        field = "target_hidden_size" if "target_hidden_size" in checkpoint.fields else "hidden_size"
        expected = f"{target.hidden_size}, the target's hidden size"
        yield finding("target-hidden-size", field, config.target_hidden_size, expected)
    rope = target.layer.as_drafter.rope
    if config.layer.rope != rope:
        expected = f"{_rope_difference(rope, config.layer.rope)}, as the target's"
        yield finding("rope-differs", "rope_theta", _rope_difference(config.layer.rope, rope), expected)
    if config.max_positions < target.max_positions:
        expected = f"{target.max_positions}, the target's"
        yield finding("max-positions-short", "max_position_embeddings", config.max_positions, expected)
    architecture = FAMILIES[target.family].architecture
    if reference and reference.architectures and architecture not in reference.architectures:
        field, found = "speculators_config.verifier.architectures", list(reference.architectures)
        made_for = reference.name_or_path or "another target"
        yield finding("verifier-differs", field, found, architecture, target=made_for)


def _rope_difference(rope: RopeConfig, other: RopeConfig) -> str:
    """What `rope` says in the fields in which the two differ."""
    theirs = asdict(other)
    return ", ".join(f"{field} {value}" for field, value in asdict(rope).items() if value != theirs[field])


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


def _tensor_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    """Missing, unexpected and misshapen tensors; one finding for each kind, naming the first."""
    expected = expected_shapes(checkpoint.config, checkpoint.weight_format)
    stored = checkpoint.stored_names.keys() - {T2D}
    if D2T in stored and D2T not in expected:
        stored -= {D2T}
        is_identity, file = not checkpoint.read(D2T).any(), checkpoint.info(D2T).file.name
        advice = "vLLM refuses it" if is_identity else "it is not the identity: correct draft_vocab_size or vocab_size"
        found, fixed = "a map, although draft_vocab_size is vocab_size", {"fixed_by_convert": is_identity}
        yield finding("d2t-without-reduction", "d2t", found, "none", file=file, advice=advice, **fixed)
    for name, tensors in _grouped(expected.keys() - stored, _MISSING):
        shape = list(expected[tensors[0]])
        yield _tensor_finding(checkpoint, name, tensors, "no such tensor", f"one of shape {shape}")
    # With fc_norm on, a norm too many is no missing flag.
    unexpected = {**_UNEXPECTED, "fusion.fc_norm.": "tensor-unexpected"} if checkpoint.config.fc_norm else _UNEXPECTED
    for name, tensors in _grouped(stored - expected.keys(), unexpected):
        yield _tensor_finding(checkpoint, name, tensors, "a tensor", "none")
    wrong = [n for n in stored & expected.keys() if checkpoint.info(n).shape != expected[n]]
    for name, tensors in _grouped(wrong, _MISSHAPEN):
        has, wants = list(checkpoint.info(tensors[0]).shape), list(expected[tensors[0]])
        yield _tensor_finding(checkpoint, name, tensors, f"shape {has}", f"shape {wants}")


def _grouped(tensors: Iterable[str], findings: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Tensors by the name of their finding."""
    found: dict[str, list[str]] = {}
    for tensor in sorted(tensors):
        name = next(name for prefix, name in findings.items() if tensor.startswith(prefix))
        found.setdefault(name, []).append(tensor)
    return found.items()


def _tensor_finding(checkpoint: DrafterCheckpoint, name: str, tensors: list[str], found: str, expected: str) -> Finding:
    first, more = tensors[0], f" (and {len(tensors) - 1} more like it)" if len(tensors) > 1 else ""
    if first in checkpoint.stored_names:
        field, file = checkpoint.stored_names[first], checkpoint.info(first).file
    else:  # as this checkpoint would call it
        midlayer = any("midlayer." in stored for stored in checkpoint.files.infos)
        eagle3 = EAGLE_3_MIDLAYER if midlayer else EAGLE_3
        table = EAGLE_1 if checkpoint.config.architecture is Architecture.EAGLE1 else eagle3
        field, file = table.to_theirs(first), checkpoint.files.files[0]
    return finding(name, field, found + more, expected, file=file.name)


def _vocabulary_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
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
    vocabulary = DraftVocabulary(len(d2t), config.vocab_size)
    vocabulary.d2t.copy_(d2t)
    target_ids = vocabulary.target_ids
    if t2d is not None and t2d.shape == (config.vocab_size,) and torch.equal(t2d.nonzero().flatten(), d2t):
        yield about_d2t("d2t-absolute", "target ids (t2d marks exactly these)", "offsets")
    elif target_ids.min() < 0 or target_ids.max() >= config.vocab_size:
        found = f"target ids from {target_ids.min()} to {target_ids.max()}"
        yield about_d2t("d2t-out-of-range", found, f"0 to {config.vocab_size - 1}")
    elif (distinct := len(set(target_ids.tolist()))) < len(target_ids) and INFLATED not in checkpoint.fields:
        found = f"{len(target_ids)} draft ids for {distinct} target ids"
        yield about_d2t("d2t-not-injective", found, "a target id of its own for each")
    elif t2d is not None and not torch.equal(t2d, vocabulary.in_draft):
        expected = f"a mask of {config.vocab_size} with these {len(d2t)} target ids"
        yield about_d2t("t2d-mismatch", f"a t2d with {int(t2d.sum())} of {t2d.numel()} ids", expected)
    elif not d2t.any():
        expected = "the frequent tokens of the training data"
        yield about_d2t("d2t-all-zero", "only zeros: the first token ids", expected)
    elif (target_ids.diff() < 0).any():
        yield about_d2t("d2t-not-sorted", "target ids out of order", "ascending")


def _value_findings(checkpoint: DrafterCheckpoint) -> Iterator[Finding]:
    for name in sorted(checkpoint.stored_names):
        tensor = checkpoint.read(name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            field, file = checkpoint.stored_names[name], checkpoint.info(name).file.name
            yield finding("weights-not-finite", field, "NaN or infinity", "finite weights", file=file)
            return
