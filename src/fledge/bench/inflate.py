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
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fledge.bench.shapes import SHAPES
from fledge.errors import ConfigError
from fledge.layers.attention import Attention
from fledge.layers.block import DecoderLayer
from fledge.layers.config import LayerConfig
from fledge.layers.mlp import SwiGLU
from fledge.layers.norm import RMSNorm
from fledge.layers.rope import RotaryEmbedding
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.eagle3 import Eagle3Drafter, Eagle3FirstLayer
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
    def norm_scale(self) -> float:
        return math.sqrt(self.small.hidden_size / self.large.hidden_size)

    @property
    def query_scale(self) -> float:
        """What makes up for the larger head's softmax scale."""
        return math.sqrt(self.large.head_dim / self.small.head_dim)

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

    @property
    def query_rows(self) -> Tensor:
        return _rows(self.query_heads, self.large.head_dim, self.dims)

    def kv_rows(self, copy: int) -> Tensor:
        heads = [kv * _copies(self.small, self.large) + copy for kv in range(self.small.num_kv_heads)]
        return _rows(heads, self.large.head_dim, self.dims)

    def fill_attention(self, large: Attention, small: Attention, inputs: Tensor) -> None:
        """`inputs`: where the small layer's input dimensions lie. Wants random matrices, and leaves the rest so."""
        old, new, config = small.qkv_proj.weight, large.qkv_proj.weight, self.small
        query, key, value = torch.split(old, [config.query_size, config.kv_size, config.kv_size])
        width = self.large.head_dim
        for head in self.query_heads:
            new[head * width : (head + 1) * width] = 0  # dimensions that the small head has not must not be compared
        _put(new, self.query_rows, inputs, query, self.query_scale)
        for copy in range(_copies(self.small, self.large)):
            _put(new, self.large.query_size + self.kv_rows(copy), inputs, key)
            _put(new, self.large.query_size + self.large.kv_size + self.kv_rows(copy), inputs, value)
        large.o_proj.weight.zero_()
        _put(large.o_proj.weight, self.hidden, self.query_rows, small.o_proj.weight)

    def fill_mlp(self, large: SwiGLU, small: SwiGLU) -> None:
        rows = torch.arange(self.small.intermediate_size)
        gate, up = small.gate_up_proj.weight.chunk(2)
        _put(large.gate_up_proj.weight, rows, self.hidden, gate)
        _put(large.gate_up_proj.weight, self.large.intermediate_size + rows, self.hidden, up)
        large.down_proj.weight.zero_()
        _put(large.down_proj.weight, self.hidden, rows, small.down_proj.weight)

    def fill_norm(self, large: RMSNorm, small: RMSNorm, *, spare: float = 0.0) -> None:
        """`spare`: the weight of the dimensions that the small norm has not."""
        size = len(small.weight)
        large.weight[:size] = _like(small.weight.float() * self.norm_scale, large.weight)
        large.weight[size:] = spare


def _large_layer(small: LayerConfig, shape: LayerConfig, *, constant: float = 0.0) -> LayerConfig:
    """The shape's layer with the small one's rotation and eps. Raises ConfigError if the small one does not fit in.

    `constant` is in one more dimension of the stream: what it adds to the mean of squares is taken off eps.
    """
    if small.qk_norm or small.qkv_bias or small.output_bias or small.mlp_bias:
        raise ConfigError("inflate: layers with biases or with norms on queries and keys cannot be enlarged")
    ratio, rest = divmod(shape.head_dim, small.head_dim)
    if rest:
        raise ConfigError(
            f"inflate: heads of {small.head_dim} dimensions cannot become heads of {shape.head_dim}: "
            "only a multiple has the same rotary frequencies among its own"
        )
    if ratio > 1 and small.rope.type == "yarn":
        raise ConfigError("inflate: yarn's frequencies depend on the head's size; heads cannot grow with it")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(small, name) > getattr(shape, name):
            raise ConfigError(
                f"inflate: {name} is {getattr(small, name)}, more than the {getattr(shape, name)} of the shape"
            )
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
    def has_spare(self) -> bool:
        return self.large.vocab_size > self.small.vocab_size

    @property
    def map(self) -> LayerMap:
        return LayerMap(small=self.small.layer, large=self.large.layer)

    def place(self, layer: int) -> int:
        """The large layer that does what small layer `layer` does, and has its input: spread evenly, so that depths
        stay comparable.
        """
        return layer * self.large.num_layers // self.small.num_layers

    def fill_layer(self, large: DecoderLayer, index: int, small: TargetModel) -> None:
        """Make `large` layer `index` of the large target. Its old values do not matter."""
        _randomise(large, self.seed * 1000 + index)
        source = next((i for i in range(self.small.num_layers) if self.place(i) == index), None)
        if source is None:
            large.self_attn.o_proj.weight.zero_()
            assert isinstance(large.mlp, SwiGLU)
            large.mlp.down_proj.weight.zero_()
            return
        layer = small.layers[source]
        assert isinstance(layer, DecoderLayer)
        _fill_block(self.map, large, layer)

    def fill_ends(self, embedding: Tensor, norm: RMSNorm, head: Tensor, small: TargetModel) -> None:
        """Embedding and head [vocab, hidden], and the final norm."""
        vocab, width = small.embed_tokens.weight.shape
        embedding.zero_()
        embedding[:vocab, :width] = _like(small.embed_tokens.weight, embedding)
        _random_matrix(head, self.seed * 1000 + 998)
        head[:vocab, :width] = _like(small.lm_head.weight, head)
        self.map.fill_norm(norm, small.norm)
        if self.has_spare:
            embedding[:, width] = SPARE
            norm.weight[width] = 1
            head[:vocab, width] = 0
            head[vocab:, width] = SPARE_HEAD


def inflate_target(
    small: TargetModel,
    shape: TargetConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pad_vocab: bool = True,
    seed: int = 0,
) -> TargetModel:
    """Return `small` at the size of `shape`, built on `device` without a second copy."""
    plan = TargetPlan.of(small.config, shape, dtype, pad_vocab=pad_vocab, seed=seed)
    with torch.device("meta"):
        large = TargetModel(plan.large)
    large.to(dtype).to_empty(device=device)
    large.rope = RotaryEmbedding(plan.large.layer.rope, plan.large.layer.head_dim).to(device)  # emptied with the rest
    with torch.no_grad():
        for index, layer in enumerate(large.layers):
            assert isinstance(layer, DecoderLayer)
            plan.fill_layer(layer, index, small)
        plan.fill_ends(large.embed_tokens.weight, large.norm, large.lm_head.weight, small)
    return large.eval().requires_grad_(False)


def inflate_drafter(
    small: Drafter,
    small_target: TargetModel,
    large_target: TargetModel,
    *,
    shape: TargetConfig,
    seed: int = 0,
) -> Drafter:
    """Return the drafter of `small_target` for `large_target`, which `inflate_target` made of it."""
    config = drafter_config(small.config, small_target.config, large_target.config, shape)
    weight = large_target.embed_tokens.weight
    with torch.device("meta"):
        large = build(config)
    assert isinstance(large, Eagle3Drafter)
    assert isinstance(small, Eagle3Drafter)
    large.to(weight.dtype).to_empty(device=weight.device)
    large.rope = RotaryEmbedding(config.layer.rope, config.layer.head_dim).to(weight.device)
    with torch.no_grad():
        _fill_drafter(large, small, seed=seed)
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
    plan = TargetPlan(small=small_target, large=large_target, seed=0)
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
        aux_layer_ids=tuple(plan.place(i) for i in small.aux_layer_ids),
        dtype=large_target.dtype,
    )


def _fill_drafter(large: Eagle3Drafter, small: Eagle3Drafter, *, seed: int) -> None:
    place = LayerMap(small=small.config.layer, large=large.config.layer)
    width, states = small.config.hidden_size, small.config.num_aux_states
    for number, module in enumerate([large.fusion, *large.layers]):
        _randomise(module, seed * 1000 + 999_000 + number)
    inputs = torch.cat([i * large.config.target_hidden_size + place.hidden for i in range(states)])
    fc = large.fusion.fc
    fc.weight[width:] = 0
    for i in range(states):  # what the target's spare dimension carries is for its head alone
        fc.weight[:, i * large.config.target_hidden_size + width : (i + 1) * large.config.target_hidden_size] = 0
    _put(fc.weight, place.hidden, inputs, small.fusion.fc.weight)
    if fc.bias is not None:
        fc.bias.zero_()
        fc.bias[:width] = _like(small.fusion.fc.bias, fc.bias)
    for new, old in _norm_pairs(large, small):
        place.fill_norm(new, old)
    if large.fusion.input_norm is not None and small.fusion.input_norm is not None:
        large.fusion.input_norm.weight.zero_()
        scaled = small.fusion.input_norm.weight.float() * place.norm_scale
        large.fusion.input_norm.weight[inputs] = _like(scaled, large.fusion.input_norm.weight)
    first, small_first = large.layers[0], small.layers[0]
    assert isinstance(first, Eagle3FirstLayer)
    assert isinstance(small_first, Eagle3FirstLayer)
    both = torch.cat([place.hidden, large.config.hidden_size + place.hidden])
    place.fill_attention(first.self_attn, small_first.self_attn, both)
    place.fill_mlp(first.mlp, small_first.mlp)
    for layer, small_layer in zip(large.layers[1:], small.layers[1:], strict=True):
        assert isinstance(layer, DecoderLayer)
        assert isinstance(small_layer, DecoderLayer)
        _fill_block(place, layer, small_layer)
    if large.embed_tokens is not None:
        assert small.embed_tokens is not None
        vocab = small.config.vocab_size
        large.embed_tokens.weight.zero_()
        large.embed_tokens.weight[:vocab, :width] = _like(small.embed_tokens.weight, large.embed_tokens.weight)
    if large.lm_head is not None:
        _fill_draft_head(large, small, seed)


def _fill_draft_head(large: Eagle3Drafter, small: Eagle3Drafter, seed: int) -> None:
    """Every row of the small head as often as there is room, and the draft vocabulary likewise, ascending."""
    assert large.lm_head is not None
    assert small.lm_head is not None
    new, old = large.config.draft_vocab_size, small.config.draft_vocab_size
    source = (torch.arange(new) * old // new).to(small.lm_head.weight.device)
    weight = large.lm_head.weight
    _random_matrix(weight, seed * 1000 + 999_999)
    weight[:, : small.config.hidden_size] = _like(small.lm_head.weight[source], weight)
    if large.vocabulary is not None:
        ids = source if small.vocabulary is None else small.vocabulary.target_ids[source]
        large.vocabulary.d2t.copy_(ids - torch.arange(new, device=ids.device))


def _norm_pairs(large: Eagle3Drafter, small: Eagle3Drafter) -> Iterator[tuple[RMSNorm, RMSNorm]]:
    """The norms outside ordinary layers, each of one hidden size."""
    for owner in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield getattr(large.layers[0], owner), getattr(small.layers[0], owner)
    yield large.norm, small.norm
    if large.fusion.fc_norm is not None and small.fusion.fc_norm is not None:
        for new, old in zip(large.fusion.fc_norm, small.fusion.fc_norm, strict=True):
            assert isinstance(new, RMSNorm)
            assert isinstance(old, RMSNorm)
            yield new, old


def _fill_block(place: LayerMap, large: DecoderLayer, small: DecoderLayer) -> None:
    assert large.input_layernorm is not None
    assert small.input_layernorm is not None
    place.fill_norm(large.input_layernorm, small.input_layernorm)
    place.fill_attention(large.self_attn, small.self_attn, place.hidden)
    place.fill_norm(large.post_attention_layernorm, small.post_attention_layernorm)
    assert isinstance(large.mlp, SwiGLU)
    assert isinstance(small.mlp, SwiGLU)
    place.fill_mlp(large.mlp, small.mlp)


def _group(config: LayerConfig) -> int:
    """Query heads for each KV head."""
    return config.num_heads // config.num_kv_heads


def _copies(small: LayerConfig, large: LayerConfig) -> int:
    """Large KV heads that one small KV head's query heads fill."""
    return -(-_group(small) // _group(large))


def _rows(heads: list[int], head_dim: int, dims: Tensor) -> Tensor:
    return torch.cat([head * head_dim + dims for head in heads])


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
