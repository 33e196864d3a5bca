"""The contract between a drafter's files, its config and its target.

vLLM lets most violations pass: a missing tensor stays uninitialised, a missing d2t maps to the wrong tokens, a wrong
layer id feeds the wrong features. Output stays correct, since every draft is verified, so the only symptom is a
drafter that accepts less than it should. Here each of them is a finding with a name; docs/checkpoints.md lists them.
"""

from collections.abc import Iterator
from dataclasses import asdict

from fledge.checkpoints.finding import Finding, Severity, error, warning
from fledge.checkpoints.formats.aux_ids import AUX_IDS, as_outputs
from fledge.checkpoints.integrity import tensor_findings, value_findings, vocabulary_findings
from fledge.checkpoints.reading import DrafterCheckpoint
from fledge.layers.config import RopeConfig
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.target import FAMILIES


def check(checkpoint: DrafterCheckpoint, target: TargetConfig | None = None) -> list[Finding]:
    """Every finding about a checkpoint, and about its fit with `target` where one is given. Errors come first.

    Reads the weights once, to look for values that are not finite.
    """
    tensors = list(tensor_findings(checkpoint))
    findings = [*checkpoint.findings, *tensors, *_config_findings(checkpoint.config)]
    if all(finding.fixed_by_convert for finding in tensors):
        findings += [*vocabulary_findings(checkpoint), *value_findings(checkpoint)]
    if target is not None:
        findings += [*_aux_findings(checkpoint.config, target), *_target_findings(checkpoint, target)]
    elif checkpoint.config.architecture is Architecture.EAGLE3 and checkpoint.config.aux_layer_ids is None:
        findings.append(_aux_ids_omitted("(2, L//2, L-3) of an L-layer target"))
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def _config_findings(config: DrafterConfig) -> Iterator[Finding]:
    """What a config says that cannot work with any target."""
    widths_differ = config.target_hidden_size != config.hidden_size
    for shared, name, what in (
        (not config.own_embedding, "shared-embedding-width", "embed_tokens"),
        (not config.own_head, "shared-head-width", "lm_head"),
    ):
        if shared and widths_differ:
            yield error(
                name,
                "target_hidden_size",
                found=f"{config.target_hidden_size}, with hidden_size {config.hidden_size} and no {what} tensor",
                expected=f"a {what} of the drafter's own, since the target's has another width",
                advice="fetch the complete checkpoint; vLLM would run with an uninitialised or misshapen matrix",
            )
    if config.fc_bias:
        yield warning(
            "fc-bias",
            "bias",
            found="a bias on fc",
            expected="none",
            advice="Fledge applies it, but vLLM drops it without a word, so acceptance will differ there",
        )


def _aux_ids_omitted(default: str) -> Finding:
    return warning(
        "aux-ids-omitted",
        AUX_IDS,
        found="nothing",
        expected="the layers the drafter was trained on",
        advice=f"the default is used, inputs {default}; `fledge convert --target` writes it down",
    )


def _aux_findings(config: DrafterConfig, target: TargetConfig) -> Iterator[Finding]:
    if config.architecture is Architecture.EAGLE1:
        return
    ids, layers, default = config.aux_layer_ids, target.num_layers, target.default_aux_layer_ids
    if ids is None:
        if len(default) != config.num_aux_states or list(default) != sorted(set(default)) or min(default) < 0:
            yield error(
                "aux-ids-required",
                AUX_IDS,
                found="nothing",
                expected=f"{config.num_aux_states} ids",
                advice=f"the default {list(default)} does not suit this drafter and a target of {layers} layers",
            )
        else:
            yield _aux_ids_omitted(f"{list(default)} (outputs {as_outputs(default)})")
    elif max(ids) > layers:
        yield error(
            "aux-ids-out-of-range",
            AUX_IDS,
            found=list(ids),
            expected=f"block inputs from 0 to {layers}",
            advice=f"the target has {layers} layers: this drafter was made for another",
        )
    elif list(ids) == as_outputs(default):
        yield warning(
            "aux-ids-look-like-outputs",
            AUX_IDS,
            found=list(ids),
            expected=f"{list(default)}, the usual layers as block inputs",
            advice="they are read as inputs, but these are the usual layers counted as outputs: check the trainer",
        )
    elif list(ids) == [i + 1 for i in default]:
        yield warning(
            "aux-ids-shifted-twice",
            AUX_IDS,
            found=list(ids),
            expected=f"{list(default)}, the usual layers as block inputs",
            advice="one above the usual layers: inputs may have been taken for outputs on the way; check the trainer",
        )


def _target_findings(checkpoint: DrafterCheckpoint, target: TargetConfig) -> Iterator[Finding]:
    config = checkpoint.config
    other = "this drafter was made for another target"
    if config.vocab_size != target.vocab_size:
        expected = f"{target.vocab_size}, the target's"
        yield error("vocabulary-size", "vocab_size", found=config.vocab_size, expected=expected, advice=other)
    if config.target_hidden_size != target.hidden_size:
        field = "target_hidden_size" if "target_hidden_size" in checkpoint.fields else "hidden_size"
        expected = f"{target.hidden_size}, the target's hidden size"
        yield error("target-hidden-size", field, found=config.target_hidden_size, expected=expected, advice=other)
    rope = target.layer.as_drafter.rope
    if config.layer.rope != rope:
        yield warning(
            "rope-differs",
            "rope_theta",
            found=_rope_difference(config.layer.rope, rope),
            expected=f"{_rope_difference(rope, config.layer.rope)}, as the target's",
            advice="right only if the drafter was trained so",
        )
    if config.max_positions < target.max_positions:
        yield warning(
            "max-positions-short",
            "max_position_embeddings",
            found=config.max_positions,
            expected=f"{target.max_positions}, the target's",
            advice="acceptance collapses on longer inputs, and vLLM drafts token 0 there",
        )
    architecture = FAMILIES[target.family].architecture
    named = checkpoint.target.architectures if checkpoint.target else ()
    if named and architecture not in named:
        yield warning(
            "verifier-differs",
            "speculators_config.verifier.architectures",
            found=list(named),
            expected=architecture,
            advice=f"made for {(checkpoint.target and checkpoint.target.name_or_path) or 'another target'}",
        )


def _rope_difference(rope: RopeConfig, other: RopeConfig) -> str:
    """What `rope` says in the fields in which the two differ."""
    theirs = asdict(other)
    return ", ".join(f"{field} {value}" for field, value in asdict(rope).items() if value != theirs[field])
