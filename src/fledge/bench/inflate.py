"""Enlarges a trained pair without changing its output, to measure real acceptance at the cost of a large model.

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

In float32 the large pair generates the small pair's tokens. In 16 bits the rescaled weights are rounded again (by at
most 0.4 % each), so the tokens may differ.
"""

import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fledge.bench.random_weights import random_matrix, randomise
from fledge.errors import ConfigError, nearest_name_hint
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.layers.linear import RMSNorm
from fledge.layers.rope import RotaryEmbedding
from fledge.models.config import Architecture, DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter
from fledge.models.drafter.eagle import Eagle3Drafter
from fledge.models.drafter.variants import build
from fledge.models.target.decoder import TargetModel
from fledge.progress import timed

_log = logging.getLogger("fledge.bench")
_Model = TypeVar("_Model", TargetModel, Drafter)

MOST_THREADS = 8  # that make and write layers
# So small that it does not change norms; the logits of new ids are below -10^6 as long as states are below 10^6.
SPARE = 2.0**-14
SPARE_HEAD = -(2.0**60)


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int) -> TargetConfig:
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
    )
    return TargetConfig(
        family="llama", layer=layer, num_layers=layers, vocab_size=vocab, max_positions=262144, tied_head=False
    )


SHAPES = {
    "8b": _shape(4096, 32, 32, 8, 128, 14336, 32000),
    "3b": _shape(3072, 28, 24, 8, 128, 8192, 32000),
    "1b": _shape(2048, 16, 32, 8, 64, 8192, 32000),
    "1b-deep": _shape(2048, 28, 32, 8, 64, 3968, 32000),  # as many weights as 1b, in more layers
    "120m": _shape(768, 12, 12, 4, 64, 2048, 32000),
    "29m": _shape(512, 8, 8, 4, 64, 1536, 8192),
}


def shape_named(name: str) -> TargetConfig:
    if name not in SHAPES:
        raise ConfigError(f"unknown shape '{name}'.{nearest_name_hint(name, SHAPES)}")
    return SHAPES[name]


def empty_model(make: Callable[[], _Model], dtype: torch.dtype, device: torch.device) -> _Model:
    """Make a model on `device` whose weights are yet to be filled in."""
    with torch.device("meta"):
        model = make()
    model.to(dtype).to_empty(device=device)
    model.rope = RotaryEmbedding(model.config.layer.rope, model.config.layer.head_dim).to(device)  # no weights
    return model


@dataclass(frozen=True, kw_only=True)
class LayerMap:
    """Maps the parts of a small layer to positions in a large one."""

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
    def groups(self) -> tuple[int, int]:
        """Query heads for each KV head, of the small layer and of the large one."""
        return self.small.num_heads // self.small.num_kv_heads, self.large.num_heads // self.large.num_kv_heads

    @property
    def copies(self) -> int:
        """How many large KV heads are needed for the query heads of one small KV head."""
        return -(-self.groups[0] // self.groups[1])

    @property
    def query_heads(self) -> list[int]:
        """The index of the large head for each small query head."""
        of_small, of_large = self.groups
        heads = (divmod(head, of_small) for head in range(self.small.num_heads))
        return [(kv * self.copies + number // of_large) * of_large + number % of_large for kv, number in heads]

    def kv_rows(self, copy: int) -> Tensor:
        return self._rows([kv * self.copies + copy for kv in range(self.small.num_kv_heads)])

    def _rows(self, heads: list[int]) -> Tensor:
        return torch.cat([head * self.large.head_dim + self.dims for head in heads])

    def fill_block(self, large: Any, small: Any, inputs: Tensor | None = None) -> None:
        """Copy a decoder layer, or a drafter's first layer, into a large one that `randomise` has filled.

        `inputs`: positions of the input dimensions of the small layer's attention; None: those of the stream.
        """
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            if hasattr(small, norm):
                self.fill_norm(getattr(large, norm), getattr(small, norm))
        inputs = self.hidden if inputs is None else inputs
        new, config, width = large.self_attn.qkv_proj.weight, self.small, self.large.head_dim
        query, key, value = small.self_attn.qkv_proj.weight.split([config.query_size, config.kv_size, config.kv_size])
        for head in self.query_heads:
            new[head * width : (head + 1) * width] = 0  # extra dimensions of a head must not add to its scores
        # The scale compensates for the softmax scale of the larger head.
        query_rows = self._rows(self.query_heads)
        _put(new, query_rows, inputs, query, math.sqrt(width / config.head_dim))
        for copy in range(self.copies):
            _put(new, self.large.query_size + self.kv_rows(copy), inputs, key)
            _put(new, self.large.query_size + self.large.kv_size + self.kv_rows(copy), inputs, value)
        mlp_rows = torch.arange(config.intermediate_size)
        for number, part in enumerate(small.mlp.gate_up_proj.weight.chunk(2)):
            rows = number * self.large.intermediate_size + mlp_rows
            _put(large.mlp.gate_up_proj.weight, rows, self.hidden, part)
        _put(large.self_attn.o_proj.weight, self.hidden, query_rows, small.self_attn.o_proj.weight)
        _put(large.mlp.down_proj.weight, self.hidden, mlp_rows, small.mlp.down_proj.weight)

    def fill_norm(self, large: RMSNorm, small: RMSNorm, inputs: Tensor | None = None) -> None:
        """Copy a norm. `inputs`: positions of the small norm's dimensions; None: the first ones."""
        scaled = small.weight.float() * math.sqrt(self.small.hidden_size / self.large.hidden_size)
        large.weight.zero_()
        large.weight[self.hidden if inputs is None else inputs] = scaled.to(large.weight)


def _refuse(condition: object, message: str) -> None:
    if condition:
        raise ConfigError(f"inflate: {message}")


def _large_layer(small: LayerConfig, shape: LayerConfig, *, constant: float = 0.0) -> LayerConfig:
    """Return the shape's layer with the small one's rope and eps. Raises ConfigError if the small one does not fit.

    `constant` is the value of one more dimension of the stream; eps is reduced by what it adds to the mean of squares.
    """
    biased = small.qk_norm or small.qkv_bias or small.output_bias or small.mlp_bias
    _refuse(biased, "layers with biases or with norms on queries and keys cannot be enlarged")
    _refuse(small.activation != shape.activation, f"layers with {small.activation} cannot be enlarged")
    _refuse(small.latent, "layers with latent attention cannot be enlarged")
    _refuse(
        shape.head_dim % small.head_dim,
        f"heads of {small.head_dim} dimensions cannot become heads of {shape.head_dim}: "
        "only a multiple has the same rotary frequencies among its own",
    )
    stretched = shape.head_dim > small.head_dim and small.rope.type == "yarn"
    _refuse(stretched, "yarn's frequencies depend on the head's size; heads cannot grow with it")
    for name in ("hidden_size", "intermediate_size"):
        has, most = getattr(small, name), getattr(shape, name)
        _refuse(has > most, f"{name} is {has}, more than the {most} of the shape")
    _refuse(
        LayerMap(small=small, large=shape).copies * small.num_kv_heads > shape.num_kv_heads,
        f"{small.num_heads} query heads on {small.num_kv_heads} KV heads do not fit into "
        f"{shape.num_heads} on {shape.num_kv_heads}",
    )
    eps = (small.norm_eps * small.hidden_size - constant**2) / shape.hidden_size
    return replace(shape, norm_eps=eps, rope=small.rope)


def target_config(
    small: TargetConfig, shape: TargetConfig, dtype: torch.dtype, *, pad_vocab: bool = True
) -> TargetConfig:
    """Return the config of the enlarged target."""
    other = small.family != "llama" or small.sliding_windows
    _refuse(other, f"the target is of family '{small.family}'; only llama can be enlarged")
    _refuse(
        small.num_layers > shape.num_layers,
        f"the target has {small.num_layers} layers, more than the {shape.num_layers} of the shape; "
        f"shapes with enough: {', '.join(n for n, s in SHAPES.items() if s.num_layers >= small.num_layers)}",
    )
    # float16 ends at 65,504, far too low for what the head's new rows need.
    room = shape.hidden_size > small.hidden_size and dtype != torch.float16
    vocab = max(small.vocab_size, shape.vocab_size) if pad_vocab and room else small.vocab_size
    return replace(
        shape,
        layer=_large_layer(small.layer, shape.layer, constant=SPARE if vocab > small.vocab_size else 0.0),
        vocab_size=vocab,
        max_positions=small.max_positions,
        tied_head=False,
        dtype=str(dtype).removeprefix("torch."),
        bos_id=small.bos_id,
        eos_ids=small.eos_ids,
    )


def layer_places(small: TargetConfig, large: TargetConfig) -> list[int]:
    """Return the index of the large layer for each small one, at equal distances, and last that of the output."""
    return [layer * large.num_layers // small.num_layers for layer in range(small.num_layers + 1)]


def inflate_target(
    small: TargetModel,
    shape: TargetConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pad_vocab: bool = True,
    seed: int = 0,
    take_layer: Callable[[int, nn.Module], None] | None = None,
) -> TargetModel:
    """Return `small` at the size of `shape`, built on `device` without a second copy.

    `take_layer` is for models that do not fit into memory: it is called with each layer, whose memory is then reused
    for another, from several threads and in any order.
    """
    config = target_config(small.config, shape, dtype, pad_vocab=pad_vocab)
    large = empty_model(lambda: TargetModel(config), dtype, device)
    place = LayerMap(small=small.config.layer, large=config.layer)
    sources = {index: i for i, index in enumerate(layer_places(small.config, config)[:-1])}
    embedding, norm, head = large.embed_tokens.weight, large.norm, large.lm_head.weight
    vocab, width = small.embed_tokens.weight.shape
    with torch.no_grad():
        embedding.zero_()
        embedding[:vocab, :width] = small.embed_tokens.weight
        random_matrix(head, seed * 1000 + 998)
        head[:vocab, :width] = small.lm_head.weight
        place.fill_norm(norm, small.norm)
        if config.vocab_size > vocab:
            embedding[:, width] = SPARE
            norm.weight[width] = 1
            head[:vocab, width] = 0
            head[vocab:, width] = SPARE_HEAD

    threads = 1 if take_layer is None else min(MOST_THREADS, torch.get_num_threads(), config.num_layers)
    free: SimpleQueue[nn.Module] = SimpleQueue()  # layers whose memory can be reused: allocating it is slow
    for layer in large.layers[:threads]:
        free.put(layer)

    @torch.no_grad()
    def fill(index: int) -> None:
        layer = large.layers[index] if take_layer is None else free.get()
        try:
            with timed(_log, "layer drawn"):
                randomise(layer, seed * 1000 + index)
                if index in sources:
                    place.fill_block(layer, small.layers[sources[index]])
            if take_layer is not None:
                take_layer(index, layer)
        finally:
            free.put(layer)

    if take_layer is None:
        for index in range(config.num_layers):
            fill(index)
    else:
        _in_threads(threads, fill, range(config.num_layers))
        large.layers.to("meta")
    return large.eval().requires_grad_(False)


def _in_threads(count: int, work: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Call `work` with each number, in threads that each use a single torch thread."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            list(pool.map(work, numbers))  # after a failure no more calls are started
        finally:
            torch.set_num_threads(before)


def drafter_config(
    small: DrafterConfig, small_target: TargetConfig, large_target: TargetConfig, shape: TargetConfig
) -> DrafterConfig:
    """Return the config of a drafter with layers of the shape, as many as the small one has, for the large target."""
    is_eagle1 = small.architecture is not Architecture.EAGLE3
    _refuse(is_eagle1, "the drafter is EAGLE-1; only EAGLE-3 and EAGLE-3.1 can be enlarged")
    _refuse(
        small.hidden_size != small.target_hidden_size or small.aux_layer_ids is None,
        f"the drafter is {small.hidden_size} wide and its target {small.target_hidden_size}; "
        "only a drafter as wide as its target can be enlarged",
    )
    places = layer_places(small_target, large_target)
    padded = large_target.vocab_size > small_target.vocab_size
    # If rows are repeated, the head is its own and smaller than the vocabulary, so that there is a map to target ids.
    draft_vocab = max(small.draft_vocab_size, (large_target.vocab_size - 1) // 64 * 64)
    return replace(
        small,
        layer=_large_layer(small.layer, shape.layer),
        vocab_size=large_target.vocab_size,
        draft_vocab_size=draft_vocab if padded else small.draft_vocab_size,
        own_head=small.own_head or padded,
        target_hidden_size=large_target.hidden_size,
        aux_layer_ids=tuple(places[i] for i in small.aux_layer_ids or ()),
        dtype=large_target.dtype,
    )


@torch.no_grad()
def inflate_drafter(
    small: Drafter, small_target: TargetModel, large_target: TargetModel, *, shape: TargetConfig, seed: int = 0
) -> Drafter:
    """Return the drafter of `small_target`, enlarged for `large_target`, which `inflate_target` has made."""
    config = drafter_config(small.config, small_target.config, large_target.config, shape)
    weight = large_target.embed_tokens.weight
    large = empty_model(lambda: build(config), weight.dtype, weight.device)
    assert isinstance(large, Eagle3Drafter)
    assert isinstance(small, Eagle3Drafter)
    place = LayerMap(small=small.config.layer, large=large.config.layer)
    width, wide = small.config.hidden_size, large.config.target_hidden_size
    fusion = nn.ModuleList(one for one in (large.input_norm, large.fc_norm, large.fc) if one is not None)
    for number, module in enumerate([fusion, *large.layers]):
        randomise(module, seed * 1000 + 999_000 + number)
    starts = [i * wide for i in range(small.config.num_aux_states)]
    inputs = torch.cat([start + place.hidden for start in starts])
    new, old = large, small
    new.fc.weight[width:] = 0
    for start in starts:  # the target's spare dimension is only for its head
        new.fc.weight[:, start + width : start + wide] = 0
    _put(new.fc.weight, place.hidden, inputs, old.fc.weight)
    if new.fc.bias is not None:
        new.fc.bias.zero_()
        new.fc.bias[:width] = old.fc.bias
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
        large.embed_tokens.weight[: small.config.vocab_size, :width] = small.embed_tokens.weight
    if large.lm_head is not None and small.lm_head is not None:
        # Repeat the rows of the small head, and the ids of the draft vocabulary, in ascending order.
        rows, small_rows = large.config.draft_vocab_size, small.config.draft_vocab_size
        source = (torch.arange(rows) * small_rows // rows).to(small.lm_head.weight.device)
        random_matrix(large.lm_head.weight, seed * 1000 + 999_999)
        large.lm_head.weight[:, :width] = small.lm_head.weight[source]
        if large.vocabulary is not None:
            ids = source if small.vocabulary is None else small.vocabulary.target_ids[source]
            large.vocabulary.d2t.copy_(ids - torch.arange(rows, device=ids.device))
    large.share_with(large_target)
    return large.eval().requires_grad_(False)


def _put(large: Tensor, rows: Tensor, columns: Tensor, small: Tensor, scale: float = 1.0) -> None:
    values = small.float() * scale if scale != 1.0 else small
    large[rows.to(large.device)[:, None], columns.to(large.device)] = values.detach().to(large)
