"""Which target layers a drafter reads, through two fields and two conventions.

                                      id k means               who writes and reads it
    top level                         the input of block k     vLLM, speculators
    nested in `eagle_config`          the output of block k    SGLang, SpecForge; but some trainers write inputs

The output of block k is the input of block k + 1, so the two differ by one. For nested ids SGLang itself came to
guess: a list that starts with 1 names outputs, because the usual layers counted as outputs start there; any other
list names inputs. We follow it, and warn.
"""

from collections.abc import Sequence

from fledge.checkpoints.finding import Finding, error, warning
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
        findings.append(
            error(
                "aux-ids-contradiction",
                _NESTED_FIELD,
                found=list(nested),
                expected=f"{as_outputs(top)} (outputs) to agree with the top level's {list(top)} (inputs)",
                advice="vLLM reads the top level and SGLang the nested list: correct the wrong one",
            )
        )
    if top is None and nested is not None:
        outputs = nested[0] == 1
        top = tuple(i + 1 for i in nested) if outputs else nested
        findings.append(
            warning(
                "aux-ids-nested",
                _NESTED_FIELD,
                found=list(nested),
                expected=f"top-level {AUX_IDS}",
                advice=f"read as block {'outputs' if outputs else 'inputs'}, so {list(top)} as inputs; SGLang and vLLM "
                "read the nested field differently; `fledge convert` writes both spellings",
            )
        )
    if top is not None and list(top) != sorted(set(top)):
        findings.append(
            error(
                "aux-ids-order",
                AUX_IDS,
                found=list(top),
                expected="ascending ids without repetition",
                advice="vLLM sorts them silently, so they would not match the columns of fc; reorder ids and columns",
            )
        )
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
        contradiction = error(
            "aux-count",
            declared,
            found=count,
            expected=f"{listed}, the number of {AUX_IDS}",
            advice="correct the wrong one",
        )
        return count, (contradiction,)
    if listed == DEFAULT_NUM_AUX or list_counts:
        return listed, ()
    undeclared = error(
        "aux-count-undeclared",
        NUM_AUX,
        found="nothing",
        expected=str(listed),
        advice=f"vLLM assumes {DEFAULT_NUM_AUX} whatever the length of the id list",
        fixed_by_convert=True,
    )
    return listed, (undeclared,)


def as_outputs(inputs: Sequence[int]) -> list[int] | None:
    """The same layers as block outputs; None when one of them is the embedding, which is no block's output."""
    return None if 0 in inputs else [i - 1 for i in inputs]
