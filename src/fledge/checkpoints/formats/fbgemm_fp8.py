"""FBGEMM's FP8, as Meta and transformers write it: a scale for each row, and activations by token.

There, scales of tokens have an upper bound (`activation_scale_ub`, 1,200 in the published ones), which cuts off what is
larger; here they have none.
"""

from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, names_of
from fledge.checkpoints.formats.schemes import EightBits
from fledge.models.hf_config import ConfigFields


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") != "fbgemm_fp8":
        return None
    is_dense = names_of(quantization, "modules_to_not_convert")
    scheme = EightBits(kind="fp8", block="row", activations="token")
    return Quantized(name="fbgemm_fp8", scheme_of=lambda name, _held: None if is_dense(name) else scheme)
