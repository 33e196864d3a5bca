"""What can be wrong, or suspicious, about a drafter's checkpoint: every finding by its name, and what to do about it.

Names are stable: docs/checkpoints.md explains each, and tests/broken_checkpoints.py has a checkpoint for each.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Severity(StrEnum):
    ERROR = "error"  # the checkpoint does not mean what its files say, or does not fit its target
    WARNING = "warning"  # it works, but engines disagree about it or acceptance will suffer


_OTHER_TARGET = "this drafter was made for another target"
_ERRORS = {
    # tensors
    "model-prefix": "vLLM refuses them",
    "fc-norm-missing": "fc_norm is true, but vLLM would leave the norms at ones; fetch the complete checkpoint",
    "input-norm-missing": "norm_before_fc is true, but vLLM would leave the norm at ones; fetch the whole checkpoint",
    "d2t-missing": "draft_vocab_size is reduced, and vLLM would take draft ids for token ids",
    "lm-head-missing": "draft_vocab_size is reduced, and the target's head has other rows",
    "tensor-missing": "vLLM would use uninitialised memory; fetch the complete checkpoint",
    "fc-norm-flag-off": "set fc_norm (and, for EAGLE 3.1, norm_output) at the top level of config.json as the drafter "
    "was trained",
    "input-norm-flag-off": "set norm_before_fc in config.json as the drafter was trained; vLLM would silently skip the "
    "norm",
    "tensor-unexpected": "config.json describes a drafter without it; correct num_hidden_layers or the class",
    "fc-width": "check target_hidden_size, hidden_size and num_aux_hidden_states",
    "embedding-shape": "check vocab_size and hidden_size",
    "head-shape": "check draft_vocab_size and hidden_size",
    "d2t-shape": "check draft_vocab_size",
    "tensor-shape": "check hidden_size, intermediate_size, head_dim and the numbers of heads",
    "weights-not-finite": "the training run diverged or the file is damaged; use an earlier checkpoint",
    # the draft vocabulary
    "d2t-without-reduction": "{advice}",
    "d2t-dtype": "store integer offsets: d2t[i] = target id - i",
    "d2t-absolute": "subtract the draft id from each: d2t[i] = target id - i",
    "d2t-out-of-range": "the map belongs to another vocabulary",
    "d2t-not-injective": "rebuild the map",
    "t2d-mismatch": "rebuild both maps",
    # the config
    "flag-nested": "vLLM does not read it here, and would run a different drafter",
    "flag-contradiction": "remove the wrong one",
    "bias-flag-off": "vLLM drops the bias without a word",
    "bias-missing": "vLLM would use uninitialised memory for it",
    "qk-norm-architecture": "vLLM's Llama class has no q/k norms and refuses the tensors",
    "shared-embedding-width": "fetch the complete checkpoint; vLLM would run with an uninitialised or misshapen matrix",
    "shared-head-width": "fetch the complete checkpoint; vLLM would run with an uninitialised or misshapen matrix",
    "aux-ids-order": "vLLM sorts them silently, so they would not match the columns of fc; reorder ids and columns",
    "aux-ids-contradiction": "vLLM reads the top level and SGLang the nested list: correct the wrong one",
    "aux-count": "correct the wrong one",
    "aux-count-undeclared": "vLLM assumes {assumed} whatever the length of the id list",
    # against a target
    "vocabulary-size": _OTHER_TARGET,
    "target-hidden-size": _OTHER_TARGET,
    "aux-ids-out-of-range": "the target has {layers} layers: this drafter was made for another",
    "aux-ids-required": "the default {default} does not suit this drafter and a target of {layers} layers",
}
_WARNINGS = {
    "architecture-unknown": "read as the EAGLE drafter that its tensors look like; check how it was trained",
    "aux-ids-omitted": "the default is used, inputs {default}; `fledge convert --target` writes it down",
    "aux-ids-nested": "read as block {convention}, so {inputs} as inputs; SGLang and vLLM read the nested field "
    "differently; `fledge convert` writes both spellings",
    "aux-ids-look-like-outputs": "they are read as inputs, but these are the usual layers counted as outputs: check "
    "the trainer",
    "aux-ids-shifted-twice": "one above the usual layers: inputs may have been taken for outputs on the way; check the "
    "trainer",
    "max-positions-short": "acceptance collapses on longer inputs, and vLLM drafts token 0 there",
    "max-positions-omitted": "{default} is used, the default of LlamaConfig; say so in the config",
    "rope-differs": "right only if the drafter was trained so",
    "rope-theta-omitted": "{default:g} is used, the default of its class; say so in the config",
    "norm-before-residual-omitted": "read as true, as vLLM does; versions of speculators have meant false: check how "
    "it was trained",
    "verifier-differs": "made for {target}",
    "d2t-all-zero": "it may never have been filled in",
    "d2t-not-sorted": "equal logits resolve to the lowest draft id here and to the lowest target id in vLLM",
    "fc-bias": "Fledge applies it, but vLLM drops it without a word, so acceptance will differ there",
    "dtype-differs": "engines that go by the config cast the weights",
    "mixed-dtypes": "all weights are cast to one dtype when loaded",
}
NAMES = (*_ERRORS, *_WARNINGS)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, where, what was expected and what to do."""

    severity: Severity
    name: str
    file: str  # within the checkpoint directory
    field: str  # a config field or a tensor name
    found: str
    expected: str
    advice: str
    fixed_by_convert: bool = False  # `fledge convert` writes what is evidently meant

    def message(self, directory: Path | None = None) -> str:
        """One line, with the file's full path if its directory is given."""
        file = directory / self.file if directory else self.file
        advice = self.advice + ("; `fledge convert` fixes this" if self.fixed_by_convert else "")
        return f"{file}: {self.field}: found {self.found}, expected {self.expected}; {advice} [{self.name}]"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "severity": str(self.severity), "message": self.message()}


def finding(
    name: str,
    field: str,
    found: object,
    expected: str,
    *,
    file: str = "config.json",
    fixed_by_convert: bool = False,
    **details: object,
) -> Finding:
    """Make the finding of this name; `details` are what its advice leaves open."""
    return Finding(
        severity=Severity.ERROR if name in _ERRORS else Severity.WARNING,
        name=name,
        file=file,
        field=field,
        found=str(found),
        expected=expected,
        advice=(_ERRORS.get(name) or _WARNINGS[name]).format(**details),
        fixed_by_convert=fixed_by_convert,
    )
