"""What one optimizer step of drafter training costs, beside the GPU's own peak and a straightforward implementation.

    PYTHONPATH=src:. python benchmarks/training_step.py --out FILE.json      (one GPU, under two minutes)
    PYTHONPATH=src:. python benchmarks/training_step.py --tiny               (any machine: does it run?)

The drafter is an EAGLE-3.1 one for a target of Llama-3.2-1B's shape; random hidden states stand for the target, whose
own passes are not part of the step. A step is: unrolled forward, backward, fused AdamW; float32 weights, bfloat16 by
autocast. "Share of peak" is the drafter's arithmetic (see `step_flops`) over the time of a step, divided by what a
bfloat16 product of 8192^3 reaches in the same run. Every measurement is the median of several, after a warm-up.

The other implementation is what one writes first: keys and values of all steps side by side under a dense mask
[length, steps * length] for torch's scaled_dot_product_attention, logits in float32 through log_softmax, nothing
compiled. The drafter module is the same.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.layers.attention import AttentionSpec, ProjectedHeads
from fledge.layers.config import LayerConfig, RopeConfig
from fledge.models.config import DrafterConfig, TargetConfig
from fledge.models.drafter.base import Drafter, DraftVocabulary
from fledge.models.drafter.variants import EAGLE_3_1, build
from fledge.models.target.decoder import TargetStates
from fledge.training.data.examples import PackedBatch
from fledge.training.recipe import FitSection
from fledge.training.ttt import StepInputs, Teacher, TeacherLogits, TttModel


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The target and the batch."""

    layer: LayerConfig
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    depth: int
    rows: int
    length: int
    documents: tuple[int, ...]  # lengths within a row; the rest is padding
    peak_size: int
    repeats: int


FULL = Shape(
    layer=LayerConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
    ),
    num_layers=16,
    vocab_size=128256,
    draft_vocab_size=32000,
    depth=4,
    rows=8,
    length=2048,
    documents=(1024, 640, 384),
    peak_size=8192,
    repeats=8,
)
TINY = Shape(
    layer=replace(FULL.layer, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16),
    num_layers=6,
    vocab_size=300,
    draft_vocab_size=100,
    depth=3,
    rows=2,
    length=64,
    documents=(30, 20, 10),
    peak_size=256,
    repeats=2,
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything a step reads."""

    shape: Shape
    drafter: Drafter
    batch: PackedBatch
    states: TargetStates
    teach: Teacher
    settings: FitSection

    @property
    def device(self) -> torch.device:
        return self.batch.tokens.device

    @property
    def tokens(self) -> int:
        return self.batch.tokens.numel()


def make_scene(shape: Shape, device: torch.device, rows: int) -> Scene:
    torch.manual_seed(0)
    target = TargetConfig(
        family="llama",
        layer=shape.layer,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        max_positions=8192,
        tied_head=True,
    )
    config = replace(EAGLE_3_1.config_for(target), draft_vocab_size=shape.draft_vocab_size)
    with device:
        drafter = build(config).to(device)  # the rope frequencies are made on the CPU whatever the default device
        embedding = torch.nn.Embedding(shape.vocab_size, target.hidden_size, dtype=torch.bfloat16).requires_grad_(False)
    drafter.embed_tokens = embedding
    ids = torch.linspace(0, shape.vocab_size - 1, shape.draft_vocab_size).long()
    drafter.vocabulary = DraftVocabulary.from_target_ids(ids, shape.vocab_size).to(device)
    batch = make_batch(shape, rows).to(device)
    hidden = target.hidden_size
    states = TargetStates(
        final=torch.randn(rows, shape.length, hidden, device=device, dtype=torch.bfloat16),
        aux=torch.randn(rows, shape.length, 3 * hidden, device=device, dtype=torch.bfloat16),
    )
    head = embedding.weight.detach() * hidden**-0.5
    return Scene(
        shape=shape,
        drafter=drafter,
        batch=batch,
        states=states,
        teach=Teacher(head, drafter.vocabulary),
        settings=FitSection(depth=shape.depth),
    )


def make_batch(shape: Shape, rows: int) -> PackedBatch:
    """Every row has the same documents; the last three quarters of each are its answer."""
    document = torch.full((rows, shape.length), -1)
    positions = torch.zeros(rows, shape.length, dtype=torch.int64)
    start = 0
    for number, length in enumerate(shape.documents):
        document[:, start : start + length] = number
        positions[:, start : start + length] = torch.arange(length)
        start += length
    lengths = torch.tensor([*shape.documents, shape.length])[document]
    return PackedBatch(
        tokens=torch.randint(shape.vocab_size, (rows, shape.length)),
        answer=(document >= 0) & (positions >= lengths // 4),
        document=document,
        positions=positions,
    )


def step_flops(config: DrafterConfig, batch: PackedBatch, depth: int) -> float:
    """Multiplications and additions of the drafter in one step, counted apart; the target's are not among them.

    A linear layer of n x m costs 2nm per token forward, and 4nm backward (for its input and for its weight); the
    fusion, whose input wants no gradient, 2nm. Attention costs 4 * heads * head_dim per token and key it sees forward,
    twice that backward; what kernels compute again is not counted, nor are norms, rotations, softmax and AdamW.
    """
    layer = config.layer
    hidden, tokens = config.hidden_size, batch.tokens.numel()
    fusion = 2 * config.num_aux_states * config.target_hidden_size * hidden
    qkv = 2 * (2 * hidden) * (layer.query_size + 2 * layer.kv_size)
    others = 2 * layer.query_size * hidden + 2 * 3 * hidden * layer.intermediate_size
    head = 2 * hidden * config.draft_vocab_size
    seen = float((batch.positions + 1).double().mean())
    attention = sum(4 * layer.query_size * (seen + step) for step in range(depth))
    return tokens * (2 * fusion + 3 * depth * (qkv + others + head) + 3 * attention)


@dataclass
class DenseMaskStorage:
    """The straightforward one: all keys so far, one mask."""

    document: Tensor  # [rows, length]
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    def attend(self, heads: ProjectedHeads, spec: AttentionSpec) -> Tensor:
        query, key, value = heads.finished()
        group = query.shape[-2] // key.shape[-2]
        keys, values = self.keys.setdefault(spec.layer, []), self.values.setdefault(spec.layer, [])
        keys.append(key.to(value.dtype))
        values.append(value)
        mixed = F.scaled_dot_product_attention(
            query.to(value.dtype).transpose(1, 2),
            torch.cat(keys, dim=1).repeat_interleave(group, dim=2).transpose(1, 2),
            torch.cat(values, dim=1).repeat_interleave(group, dim=2).transpose(1, 2),
            attn_mask=self._mask(len(keys)),
            scale=spec.scale,
        )
        return mixed.transpose(1, 2)

    def _mask(self, blocks: int) -> Tensor:
        """Bool [rows, 1, length, blocks * length]."""
        length = self.document.shape[1]
        eye = torch.eye(length, dtype=torch.bool, device=self.document.device).expand(len(self.document), -1, -1)
        same = self.document[:, :, None] == self.document[:, None, :]
        return torch.cat([same.tril()] + [eye] * (blocks - 1), dim=2)[:, None]


def straightforward_loss(scene: Scene, teacher: TeacherLogits, denominators: Tensor) -> Tensor:
    drafter, batch = scene.drafter, scene.batch
    feature, storage = drafter.fuse(scene.states), DenseMaskStorage(batch.document)
    total = torch.zeros((), device=scene.device)
    for step in range(scene.settings.depth):
        inputs = StepInputs.of(batch, step)
        out = drafter(inputs.tokens, feature.to(torch.bfloat16), inputs.positions, storage)
        feature = out.feature
        log_q = drafter.logits(out.head).flatten(0, 1).float().log_softmax(-1)
        p = teacher.draft_logits[inputs.target_rows].float().softmax(-1)
        weight = inputs.supervised.flatten() & teacher.choice_in_draft[inputs.target_rows]
        loss = -((p * log_q).sum(-1) * weight).sum() / denominators[step]
        total = total + scene.settings.depth_decay**step * loss
    return total


def optimizer_step(scene: Scene, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    own = [parameter for parameter in scene.drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-4, betas=(0.9, 0.95), fused=scene.device.type == "cuda")

    def step() -> Tensor:
        with torch.autocast(scene.device.type, dtype=torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seconds(run: Callable[[], object], device: torch.device, *, warm_up: int, repeats: int) -> float:
    """Median of `repeats`, each timed on the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_peak(shape: Shape, device: torch.device) -> float:
    """FLOP/s of a square bfloat16 product."""
    n = shape.peak_size
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls = 10

    def run() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    return calls * 2 * n**3 / seconds(run, device, warm_up=1, repeats=5)


def measure(name: str, scene: Scene, loss_of: Callable[[], Tensor], peak: float) -> dict[str, Any]:
    device = scene.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = optimizer_step(scene, loss_of)
    begin = time.perf_counter()
    first_loss = float(step())
    compile_s = time.perf_counter() - begin
    took = seconds(step, device, warm_up=2, repeats=scene.shape.repeats)
    flops = step_flops(scene.drafter.config, scene.batch, scene.settings.depth)
    return {
        "name": name,
        "rows": scene.batch.rows,
        "first_loss": first_loss,
        "first_step_s": compile_s,
        "step_ms": took * 1e3,
        "tokens_per_s": scene.tokens / took,
        "drafter_tflops": flops / took / 1e12,
        "share_of_peak": flops / took / peak,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def ours(shape: Shape, device: torch.device, peak: float, *, compiled: bool) -> list[dict[str, Any]]:
    scene = make_scene(shape, device, shape.rows)
    denominators = scene.batch.supervised_counts(shape.depth)
    teacher_ms = 1e3 * seconds(lambda: scene.teach(scene.states.final), device, warm_up=2, repeats=5)
    teacher = scene.teach(scene.states.final)
    initial = {name: value.clone() for name, value in scene.drafter.state_dict().items()}
    results = []
    compile_ = "on" if compiled else "off"
    for name, fit, record in (
        ("fledge", replace(scene.settings, compile=compile_), False),
        ("fledge, not compiled", replace(scene.settings, compile="off"), False),
        ("fledge, checkpointing", replace(scene.settings, compile=compile_, activation_checkpointing=True), False),
        ("fledge, drift recorded", replace(scene.settings, compile=compile_), True),
    ):
        scene.drafter.load_state_dict(initial)  # so that all begin with the same loss
        model = TttModel(scene.drafter, fit)

        def loss_of(model: TttModel = model, record: bool = record) -> Tensor:
            return model(scene.batch, scene.states, teacher, denominators, record).loss

        result = measure(name, scene, loss_of, peak)
        result["teacher_ms"] = teacher_ms
        result["tokens_per_s_with_teacher"] = scene.tokens / (result["step_ms"] + teacher_ms) * 1e3
        results.append(result)
    return results


def straightforward(shape: Shape, device: torch.device, peak: float) -> dict[str, Any]:
    """With as many rows as fit the memory."""
    rows = shape.rows
    while True:
        try:
            return straightforward_with(shape, device, peak, rows)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2
        torch.cuda.empty_cache()


def straightforward_with(shape: Shape, device: torch.device, peak: float, rows: int) -> dict[str, Any]:
    scene = make_scene(shape, device, rows)
    denominators = scene.batch.supervised_counts(shape.depth)
    teacher = scene.teach(scene.states.final)
    return measure("eager, dense mask", scene, lambda: straightforward_loss(scene, teacher, denominators), peak)


def profile(shape: Shape, device: torch.device, *, compiled: bool) -> None:
    """Print where a step's time goes, by kernel."""
    scene = make_scene(shape, device, shape.rows)
    denominators, teacher = scene.batch.supervised_counts(shape.depth), scene.teach(scene.states.final)

    model = TttModel(scene.drafter, replace(scene.settings, compile="on" if compiled else "off"))

    def loss_of() -> Tensor:
        return model(scene.batch, scene.states, teacher, denominators).loss

    step = optimizer_step(scene, loss_of)
    for _ in range(3):
        step()
    with torch.profiler.profile() as profiled:
        step()
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any machine")
    parser.add_argument("--rows", type=int, help="packed rows in a step")
    parser.add_argument("--vocab-size", type=int, help="of the target")
    parser.add_argument("--depth", type=int, help="draft steps")
    parser.add_argument("--profile", action="store_true", help="only print where a step's time goes")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("needs a CUDA device; --tiny runs anywhere", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"rows": arguments.rows, "vocab_size": arguments.vocab_size, "depth": arguments.depth}
    shape = replace(TINY if arguments.tiny else FULL, **{key: value for key, value in given.items() if value})
    compiled = device.type == "cuda"
    if arguments.profile:
        profile(shape, device, compiled=compiled)
        return 0
    begin = time.perf_counter()
    peak = measure_peak(shape, device)
    results = ours(shape, device, peak, compiled=compiled)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    results.append(straightforward(shape, device, peak))
    installed = importlib.util.find_spec("speculators") is not None
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "length": shape.length,
        "depth": shape.depth,
        "draft_vocab_size": shape.draft_vocab_size,
        "peak_tflops": peak / 1e12,
        "results": results,
        "speculators": "importable, but not measured: there is no adapter for it here"
        if installed
        else "not installed",
        "wall_s": time.perf_counter() - begin,
    }
    print(f"{report['device']}, torch {report['torch']}: bf16 peak {peak / 1e12:.0f} TFLOP/s ({shape.peak_size}^3)")
    print(f"length {shape.length}, {shape.depth} steps, draft vocabulary {shape.draft_vocab_size}")
    print(
        f"{'':26}{'rows':>5}{'ms/step':>10}{'tokens/s':>11}{'TFLOP/s':>9}{'of peak':>9}{'GiB':>7}"
        f"{'first s':>9}{'loss':>9}"
    )
    for r in results:
        memory = "-" if r["peak_memory_gib"] is None else f"{r['peak_memory_gib']:.1f}"
        print(
            f"{r['name']:26}{r['rows']:5}{r['step_ms']:10.1f}{r['tokens_per_s']:11.0f}{r['drafter_tflops']:9.1f}"
            f"{r['share_of_peak']:9.1%}{memory:>7}{r['first_step_s']:9.1f}{r['first_loss']:9.4f}"
        )
    print(f"the target's head for one batch (not in the step): {results[0]['teacher_ms']:.1f} ms")
    print(f"speculators: {report['speculators']}; {report['wall_s']:.0f} s in all")
    print(json.dumps(report))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
