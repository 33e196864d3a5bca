"""The target's hidden states for training: the inputs of the drafter, and of the head that makes the labels.

Both backends define states in the same way. Aux id k is the input of block k (k = number of layers: the output of the
last block), and `final` is the input of the output head, after the final norm. In models of transformers they are
captured by hooks on the blocks and the head, which work for any architecture.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fledge.checkpoints.source import resolve
from fledge.checkpoints.target import is_supported_target, load_target, read_rope_with_fallback, read_target_config
from fledge.devices import DTYPES
from fledge.errors import CheckpointError, describe
from fledge.layers.config import LayerConfig
from fledge.models.config import TargetConfig
from fledge.models.hf_config import MAX_LAYERS, ConfigFields
from fledge.models.target import FAMILIES
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.training.attention import DocumentLayout, TttStorage
from fledge.training.data.examples import PackedBatch, map_tensors
from fledge.training.recipe import TargetSection

_PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class TargetEnds:
    """A target's embedding and output head: all that drafter and teacher need if its states are on disk.

    A constant factor on its logits is in the head.
    """

    embedding_weight: Tensor  # [vocab, hidden]
    head_weight: Tensor  # [vocab, hidden]
    head_bias: Tensor | None = None  # [vocab]

    @classmethod
    def of(cls, model: TargetModel) -> "TargetEnds":
        weights = model.embed_tokens.weight.detach(), model.logits_weight.detach()
        return cls(embedding_weight=weights[0], head_weight=weights[1])


class FledgeCapture:
    """A frozen target of our own. It reads packed rows as they are."""

    def __init__(self, model: TargetModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.ends = TargetEnds.of(model)

    @torch.no_grad()  # not inference mode: autograd keeps these states for the backward pass of what reads them
    def states(self, batch: PackedBatch, aux_layer_ids: tuple[int, ...]) -> TargetStates:
        """Return states [rows, length, ...] of every token, without gradient. Those of padding are arbitrary."""
        storage = TttStorage(DocumentLayout(batch), keep=False)
        return self.model(batch.tokens, batch.positions, storage, aux_layer_ids)  # type: ignore[no-any-return]


class TransformersCapture:
    """A causal language model of transformers. It reads the documents of packed rows separately."""

    def __init__(self, model: Any, config: TargetConfig, where: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = config
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == config.num_layers]
        if not lists:
            raise CheckpointError(f"{where}: no list of {config.num_layers} decoder blocks in {type(model).__name__}")
        # The list with one entry for each layer that has the most parameters.
        self._blocks = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
        self._head: nn.Module = self.model.get_output_embeddings()
        if self._head is None:
            raise CheckpointError(f"{where}: has no output head; a causal language model is needed")
        bias = getattr(self._head, "bias", None)
        self.ends = TargetEnds(
            embedding_weight=self.model.get_input_embeddings().weight.detach(),
            head_weight=self._head.weight.detach(),
            head_bias=None if bias is None else bias.detach(),
        )
        for name, weight in (("output head", self.ends.head_weight), ("embedding", self.ends.embedding_weight)):
            found, expected = tuple(weight.shape), (config.vocab_size, config.hidden_size)
            if found != expected:
                what = f"its {name} is {found}, expected vocabulary and hidden size {expected}"
                raise CheckpointError(f"{where}: {what}; such targets are not supported")
        softcap = getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        if softcap or not self._scale_head():
            reason = f" (final_logit_softcapping {softcap})" if softcap else ""
            raise _not_linear(where, reason)

    @torch.no_grad()  # not inference mode: autograd keeps these states for the backward pass of what reads them
    def states(self, batch: PackedBatch, aux_layer_ids: tuple[int, ...]) -> TargetStates:
        wanted, head = (*aux_layer_ids, "final"), self.ends.head_weight
        out = head.new_zeros(batch.rows, batch.length, len(wanted), self.config.hidden_size)
        for tokens, mask, slots in _documents(batch):
            seen, _ = self._run(tokens, mask, aux_layer_ids)
            for i, name in enumerate(wanted):
                out.flatten(0, 1)[slots, i] = seen[name][mask]
        aux = out[:, :, :-1].flatten(2).contiguous() if aux_layer_ids else None
        return TargetStates(final=out[:, :, -1], aux=aux)

    def _run(
        self, tokens: Tensor, mask: Tensor, aux_layer_ids: tuple[int, ...] = ()
    ) -> tuple[dict[Any, Tensor], Tensor]:
        """Run tokens [documents, length], padded on the right. Returns states by id and "final", and logits.

        The logits are only those of each document's first token, because all would take too much memory.
        """
        seen: dict[Any, Tensor] = {}

        def input_of(k: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[k] = args[0] if args else kwargs["hidden_states"]

        def output_of_last(_module: nn.Module, _args: Any, out: Any) -> None:
            seen[self.config.num_layers] = out if isinstance(out, Tensor) else out[0]

        def input_of_head(_module: nn.Module, args: tuple[Any, ...]) -> Any:
            seen["final"] = args[0]
            return (args[0][:, :1], *args[1:])

        with ExitStack() as hooks:
            hooks.callback(self._head.register_forward_pre_hook(input_of_head).remove)
            hooks.callback(self._blocks[-1].register_forward_hook(output_of_last).remove)
            for k in aux_layer_ids:
                if k < self.config.num_layers:
                    hook = self._blocks[k].register_forward_pre_hook(partial(input_of, k), with_kwargs=True)
                    hooks.callback(hook.remove)
            return seen, self.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits

    @torch.no_grad()
    def _scale_head(self) -> bool:
        """Return whether the logits are head(final), as in `Teacher`. A constant factor is put into the head."""
        ends, head = self.ends, self.ends.head_weight
        tokens = torch.arange(_PROBE_TOKENS, device=head.device)[:, None] % self.config.vocab_size
        seen, logits = self._run(tokens, torch.ones_like(tokens, dtype=torch.bool))
        logits = logits.float()
        bias = None if ends.head_bias is None else ends.head_bias.float()
        ours = F.linear(seen["final"].float(), head.float(), bias)
        factor = (logits * ours).sum() / ours.square().sum()  # least squares
        if abs(float(factor) - 1.0) > 1e-3:
            scaled = map_tensors(ends, lambda x: x * factor.to(head.dtype))
            self.ends = replace(scaled, embedding_weight=ends.embedding_weight)
        tolerance = (1e-4 if head.dtype == torch.float32 else 0.02) * logits.abs().max()
        return bool(((logits - factor * ours).abs() <= tolerance).all())


CaptureModel = FledgeCapture | TransformersCapture


def target_config(section: TargetSection) -> TargetConfig:
    """Return the target's config; `dtype` is that of the run."""
    directory = resolve(section.path)
    if is_supported_target(directory):
        config = read_target_config(directory)
    elif section.backend == "fledge":
        model_type = ConfigFields.from_file(directory / "config.json").text("model_type")
        what = f"model_type '{model_type}' is not one of {', '.join(FAMILIES)}"
        raise CheckpointError(f"{directory}: {what}; set target.backend to auto or transformers")
    else:
        config = _foreign_config(directory, trust_remote_code=section.trust_remote_code)
    return config if section.dtype == "auto" else replace(config, dtype=section.dtype)


def open_target(section: TargetSection, device: torch.device | str) -> CaptureModel:
    """Load the target: with our own code if the family is supported, else with transformers."""
    directory, config = resolve(section.path), target_config(section)
    dtype = DTYPES[config.dtype]
    if config.logits_softcap is not None:
        raise _not_linear(str(directory), f" (final_logit_softcapping {config.logits_softcap})")
    if config.family in FAMILIES and section.backend != "transformers":
        return FledgeCapture(load_target(directory, dtype=dtype, device=device))
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    with _in_one_line(directory, "cannot be loaded by transformers"):
        remote = section.trust_remote_code
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=remote)
    return TransformersCapture(model.to(device), config, str(directory))


def _foreign_config(directory: Path, *, trust_remote_code: bool) -> TargetConfig:
    """Return the config of a model of any family; `layer` has the sizes for a drafter's ordinary layer."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

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
    values = {name: value for name, value in config.to_dict().items() if value is not None}
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=number("head_dim", default=hidden // heads),
        norm_eps=float(number("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6)),
        rope=read_rope_with_fallback(ConfigFields(values, str(directory / "config.json"))),
    )
    if (layers := number("num_hidden_layers", "n_layer")) > MAX_LAYERS:
        raise CheckpointError(f"{directory / 'config.json'}: {layers} layers, expected at most {MAX_LAYERS}")
    eos = getattr(config, "eos_token_id", None)
    dtype = str(getattr(whole, "dtype", None) or getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return TargetConfig(
        family=config.model_type,
        layer=layer,
        num_layers=layers,
        vocab_size=number("vocab_size"),
        max_positions=number("max_position_embeddings", "n_positions", "max_seq_len", default=4096),
        tied_head=bool(getattr(whole, "tie_word_embeddings", False)),
        dtype=dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16",
        bos_id=getattr(config, "bos_token_id", None),
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
    )


def _not_linear(where: str, reason: str) -> CheckpointError:
    what = f"its logits are not a linear function of its final hidden state{reason}"
    return CheckpointError(f"{where}: {what}; such a target cannot teach a drafter here")


def _documents(batch: PackedBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the documents of packed rows, longest first, in groups of at most as many slots as the batch has.

    A group is tokens [documents, length] padded on the right, the mask of the real tokens, and the slot of each of
    these in the flat batch.
    """
    document, tokens = batch.document.flatten(), batch.tokens.flatten()
    real = (document >= 0).nonzero().squeeze(1)
    number = real // batch.length * (batch.length + 1) + document[real]
    _, counts = torch.unique_consecutive(number, return_counts=True)
    left = sorted(torch.split(real, counts.tolist()), key=len, reverse=True)
    while left:
        count = batch.rows * batch.length // len(left[0])
        chosen, left = left[:count], left[count:]
        masks = [torch.ones_like(slots, dtype=torch.bool) for slots in chosen]
        padded, mask = (pad_sequence(x, batch_first=True) for x in ([tokens[slots] for slots in chosen], masks))
        yield padded, mask, torch.cat(chosen)


@contextmanager
def _in_one_line(directory: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers fails in as many ways as there are models
        raise CheckpointError(f"{directory}: {what}: {describe(error)}") from None
