"""From the target's logits to the exact distribution that it samples from, and to a token.

The order is vLLM's (v1): logit bias, min-tokens mask, penalties; then, for rows that are not greedy, temperature,
min-p, top-k, top-p. Logits are float32, sums over the vocabulary float64.

A row's result depends on that row only. Steps that no row of a batch needs are skipped, and for rows that do not need
them they are exact no-ops (x / 1, x - 0, a threshold of -inf), so the batch never changes a request's tokens. A verify
pass has one row for each position. Each row has its request's settings (`SamplingRows.select`) and the history that its
position would have without speculation (`TokenHistory.after_chain`, `after_tree`), so its distribution is that of plain
decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.params import SamplingParams
from fledge.decoding.random import Stream, uniform
from fledge.errors import ConfigError
from fledge.kernels.filters import Filters, keep_likeliest
from fledge.kernels.sample import choose


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Sampling settings as tensors, one row each, and host flags that summarise them.

    The flags may be conservative: after `select` an `any_*` may be true although no row needs it, never the reverse.
    """

    temperature: Tensor  # [rows] float32; 1 where greedy
    is_greedy: Tensor  # [rows] bool
    top_k: Tensor  # [rows] int64; 0 is off
    top_p: Tensor  # [rows] float64; 1 is off
    min_p: Tensor  # [rows] float32; 0 is off
    repetition_penalty: Tensor  # [rows] float32; 1 is off
    presence_penalty: Tensor  # [rows] float32; 0 is off
    frequency_penalty: Tensor  # [rows] float32; 0 is off
    seed: Tensor  # [rows] int64
    logit_bias: Tensor | None  # [rows, vocab] float32

    all_greedy: bool
    any_greedy: bool
    any_penalty: bool
    any_min_p: bool
    any_top_p: bool
    max_top_k: int

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "SamplingRows":
        """One row per request. `seeds`: the request's own, or one that the engine chose."""
        assert len(params) == len(seeds), "one seed for each request"

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [p.is_greedy for p in params]
        sampled = [p for p in params if not p.is_greedy]
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        return cls(
            temperature=column([1.0 if p.is_greedy else p.temperature for p in params], torch.float32),
            is_greedy=column(greedy, torch.bool),
            top_k=column([min(p.top_k, vocab_size) for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            min_p=column([p.min_p for p in params], torch.float32),
            repetition_penalty=column([p.repetition_penalty for p in params], torch.float32),
            presence_penalty=column([p.presence_penalty for p in params], torch.float32),
            frequency_penalty=column([p.frequency_penalty for p in params], torch.float32),
            seed=column(list(seeds), torch.int64),
            logit_bias=_bias_table(params, vocab_size, device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_penalty=any(penalty != (1.0, 0.0, 0.0) for penalty in penalties),
            any_min_p=any(p.min_p > 0.0 for p in sampled),
            any_top_p=any(p.top_p < 1.0 for p in sampled),
            max_top_k=max((min(p.top_k, vocab_size) for p in sampled), default=0),
        )

    def select(self, index: Tensor) -> "SamplingRows":
        """Return the rows at `index` [n], which may repeat."""
        taken: dict[str, Any] = {name: one[index] for name, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **taken)

    def repeat(self, times: int) -> "SamplingRows":
        """Repeat each row: [a, b] -> [a, a, b, b]. Verify rows are `repeat(depth + 1)`."""
        rows = torch.arange(self.temperature.shape[0], device=self.temperature.device)
        return self.select(rows.repeat_interleave(times))


@dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """The tokens in each row's prompt and output, for penalties. Methods return new histories."""

    prompt_mask: Tensor  # [rows, vocab] bool
    output_counts: Tensor  # [rows, vocab] int32

    @classmethod
    def from_tokens(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "TokenHistory":
        """One row per request: its prompt, and its output so far."""

        def counts(rows: Sequence[Sequence[int]]) -> Tensor:
            each = [torch.bincount(torch.tensor(r, dtype=torch.int64), minlength=vocab_size) for r in rows]
            return torch.stack(each).to(device)

        return cls(prompt_mask=counts(prompts) > 0, output_counts=counts(outputs).to(torch.int32))

    def after_chain(self, drafts: Tensor) -> "TokenHistory":
        """Return the histories of a chain's verify rows, [batch * (depth + 1), vocab].

            drafts [d0, d1, d2]   row 0: none    row 1: d0    row 2: d0 d1    row 3: d0 d1 d2

        `drafts` is [batch, depth] with -1 as padding. Row i of a request verifies draft i, or follows the last one.
        """
        rows = drafts.shape[1] + 1
        return self.after_tree(drafts, torch.ones(1, rows, rows, dtype=torch.bool, device=drafts.device).tril())

    def after_tree(self, tokens: Tensor, visible: Tensor) -> "TokenHistory":
        """Return the histories of the verify rows of trees, [batch * (nodes + 1), vocab].

        Row 0 is the root and includes no draft; row n + 1 includes node n and its ancestors. `tokens` is
        [batch, nodes] with -1 as padding, `visible` is `tree.visibility(parents)`, [batch, nodes + 1, nodes + 1].
        """
        rows = visible.shape[1]
        counts = self.output_counts[:, None].repeat(1, rows, 1)
        seen = visible[:, :, 1:] & (tokens >= 0)[:, None]
        counts.scatter_add_(2, tokens.clamp(min=0)[:, None].expand(-1, rows, -1), seen.to(torch.int32))
        return TokenHistory(
            prompt_mask=self.prompt_mask.repeat_interleave(rows, dim=0), output_counts=counts.flatten(0, 1)
        )


def greedy(logits: Tensor) -> Tensor:
    """Return the most likely token of each row, [rows, vocab] -> [rows]; of equals, the lowest id."""
    return logits.argmax(-1)


def distribution(
    logits: Tensor, rows: SamplingRows, *, history: TokenHistory | None = None, forbidden: Tensor | None = None
) -> Tensor:
    """Return the exact float32 distribution [rows, vocab] that the target samples from; greedy rows are one-hot.

    `history` is required if a row has a penalty. `forbidden` is a bool mask [rows, vocab] of tokens that are not
    allowed here (stop ids before min_tokens); at least one token of each row must be allowed. `logits` is not modified.
    """
    adjusted = adjust_logits(logits, rows, history=history, forbidden=forbidden)
    shaped = adjusted if rows.all_greedy else _shape_logits(adjusted, rows)
    if rows.any_greedy:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        lost = rows.is_greedy[:, None] & (ids != greedy(adjusted)[:, None])
        shaped = shaped.masked_fill(lost, -torch.inf)
    return shaped.softmax(-1)


def choose_at(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    *,
    history: TokenHistory | None = None,
    forbidden: Tensor | None = None,
) -> Tensor:
    """Return the target's choice at each of `positions` [rows], sampled with the rows' seeds."""
    if rows.all_greedy:
        return greedy(adjust_logits(logits, rows, history=history, forbidden=forbidden))
    probs = distribution(logits, rows, history=history, forbidden=forbidden)
    return choose(probs, uniform(rows.seed, positions, Stream.CHOICE))


def adjust_logits(
    logits: Tensor, rows: SamplingRows, *, history: TokenHistory | None = None, forbidden: Tensor | None = None
) -> Tensor:
    """Apply the steps that can change the argmax: bias, min-tokens mask, penalties."""
    logits = logits.float()
    if rows.logit_bias is not None:
        logits = logits + rows.logit_bias
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, -torch.inf)
    if rows.any_penalty:
        assert history is not None, "penalties need the rows' history"
        logits = _penalise(logits, rows, history)
    return logits


def _penalise(logits: Tensor, rows: SamplingRows, history: TokenHistory) -> Tensor:
    """Apply penalties. Repetition covers prompt and output, presence and frequency only the output."""
    produced = history.output_counts > 0
    factor = torch.where(history.prompt_mask | produced, rows.repetition_penalty[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - rows.frequency_penalty[:, None] * history.output_counts
    return logits - rows.presence_penalty[:, None] * produced


def _shape_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Apply the steps that keep the argmax: temperature, min-p, top-k, top-p."""
    logits = logits / rows.temperature[:, None]
    filters = Filters(top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p)
    return keep_likeliest(logits, filters, max_top_k=rows.max_top_k, any_min_p=rows.any_min_p, any_top_p=rows.any_top_p)


def _bias_table(params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str) -> Tensor | None:
    """Return logit biases [rows, vocab]; None if no request has any."""
    entries = [(row, token, bias) for row, p in enumerate(params) for token, bias in (p.logit_bias or {}).items()]
    if not entries:
        return None
    for _, token, _ in entries:
        if token >= vocab_size:
            raise ConfigError(f"logit_bias token id: found {token}, allowed is 0 to {vocab_size - 1}")
    table = torch.zeros(len(params), vocab_size)
    row_ids, tokens, biases = zip(*entries, strict=True)
    table[list(row_ids), list(tokens)] = torch.tensor(biases)
    return table.to(device)
