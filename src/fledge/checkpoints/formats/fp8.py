"""`quant_method: fp8`: DeepSeek's blocks of 128 x 128, as in Qwen3-FP8 too, or one scale for each matrix.

Where there is one for each matrix, activations are in FP8 too, with the scale that is stored (`activation_scheme:
static`) or with one for each token (`dynamic`), as vLLM has it. With blocks they stay as they are.
"""

from collections.abc import Mapping

from fledge.checkpoints.formats.dense import WeightFormat
from fledge.checkpoints.formats.quantized import Quantized, Scheme, names_of
from fledge.checkpoints.formats.schemes import Block, EightBits
from fledge.checkpoints.tensors import TensorInfo
from fledge.kernels.quantized_linear import Activations
from fledge.models.hf_config import ConfigFields

_INVERSE = "weight_scale_inv"  # so called, but multiplied with
_ACTIVATIONS: dict[str, Activations] = {"dynamic": "token", "static": "tensor"}


def weight_format(quantization: ConfigFields) -> WeightFormat | None:
    if quantization.values.get("quant_method") != "fp8":
        return None
    if (found := quantization.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise quantization.error("fmt", found, "e4m3")
    block: Block = "tensor"
    if "weight_block_size" in quantization:
        shape = quantization.integers("weight_block_size") or ()
        if len(shape) != 2 or min(shape) < 1:
            raise quantization.error("weight_block_size", quantization.values["weight_block_size"], "two numbers")
        block = shape[0], shape[1]
    is_dense = names_of(quantization, "modules_to_not_convert", "ignored_layers")
    activations: Activations | None = None
    if block == "tensor":
        if (found := quantization.text("activation_scheme", "dynamic")) not in _ACTIVATIONS:
            raise quantization.error("activation_scheme", found, " or ".join(_ACTIVATIONS))
        activations = _ACTIVATIONS[found]

    def scheme_of(name: str, held: Mapping[str, TensorInfo]) -> Scheme | None:
        # Of one scale for each matrix there are two spellings, and of one for its input.
        scale = _INVERSE if _INVERSE in held or block != "tensor" else "weight_scale"
        input_scale = "activation_scale" if "activation_scale" in held else "input_scale"
        scheme = EightBits(kind="fp8", block=block, scale=scale, activations=activations, input_scale=input_scale)
        return None if is_dense(name) else scheme

    return Quantized(name="fp8", scheme_of=scheme_of)
