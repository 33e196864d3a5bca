"""A Llama written for fast training: every kind of weight is one tensor stacked over the layers.

Stacking gives the optimizer whole stacks to work on and casts each kind once per step; the one block function is
compiled once and reused by all layers. `to_huggingface` and `from_huggingface` translate to transformers' names.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from recipes.demo import jsonlines

SHARD_BYTES = 15_000_000


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama with tied embeddings and no biases."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int = 8192
    positions: int = 4096
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * block + self.hidden


# Deep and narrow makes speculation pay: decoding is bound by the number of layers, a drafter has one.
SHAPES = {
    "deep": Shape(hidden=384, layers=16, heads=6, kv_heads=2, head_dim=64, ffn=1024),
    "tower": Shape(hidden=320, layers=28, heads=8, kv_heads=2, head_dim=64, ffn=704),
    "mid": Shape(hidden=448, layers=12, heads=8, kv_heads=2, head_dim=64, ffn=1088),
    "wide": Shape(hidden=512, layers=10, heads=8, kv_heads=2, head_dim=64, ffn=1152),
    "tiny": Shape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64, vocabulary=512, positions=256),
}

# Our name -> (transformers' name inside a layer).
LAYER_NAMES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "attention_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
}
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
Mask = Tensor | BlockMask | None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout; x is [batch, heads, positions, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Causal attention; a mask, dense or of blocks, already contains causality."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return flex_attention(q, k, v, block_mask=mask)


def block(x: Tensor, weights: dict[str, Tensor], cos: Tensor, sin: Tensor, shape: Shape, mask: Mask) -> Tensor:
    """One decoder layer."""
    batch, length, _ = x.shape
    h = rms_norm(x, weights["attention_norm"], shape.epsilon)
    qkv = F.linear(h, torch.cat((weights["q"], weights["k"], weights["v"])))
    q, k, v = (
        part.view(batch, length, -1, shape.head_dim).transpose(1, 2)
        for part in qkv.split([n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)], dim=-1)
    )
    group = shape.heads // shape.kv_heads
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mixed = attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, -1)
    x = x + F.linear(mixed, weights["o"])
    h = rms_norm(x, weights["ffn_norm"], shape.epsilon)
    gate, up = F.linear(h, torch.cat((weights["gate"], weights["up"]))).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, weights["down"])


def head_loss(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """Cross entropy of every position, fp32, zero where the target is -100."""
    logits = F.linear(rms_norm(x, norm, epsilon), embedding).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none").view_as(
        targets
    )


class Llama(nn.Module):
    """The model; parameters are fp32, computation is in `dtype`."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16, compiled: bool = False) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        h, d, n = shape.hidden, shape.head_dim, shape.layers
        sizes = {
            "q": (shape.heads * d, h),
            "k": (shape.kv_heads * d, h),
            "v": (shape.kv_heads * d, h),
            "o": (h, shape.heads * d),
            "gate": (shape.ffn, h),
            "up": (shape.ffn, h),
            "down": (h, shape.ffn),
        }
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, h) * 0.02)
        self.norm = nn.Parameter(torch.ones(h))
        self.stacks = nn.ParameterDict()
        for name, size in sizes.items():
            spread = 1 / math.sqrt(size[1]) / (math.sqrt(2 * n) if name in ("o", "down") else 1.0)
            self.stacks[name] = nn.Parameter(torch.randn(n, *size) * spread)
        self.stacks["attention_norm"] = nn.Parameter(torch.ones(n, h))
        self.stacks["ffn_norm"] = nn.Parameter(torch.ones(n, h))
        angles = torch.outer(
            torch.arange(shape.positions, dtype=torch.float32),
            1.0 / shape.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        # One layer's graph serves all layers; compiling the unrolled model would take a minute of the budget instead.
        self.block: Any = torch.compile(block, dynamic=False) if compiled else block
        self.head_loss: Any = torch.compile(head_loss, dynamic=False) if compiled else head_loss

    def hidden(self, tokens: Tensor, mask: Mask = None) -> Tensor:
        """Return the last layer's output, before the final norm.

        Positions run on through a pack of several documents: rotary attention sees only distances.
        """
        cos, sin = (table[: tokens.size(1)].to(self.dtype) for table in (self.cos, self.sin))
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        layers = {name: weight.to(self.dtype).unbind(0) for name, weight in self.stacks.items()}
        for i in range(self.shape.layers):
            weights = {name: layer[i] for name, layer in layers.items()}
            x = self.block(x, weights, cos, sin, self.shape, mask)
        return x

    def losses(self, tokens: Tensor, targets: Tensor, mask: Mask = None) -> Tensor:
        """Cross entropy by position."""
        x = self.hidden(tokens, mask)
        norm, embedding = self.norm.to(self.dtype), self.embedding.to(self.dtype)
        return self.head_loss(x, norm, embedding, targets, self.shape.epsilon)

    def logits(self, tokens: Tensor) -> Tensor:
        x = rms_norm(self.hidden(tokens), self.norm.to(self.dtype), self.shape.epsilon)
        return F.linear(x, self.embedding.to(self.dtype))

    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains; the rest is AdamW's."""
        return [self.stacks[name] for name in MATRICES]

    def others(self) -> list[nn.Parameter]:
        return [self.embedding, self.norm, self.stacks["attention_norm"], self.stacks["ffn_norm"]]


def to_huggingface(model: Llama, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Weights under transformers' names; the head is tied and left out."""
    weights = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for i in range(model.shape.layers):
        weights |= {f"model.layers.{i}.{name}": model.stacks[ours][i] for ours, name in LAYER_NAMES.items()}
    return {name: w.detach().to("cpu", dtype).contiguous().clone() for name, w in weights.items()}


def huggingface_config(shape: Shape, begin: int, end: list[int], pad: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        # Both spellings: transformers 5 nests it, older readers look at the top.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_huggingface(model: Llama, folder: Path, config: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write config.json, the bf16 shards and their index; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in to_huggingface(model).items():
        if shards[-1] and size + weight.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size += weight.nbytes
    files: list[Path] = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files.append(path)
        places |= dict.fromkeys(shard, path.name)
    total = sum(w.nbytes for shard in shards for w in shard.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total, "total_parameters": model.shape.parameters}, "weight_map": places},
    )
    write_json(folder / "config.json", config)
    return [*files, folder / "model.safetensors.index.json", folder / "config.json"]


def from_huggingface(folder: Path, dtype: torch.dtype = torch.bfloat16, compiled: bool = False) -> Llama:
    """Read a directory that `save_huggingface` wrote."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            ffn=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            epsilon=config["rms_norm_eps"],
        )
    except (OSError, ValueError, KeyError) as problem:
        jsonlines.fail(f"{folder} is no model directory of these recipes: {problem!r}")
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    model = Llama(shape, dtype, compiled)
    try:
        with torch.no_grad():
            model.embedding.copy_(weights["model.embed_tokens.weight"])
            model.norm.copy_(weights["model.norm.weight"])
            for ours, name in LAYER_NAMES.items():
                layers = [weights[f"model.layers.{i}.{name}"] for i in range(shape.layers)]
                model.stacks[ours].copy_(torch.stack(layers))
    except KeyError as problem:
        jsonlines.fail(f"{folder} lacks the weight {problem}")
    return model


def widen_heads(small: Llama, large: Llama) -> None:
    """Give `large` the function of `small`, a model of the same sizes but for fewer heads; its new heads start unheard.

    Key/value heads are repeated, and query heads stay with the keys they had. An added query head keeps its random rows
    and gets zero columns in the output projection: it changes nothing until training has use for it.

        6 query, 2 key/value heads from 5 and 1:    q0 q1 q2 | q3 q4 new    beside    k0 | k0
    """
    old, new = small.shape, large.shape
    same = replace(old, heads=new.heads, kv_heads=new.kv_heads, positions=new.positions)
    whole = new.kv_heads % old.kv_heads == 0 and new.heads % new.kv_heads == 0
    if same != new or not whole or new.heads < old.heads or new.heads % old.kv_heads:
        jsonlines.fail(f"a model of {old} cannot become one of {new}: only heads may be added")
    with torch.no_grad():
        for name, weight in large.named_parameters():
            if not name.startswith("stacks.") or name.removeprefix("stacks.") not in ("q", "k", "v", "o"):
                weight.copy_(small.get_parameter(name))
        groups, n, d, h = old.kv_heads, old.layers, old.head_dim, old.hidden
        kept = old.heads // groups  # query heads of a key/value head
        for name in ("k", "v"):
            heads = small.stacks[name].view(n, groups, d, h)
            large.stacks[name].copy_(heads.repeat_interleave(new.kv_heads // groups, dim=1).flatten(1, 2))
        large.stacks["q"].view(n, groups, -1, d, h)[:, :, :kept] = small.stacks["q"].view(n, groups, kept, d, h)
        columns = large.stacks["o"].view(n, h, groups, -1, d)
        columns[:, :, :, :kept] = small.stacks["o"].view(n, h, groups, kept, d)
        columns[:, :, :, kept:] = 0.0


def describe(shape: Shape) -> dict[str, Any]:
    return asdict(shape) | {"parameters": shape.parameters}


def save_atomically(value: Any, path: Path) -> None:
    """`torch.save` that leaves either the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    torch.save(value, partial)
    os.replace(partial, path)
