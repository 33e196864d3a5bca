"""Capture from any causal language model that transformers can run, whatever its blocks look like.

States are taken where they pass: in front of each wanted block, behind the last one, and in front of the output head.
What a model calls its hidden states, and whether the last of them is normed, therefore does not matter.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fledge.errors import CheckpointError, CheckpointWarning
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import ConfigFields, read_rope
from fledge.models.target.decoder import TargetStates
from fledge.training.capture import TargetEnds
from fledge.training.data.packing import PackedBatch, map_tensors

_PROBE_TOKENS = 8


def foreign_config(directory: Path, *, trust_remote_code: bool = False) -> TargetConfig:
    """Describe a model of any family; `layer` is the shape a drafter of one ordinary layer should have for it."""
    with _in_one_line(directory, "has a config that transformers cannot read"):
        whole = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if getattr(whole, "is_encoder_decoder", False):
        raise CheckpointError(f"{directory}: is an encoder-decoder; a drafter needs a decoder-only language model")
    config = whole.get_text_config(decoder=True)

    def number(*names: str, default: Any = None) -> Any:
        for name in names:
            if (value := getattr(config, name, None)) is not None:
                return value
        if default is None:
            raise CheckpointError(f"{directory / 'config.json'}: none of {', '.join(names)} is there")
        return default

    hidden, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads", default=heads)
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=number("head_dim", default=hidden // heads),
        norm_eps=float(number("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6)),
        rope=_rope(config, directory),
    )
    eos = getattr(config, "eos_token_id", None)
    dtype = str(getattr(whole, "dtype", None) or getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return TargetConfig(
        family=config.model_type,
        layer=layer,
        num_layers=number("num_hidden_layers", "n_layer"),
        vocab_size=number("vocab_size"),
        max_positions=number("max_position_embeddings", "n_positions", "max_seq_len", default=4096),
        tied_head=bool(getattr(whole, "tie_word_embeddings", False)),
        dtype=dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16",
        bos_id=getattr(config, "bos_token_id", None),
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
    )


def _rope(config: Any, directory: Path) -> RopeConfig:
    """The rotation of the target's global attention. transformers 5 nests it, for some families by layer type."""
    values = {k: v for k, v in config.to_dict().items() if v is not None}
    nested = values.get("rope_parameters")
    if isinstance(nested, dict) and "full_attention" in nested:
        values["rope_parameters"] = nested["full_attention"]
    where = str(directory / "config.json")
    try:
        return read_rope(ConfigFields(values, where))
    except CheckpointError as error:
        parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
        theta = float(parameters.get("rope_theta") or values.get("rope_theta") or RopeConfig.theta)
        warnings.warn(
            f"{error}; the drafter gets plain rotary positions with theta {theta:g}", CheckpointWarning, stacklevel=2
        )
        return RopeConfig(theta=theta)


class TransformersCapture:
    """A causal language model of transformers. Documents are unpacked from their rows, and their states put back."""

    def __init__(self, model: Any, config: TargetConfig, where: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self._blocks = _find_blocks(model, config.num_layers, where)
        self._head: nn.Module = self.model.get_output_embeddings()
        if self._head is None:
            raise CheckpointError(f"{where}: has no output head; a causal language model is needed")
        if softcap := getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
            raise self._not_linear(where, f" (final_logit_softcapping {softcap})")
        bias = getattr(self._head, "bias", None)
        self.ends = TargetEnds(
            embedding_weight=self.model.get_input_embeddings().weight.detach(),
            head_weight=self._head.weight.detach(),
            head_bias=None if bias is None else bias.detach(),
        )
        for name, weight in (("output head", self.ends.head_weight), ("embedding", self.ends.embedding_weight)):
            if tuple(weight.shape) != (config.vocab_size, config.hidden_size):
                raise CheckpointError(
                    f"{where}: its {name} is {tuple(weight.shape)}, expected vocabulary and hidden size "
                    f"{(config.vocab_size, config.hidden_size)}; such targets are not supported"
                )
        self._scale_head(where)

    @classmethod
    def load(
        cls, directory: Path, config: TargetConfig, *, device: torch.device, trust_remote_code: bool = False
    ) -> "TransformersCapture":
        with _in_one_line(directory, "cannot be loaded by transformers"):
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=trust_remote_code,
            )
        return cls(model.to(device), config, str(directory))

    @torch.no_grad()  # not inference mode: autograd keeps these states for the backward pass of what reads them
    def states(self, batch: PackedBatch, aux_layer_ids: tuple[int, ...]) -> TargetStates:
        hidden, wanted = self.config.hidden_size, (*aux_layer_ids, "final")
        out = torch.zeros(
            batch.rows * batch.length, len(wanted), hidden, dtype=self.ends.dtype, device=self.ends.device
        )
        for tokens, mask, slots in _documents(batch):
            seen, _ = self._run(tokens, mask, aux_layer_ids, keep_logits=False)
            for i, name in enumerate(wanted):
                out[slots, i] = seen[name][mask]
        aux, final = out[:, :-1].flatten(1), out[:, -1]
        lead = (batch.rows, batch.length)
        return TargetStates(
            final=final.reshape(*lead, -1), aux=aux.reshape(*lead, -1).contiguous() if aux_layer_ids else None
        )

    def _run(
        self, tokens: Tensor, mask: Tensor, aux_layer_ids: tuple[int, ...], *, keep_logits: bool
    ) -> tuple[dict[Any, Tensor], Tensor]:
        """Run tokens [documents, length], padded on the right. Returns states by id and "final", and the logits."""
        seen: dict[Any, Tensor] = {}

        def input_of_block(k: int) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[k] = args[0] if args else kwargs["hidden_states"]

            return hook

        def output_of_last_block(_module: nn.Module, _args: Any, out: Any) -> None:
            seen[self.config.num_layers] = out if isinstance(out, Tensor) else out[0]

        def input_of_head(_module: nn.Module, args: tuple[Any, ...]) -> Any:
            seen["final"] = args[0]
            # The logits of the whole vocabulary are not needed here; those of one position cost nothing.
            return args if keep_logits else (args[0][:, :1], *args[1:])

        handles = [self._head.register_forward_pre_hook(input_of_head)]
        for k in aux_layer_ids:
            if k == self.config.num_layers:
                handles.append(self._blocks[-1].register_forward_hook(output_of_last_block))
            else:
                handles.append(self._blocks[k].register_forward_pre_hook(input_of_block(k), with_kwargs=True))
        try:
            out = self.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen, out.logits

    @torch.no_grad()
    def _scale_head(self, where: str) -> None:
        """Make sure that head(final) are the logits: teachers compute them so. A constant factor is put in the head."""
        ends = self.ends
        tokens = torch.arange(_PROBE_TOKENS, device=ends.device)[None] % self.config.vocab_size
        seen, logits = self._run(tokens, torch.ones_like(tokens, dtype=torch.bool), (), keep_logits=True)
        bias = None if ends.head_bias is None else ends.head_bias.float()
        ours = F.linear(seen["final"].float(), ends.head_weight.float(), bias)
        factor = (logits.float() * ours).sum() / ours.square().sum()  # least squares
        tolerance = (1e-4 if ends.dtype == torch.float32 else 0.02) * logits.float().abs().max()
        if not bool(((logits.float() - factor * ours).abs() <= tolerance).all()):
            raise self._not_linear(where)
        if abs(float(factor) - 1.0) > 1e-3:
            scaled = map_tensors(ends, lambda x: x * factor.to(ends.dtype))
            self.ends = replace(scaled, embedding_weight=ends.embedding_weight)

    @staticmethod
    def _not_linear(where: str, reason: str = "") -> CheckpointError:
        return CheckpointError(
            f"{where}: its logits are not a linear function of its final hidden state{reason}; "
            "such a target cannot teach a drafter here"
        )


def _documents(batch: PackedBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The documents of packed rows, longest first, in groups of at most as many slots as the batch has.

    Yields tokens [documents, length] padded on the right, the mask of the real ones, and for each of these its slot in
    the flat batch.
    """
    flat = batch.document.flatten()
    real = (flat >= 0).nonzero().squeeze(1)
    row = torch.arange(batch.rows, device=flat.device).repeat_interleave(batch.length)
    _, counts = torch.unique_consecutive((row * (batch.length + 1) + flat)[real], return_counts=True)
    starts = counts.cumsum(0) - counts
    order = counts.argsort(descending=True, stable=True)
    room, at, tokens = batch.rows * batch.length, 0, batch.tokens.flatten()
    while at < len(order):
        longest = int(counts[order[at]])
        chosen = order[at : at + room // longest]
        at += len(chosen)
        column = torch.arange(longest, device=flat.device)
        mask = column < counts[chosen, None]
        slots = real[(starts[chosen, None] + column)[mask]]
        padded = tokens.new_zeros(mask.shape)
        padded[mask] = tokens[slots]
        yield padded, mask, slots


def _find_blocks(model: nn.Module, num_layers: int, where: str) -> nn.ModuleList:
    """The list of decoder blocks: of the lists with one entry for each layer, the one with the most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise CheckpointError(f"{where}: no list of {num_layers} decoder blocks in {type(model).__name__}")
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


@contextmanager
def _in_one_line(directory: Path, what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # transformers fails in as many ways as there are models
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{directory}: {what}: {reason}") from None
