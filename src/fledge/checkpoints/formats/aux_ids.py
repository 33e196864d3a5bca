"""Which target layers a drafter reads, through two fields and two conventions.

                                      id k means               who writes and reads it
    top level                         the input of block k     vLLM, speculators
    nested in `eagle_config`          the output of block k    SGLang, SpecForge; but some trainers write inputs

The output of block k is the input of block k + 1, so the two differ by one. For nested ids SGLang itself came to
guess: a list that starts with 1 names outputs, because the usual layers counted as outputs start there; any other
list names inputs. We follow it, and warn.
"""

from collections.abc import Sequence

from fledge.checkpoints.finding import Finding, finding
from fledge.models.hf_config import ConfigFields

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_AUX = "num_aux_hidden_states"
DEFAULT_NUM_AUX = 3  # what every engine assumes when a config does not say
_NESTED_FIELD = f"eagle_config.{AUX_IDS}"


def parse_aux_ids(fields: ConfigFields) -> tuple[tuple[int, ...] | None, tuple[Finding, ...]]:
    """Return the ids as block inputs, or None when the config does not say."""
    top, holder = fields.integers(AUX_IDS) or None, fields.nested("eagle_config")
    nested = (holder.integers(AUX_IDS) or holder.integers("layer_ids") or None) if holder else None
    findings: list[Finding] = []
    if top is not None and nested is not None and list(nested) not in (list(top), as_outputs(top)):
        expected = f"{as_outputs(top)} (outputs) to agree with the top level's {list(top)} (inputs)"
        findings.append(finding("aux-ids-contradiction", _NESTED_FIELD, list(nested), expected))
    if top is None and nested is not None:
        outputs = nested[0] == 1
        top = tuple(i + 1 for i in nested) if outputs else nested
        convention, expected = "outputs" if outputs else "inputs", f"top-level {AUX_IDS}"
        findings.append(
            finding("aux-ids-nested", _NESTED_FIELD, list(nested), expected, convention=convention, inputs=list(top))
        )
    if top is not None and list(top) != sorted(set(top)):
        findings.append(finding("aux-ids-order", AUX_IDS, list(top), "ascending ids without repetition"))
    return top, tuple(findings)


def parse_num_aux(
    fields: ConfigFields, aux_ids: tuple[int, ...] | None, *, list_counts: bool
) -> tuple[int, tuple[Finding, ...]]:
    """How many aux states fc joins. `list_counts`: vLLM takes the number from the length of the id list here."""
    declared = next((field for field in (NUM_AUX, "num_aux_layers") if field in fields), None)
    listed = len(aux_ids) if aux_ids else DEFAULT_NUM_AUX
    if declared is not None:
        count = fields.integer(declared)
        if aux_ids is None or count == listed:
            return count, ()
        return count, (finding("aux-count", declared, count, f"{listed}, the number of {AUX_IDS}"),)
    if listed == DEFAULT_NUM_AUX or list_counts:
        return listed, ()
    undeclared = finding(
        "aux-count-undeclared", NUM_AUX, "nothing", str(listed), fixed_by_convert=True, assumed=DEFAULT_NUM_AUX
    )
    return listed, (undeclared,)


def as_outputs(inputs: Sequence[int]) -> list[int] | None:
    """The same layers as block outputs; None when one of them is the embedding, which is no block's output."""
    return None if 0 in inputs else [i - 1 for i in inputs]
