"""A trained pair made larger without changing what it says: real acceptance, measured at the cost of a large shape.

Extra width, heads and layers are computed in full and add nothing:

    residual stream     the small model's dimensions first, zeros after them
    extra layers        `o_proj` and `down_proj` are zero, so they add zero to the stream; the rest of them is random
    extra heads         random; their columns of `o_proj` are zero. A small KV head is repeated where its query heads
                        fill several groups of the large shape
    wider heads         a head n times as wide has every n-th rotary frequency of the narrow one, exactly: pair i of
                        the small head becomes pair n * i, the queries' other dimensions are zero
    norms               the mean of squares is over more dimensions: weights times sqrt(small / large), eps times
                        small / large
    larger vocabulary   one spare dimension of the stream carries a constant, to which only the head's rows of the
                        new ids listen, and give them logits far below all others
    drafter's head      rows repeated, and the draft vocabulary with them, so that copies mean the same token

In float32 the large pair gives the small pair's tokens. In 16 bits the rescaled weights are rounded anew (by at most
0.4 % each), so it gives its own, nearly the same.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fledge.bench.shapes import SHAPES, empty_model
from fledge.errors import ConfigError
from fledge.layers.attention import Attention
from fledge.layers.config import LayerConfig
from fledge.layers.mlp import SwiGLU
from fledge.layers.norm import RMSNorm
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.eagle3 import Eagle3Drafter
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetModel

RANDOM_STD = 0.02
# So small that no norm notices it, and the logits of new ids are below -10^6 while states stay below 10^6.
SPARE = 2.0**-14
SPARE_HEAD = -(2.0**60)


@dataclass(frozen=True, kw_only=True)
class LayerMap:
    """Where the parts of a small layer lie in a large one."""

    small: LayerConfig
    large: LayerConfig

    @property
    def hidden(self) -> Tensor:
        return torch.arange(self.small.hidden_size)

    @property
    def dims(self) -> Tensor:
        """[small head_dim]: halves stay halves, since dimension i is rotated with i + head_dim / 2."""
        half = torch.arange(self.small.head_dim // 2) * (self.large.head_dim // self.small.head_dim)
        return torch.cat([half, self.large.head_dim // 2 + half])

    @property
    def query_heads(self) -> list[int]:
        """The large head of each small query head."""
        of_small, of_large = _group(self.small), _group(self.large)
        places = []
        for head in range(self.small.num_heads):
            kv, number = divmod(head, of_small)
            group = kv * _copies(self.small, self.large) + number // of_large
            places.append(group * of_large + number % of_large)
        return places

    def kv_rows(self, copy: int) -> Tensor:
        copies = _copies(self.small, self.large)
        return self._rows([kv * copies + copy for kv in range(self.small.num_kv_heads)])

    def _rows(self, heads: list[int]) -> Tensor:
        return torch.cat([head * self.large.head_dim + self.dims for head in heads])

    def fill_block(self, large: Any, small: Any, inputs: Tensor | None = None) -> None:
        """A decoder layer, or a drafter's first. Wants random matrices, and leaves the rest so.

        `inputs`: where the dimensions that the small layer's attention reads lie, if they are not those of its stream.
        """
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            if hasattr(small, norm):
                self.fill_norm(getattr(large, norm), getattr(small, norm))
        self._fill_attention(large.self_attn, small.self_attn, self.hidden if inputs is None else inputs)
        self._fill_mlp(large.mlp, small.mlp)

    def _fill_attention(self, large: Attention, small: Attention, inputs: Tensor) -> None:
        old, new, config = small.qkv_proj.weight, large.qkv_proj.weight, self.small
        query, key, value = torch.split(old, [config.query_size, config.kv_size, config.kv_size])
        width, query_rows = self.large.head_dim, self._rows(self.query_heads)
        for head in self.query_heads:
            new[head * width : (head + 1) * width] = 0  # dimensions that the small head has not must not be compared
        # The scale makes up for that of the larger head's softmax.
        _put(new, query_rows, inputs, query, math.sqrt(width / config.head_dim))
        for copy in range(_copies(self.small, self.large)):
            _put(new, self.large.query_size + self.kv_rows(copy), inputs, key)
            _put(new, self.large.query_size + self.large.kv_size + self.kv_rows(copy), inputs, value)
        large.o_proj.weight.zero_()
        _put(large.o_proj.weight, self.hidden, query_rows, small.o_proj.weight)

    def _fill_mlp(self, large: SwiGLU, small: SwiGLU) -> None:
        rows = torch.arange(self.small.intermediate_size)
        gate, up = small.gate_up_proj.weight.chunk(2)
        _put(large.gate_up_proj.weight, rows, self.hidden, gate)
        _put(large.gate_up_proj.weight, self.large.intermediate_size + rows, self.hidden, up)
        large.down_proj.weight.zero_()
        _put(large.down_proj.weight, self.hidden, rows, small.down_proj.weight)

    def fill_norm(self, large: RMSNorm, small: RMSNorm, inputs: Tensor | None = None) -> None:
        """`inputs`: where the small norm's dimensions lie, if they are not the first."""
        scaled = small.weight.float() * math.sqrt(self.small.hidden_size / self.large.hidden_size)
        large.weight.zero_()
        large.weight[self.hidden if inputs is None else inputs] = _like(scaled, large.weight)


def _large_layer(small: LayerConfig, shape: LayerConfig, *, constant: float = 0.0) -> LayerConfig:
    """The shape's layer with the small one's rotation and eps. Raises ConfigError if the small one does not fit in.

    `constant` is in one more dimension of the stream: what it adds to the mean of squares is taken off eps.
    """
    if small.qk_norm or small.qkv_bias or small.output_bias or small.mlp_bias:
        raise ConfigError("inflate: layers with biases or with norms on queries and keys cannot be enlarged")
    if shape.head_dim % small.head_dim:
        raise ConfigError(
            f"inflate: heads of {small.head_dim} dimensions cannot become heads of {shape.head_dim}: "
            "only a multiple has the same rotary frequencies among its own"
        )
    if shape.head_dim > small.head_dim and small.rope.type == "yarn":
        raise ConfigError("inflate: yarn's frequencies depend on the head's size; heads cannot grow with it")
    for name in ("hidden_size", "intermediate_size"):
        has, most = getattr(small, name), getattr(shape, name)
        if has > most:
            raise ConfigError(f"inflate: {name} is {has}, more than the {most} of the shape")
    if _copies(small, shape) * small.num_kv_heads > shape.num_kv_heads:
        raise ConfigError(
            f"inflate: {small.num_heads} query heads on {small.num_kv_heads} KV heads do not fit into "
            f"{shape.num_heads} on {shape.num_kv_heads}"
        )
    eps = (small.norm_eps * small.hidden_size - constant**2) / shape.hidden_size
    return replace(shape, norm_eps=eps, rope=small.rope)


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """What an enlarged target will be."""

    small: TargetConfig
    large: TargetConfig
    seed: int

    @classmethod
    def of(
        cls, small: TargetConfig, shape: TargetConfig, dtype: torch.dtype, *, pad_vocab: bool = True, seed: int = 0
    ) -> "TargetPlan":
        if small.family != "llama" or small.sliding_windows:
            raise ConfigError(f"inflate: the target is of family '{small.family}'; only llama can be enlarged")
        if small.num_layers > shape.num_layers:
            raise ConfigError(
                f"inflate: the target has {small.num_layers} layers, more than the {shape.num_layers} of the shape; "
                f"shapes with enough: {', '.join(n for n, s in SHAPES.items() if s.num_layers >= small.num_layers)}"
            )
        # float16 ends at 65,504, far too low for what the head's new rows need.
        room = shape.hidden_size > small.hidden_size and dtype != torch.float16
        vocab = max(small.vocab_size, shape.vocab_size) if pad_vocab and room else small.vocab_size
        constant = SPARE if vocab > small.vocab_size else 0.0
        large = replace(
            shape,
            layer=_large_layer(small.layer, shape.layer, constant=constant),
            vocab_size=vocab,
            max_positions=small.max_positions,
            tied_head=False,
            dtype=str(dtype).removeprefix("torch."),
            bos_id=small.bos_id,
            eos_ids=small.eos_ids,
        )
        return cls(small=small, large=large, seed=seed)

    @property
    def map(self) -> LayerMap:
        return LayerMap(small=self.small.layer, large=self.large.layer)

    @property
    def places(self) -> list[int]:
        """The large layer that does what each small one does, and has its input: spread evenly, so that depths stay
        comparable. The last is that of the output.
        """
        count = self.small.num_layers
        return [layer * self.large.num_layers // count for layer in range(count + 1)]

    def fill_layer(self, large: Any, index: int, small: TargetModel) -> None:
        """Make `large` layer `index` of the large target. Its old values do not matter."""
        _randomise(large, self.seed * 1000 + index)
        if index in self.places:
            self.map.fill_block(large, small.layers[self.places.index(index)])
        else:
            large.self_attn.o_proj.weight.zero_()
            large.mlp.down_proj.weight.zero_()

    def fill_ends(self, large: TargetModel, small: TargetModel) -> None:
        """Embedding and head [vocab, hidden], and the final norm."""
        embedding, norm, head = large.embed_tokens.weight, large.norm, large.lm_head.weight
        vocab, width = small.embed_tokens.weight.shape
        embedding.zero_()
        embedding[:vocab, :width] = _like(small.embed_tokens.weight, embedding)
        _random_matrix(head, self.seed * 1000 + 998)
        head[:vocab, :width] = _like(small.lm_head.weight, head)
        self.map.fill_norm(norm, small.norm)
        if self.large.vocab_size > self.small.vocab_size:
            embedding[:, width] = SPARE
            norm.weight[width] = 1
            head[:vocab, width] = 0
            head[vocab:, width] = SPARE_HEAD


def inflate_target(
    small: TargetModel, shape: TargetConfig, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> TargetModel:
    """Return `small` at the size of `shape`, built on `device` without a second copy."""
    plan = TargetPlan.of(small.config, shape, dtype, seed=seed)
    large = empty_model(lambda: TargetModel(plan.large), dtype, device)
    with torch.no_grad():
        for index, layer in enumerate(large.layers):
            plan.fill_layer(layer, index, small)
        plan.fill_ends(large, small)
    return large.eval().requires_grad_(False)


def inflate_drafter(
    small: Drafter, small_target: TargetModel, large_target: TargetModel, *, shape: TargetConfig, seed: int = 0
) -> Drafter:
    """Return the drafter of `small_target` for `large_target`, which `inflate_target` made of it."""
    config = drafter_config(small.config, small_target.config, large_target.config, shape)
    weight = large_target.embed_tokens.weight
    large = empty_model(lambda: build(config), weight.dtype, weight.device)
    assert isinstance(large, Eagle3Drafter)
    assert isinstance(small, Eagle3Drafter)
    with torch.no_grad():
        _fill_drafter(large, small, seed)
    large.share_with(large_target)
    return large.eval().requires_grad_(False)


def drafter_config(
    small: DrafterConfig, small_target: TargetConfig, large_target: TargetConfig, shape: TargetConfig
) -> DrafterConfig:
    """A drafter with one layer of the shape (or as many as the small one has), for the enlarged target."""
    if small.architecture is not Architecture.EAGLE3:
        raise ConfigError("inflate: the drafter is EAGLE-1; only EAGLE-3 and EAGLE-3.1 can be enlarged")
    if small.hidden_size != small.target_hidden_size or small.aux_layer_ids is None:
        raise ConfigError(
            f"inflate: the drafter is {small.hidden_size} wide and its target {small.target_hidden_size}; "
            "only a drafter as wide as its target can be enlarged"
        )
    places = TargetPlan(small=small_target, large=large_target, seed=0).places
    padded = large_target.vocab_size > small_target.vocab_size
    # A head of its own where rows are repeated; not the whole vocabulary, which would need no map from copies to ids.
    draft_vocab = max(small.draft_vocab_size, (large_target.vocab_size - 1) // 64 * 64)
    return replace(
        small,
        layer=_large_layer(small.layer, shape.layer),
        vocab_size=large_target.vocab_size,
        draft_vocab_size=draft_vocab if padded else small.draft_vocab_size,
        own_head=small.own_head or padded,
        target_hidden_size=large_target.hidden_size,
        aux_layer_ids=tuple(places[i] for i in small.aux_layer_ids),
        dtype=large_target.dtype,
    )


def _fill_drafter(large: Eagle3Drafter, small: Eagle3Drafter, seed: int) -> None:
    place = LayerMap(small=small.config.layer, large=large.config.layer)
    width, wide = small.config.hidden_size, large.config.target_hidden_size
    for number, module in enumerate([large.fusion, *large.layers]):
        _randomise(module, seed * 1000 + 999_000 + number)
    starts = [i * wide for i in range(small.config.num_aux_states)]
    inputs = torch.cat([start + place.hidden for start in starts])
    new, old = large.fusion, small.fusion
    new.fc.weight[width:] = 0
    for start in starts:  # what the target's spare dimension carries is for its head alone
        new.fc.weight[:, start + width : start + wide] = 0
    _put(new.fc.weight, place.hidden, inputs, old.fc.weight)
    if new.fc.bias is not None:
        new.fc.bias.zero_()
        new.fc.bias[:width] = _like(old.fc.bias, new.fc.bias)
    place.fill_norm(large.norm, small.norm)
    for large_norm, small_norm in zip(new.fc_norm or (), old.fc_norm or (), strict=True):
        place.fill_norm(large_norm, small_norm)  # type: ignore[arg-type]
    if new.input_norm is not None and old.input_norm is not None:
        place.fill_norm(new.input_norm, old.input_norm, inputs)
    both = torch.cat([place.hidden, large.config.hidden_size + place.hidden])
    for number, (large_layer, small_layer) in enumerate(zip(large.layers, small.layers, strict=True)):
        place.fill_block(large_layer, small_layer, both if number == 0 else None)
    if large.embed_tokens is not None and small.embed_tokens is not None:
        large.embed_tokens.weight.zero_()
        kept = large.embed_tokens.weight[: small.config.vocab_size, :width]
        kept.copy_(_like(small.embed_tokens.weight, kept))
    if large.lm_head is not None and small.lm_head is not None:
        # Every row of the small head as often as there is room, and the draft vocabulary likewise, ascending.
        rows, small_rows = large.config.draft_vocab_size, small.config.draft_vocab_size
        source = (torch.arange(rows) * small_rows // rows).to(small.lm_head.weight.device)
        _random_matrix(large.lm_head.weight, seed * 1000 + 999_999)
        large.lm_head.weight[:, :width] = _like(small.lm_head.weight[source], large.lm_head.weight)
        if large.vocabulary is not None:
            ids = source if small.vocabulary is None else small.vocabulary.target_ids[source]
            large.vocabulary.d2t.copy_(ids - torch.arange(rows, device=ids.device))


def _group(config: LayerConfig) -> int:
    """Query heads for each KV head."""
    return config.num_heads // config.num_kv_heads


def _copies(small: LayerConfig, large: LayerConfig) -> int:
    """Large KV heads that one small KV head's query heads fill."""
    return -(-_group(small) // _group(large))


def _like(values: Tensor, other: Tensor) -> Tensor:
    return values.detach().to(device=other.device, dtype=other.dtype)


def _put(large: Tensor, rows: Tensor, columns: Tensor, small: Tensor, scale: float = 1.0) -> None:
    values = small.float() * scale if scale != 1.0 else small
    large[rows.to(large.device)[:, None], columns.to(large.device)] = _like(values, large)


def _randomise(module: nn.Module, seed: int) -> None:
    """Matrices random, norms one; the same for one seed on one kind of device."""
    for number, parameter in enumerate(module.parameters()):
        if parameter.dim() == 2:
            _random_matrix(parameter, seed * 16 + number)
        else:
            parameter.fill_(1)


def _random_matrix(matrix: Tensor, seed: int) -> None:
    matrix.normal_(std=RANDOM_STD, generator=torch.Generator(matrix.device).manual_seed(seed))
