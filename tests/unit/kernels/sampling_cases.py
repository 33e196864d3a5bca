"""Drawing tokens, with filters and without, and judging drafts that were drawn: kernels beside their definitions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fledge.decoding.acceptance import accept_rejection
from fledge.decoding.params import SamplingParams
from fledge.decoding.sampling import SamplingRows, TokenHistory, adjust_logits
from fledge.kernels import sample as sampling
from fledge.kernels.accept import PADDING, Accepted
from fledge.kernels.adjust import AdjustedEntries, SlotTables, adjust_rows
from fledge.kernels.filters import Bounds, Filters, RowSettings, find_bounds, keep_likeliest
from fledge.kernels.reject import DrawnDrafts, reject_drafts
from tests.unit.kernels.cases import randn
from tests.unit.kernels.interpreter import in_plain_torch, in_triton

Run = Callable[[Callable[..., Any]], Callable[..., Any]]  # how a case calls a kernel: `in_triton`, or as it is
adjust_rows_triton = in_triton(adjust_rows)
EDGE = 1e-6  # how near to an edge a random number may be judged either way


def rows_of_requests(rows: int, device: str, *, filtering: bool) -> tuple[Tensor, RowSettings]:
    """Requests of all kinds, and one for each row; every third is greedy."""
    count = 12
    number = torch.arange(count, device=device)
    filters = Filters(
        top_k=torch.where(number % 4 == 0, 3 + number, 0),
        top_p=torch.where(number % 3 == 0, 0.2 + 0.06 * number, 1.0).double(),
        min_p=torch.where(number % 5 == 0, 0.02, 0.0).float(),
    )
    settings = RowSettings(
        sampled=number % 3 != 1,
        temperature=torch.rand(count, device=device) + 0.3,
        filters=filters if filtering else None,
    )
    return (torch.arange(rows, device=device) * 5) % count, settings


def random_logits(rows: int, vocab: int, dtype: torch.dtype, device: str) -> Tensor:
    """In which some tokens are impossible, and many as likely as others."""
    logits = randn(rows, vocab, dtype=dtype, device=device) * 4
    logits[:, vocab // 3 : vocab // 2] = -torch.inf
    logits[:, vocab // 4] = torch.finfo(dtype).min  # over a temperature below 1 it is no number any more
    logits[::2] = (logits[::2] * 2).round() / 2
    return logits


def defined_probabilities(logits: Tensor, request: Tensor, settings: RowSettings) -> Tensor:
    """[rows, vocab] float64, by the definition of what is kept."""
    scaled = logits.float() / settings.temperature[request, None]
    if settings.filters is not None:
        filters, vocab = settings.filters.select(request), logits.shape[1]
        scaled = keep_likeliest(scaled, filters, max_top_k=vocab, any_min_p=True, any_top_p=True)
    return scaled.double().softmax(-1)


def sample(
    rows: int, vocab: int, dtype: torch.dtype, device: str, *, filtering: bool = False, run: Run = in_triton
) -> None:
    """The drawn token's share of the cumulative probability, in float64, holds the uniform, to `EDGE`."""
    request, settings = rows_of_requests(rows, device, filtering=filtering)
    logits = random_logits(rows, vocab, dtype, device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    uniforms[0] = 0.0
    uniforms[-1] = 1.0 - 2.0**-53
    drawn, reference = (torch.full((rows,), -7, device=device) for _ in range(2))
    run(sampling.sample_rows)(logits, request, settings, uniforms, drawn)
    in_plain_torch(sampling.sample_rows)(logits, request, settings, uniforms, reference)
    sampled = settings.sampled[request]
    assert (drawn[~sampled] == -7).all(), "rows of greedy requests are left alone"
    assert (reference[~sampled] == -7).all()

    probs = defined_probabilities(logits, request, settings)[sampled]
    drawn, reference, uniforms = drawn[sampled], reference[sampled], uniforms[sampled]
    upper = probs.cumsum(-1).gather(1, drawn[:, None].clamp(min=0)).squeeze(1)
    share = probs.gather(1, drawn[:, None].clamp(min=0)).squeeze(1)
    assert (logits[sampled].gather(1, drawn[:, None].clamp(min=0)) > -torch.inf).all()
    # What top-p keeps may be one token more or less, whose probability before it lies at the edge.
    has_edge = torch.zeros_like(share, dtype=torch.bool)
    if settings.filters is not None:
        has_edge = settings.filters.top_p[request][sampled] < 1.0
    assert ((share > 0) | (has_edge & ((uniforms - upper).abs() < EDGE))).all()
    assert (uniforms <= upper + EDGE).all()
    assert (uniforms >= upper - share - EDGE).all()
    near_edge = (uniforms - upper).abs().minimum((uniforms - (upper - share)).abs()) < EDGE
    assert ((drawn == reference) | near_edge).all()


def bounds(rows: int, vocab: int, dtype: torch.dtype, device: str, *, temperature: float | None = None) -> None:
    """What the bounds keep is what the definition keeps, but for tokens whose probability lies at the edge of top-p."""
    request, settings = rows_of_requests(rows, device, filtering=True)
    if temperature is not None:
        settings.temperature.fill_(temperature)
    logits = random_logits(rows, vocab, dtype, device)
    found: Bounds = find_bounds(logits, request, settings)
    assert settings.filters is not None
    scaled = logits.float() / settings.temperature[request, None]
    ids = torch.arange(vocab, device=device)
    floor, last = found.floor[:, None], found.last[:, None]
    possible = scaled.double().softmax(-1) > 0  # of others it does not matter whether they are kept
    kept = ((scaled > floor) | ((scaled == floor) & (ids <= last))) & possible
    expected = defined_probabilities(logits, request, settings) > 0
    expected[~settings.sampled[request]] = possible[~settings.sampled[request]]
    by_top_p = settings.filters.top_p[request] < 1.0
    assert torch.equal(kept[~by_top_p], expected[~by_top_p])
    differ = (kept != expected).sum(-1)
    assert (differ <= 1).all()
    assert (differ > 0).sum() <= rows // 8


def probabilities(rows: int, vocab: int, device: str, *, run: Run = in_triton) -> None:
    """Written at the requests that draw, and nowhere else; the largest of each beside the token that was drawn."""
    request, settings = (
        torch.randperm(rows + 3, device=device)[:rows],
        rows_of_requests(rows, device, filtering=False)[1],
    )
    settings = RowSettings(settings.sampled.repeat(rows)[: rows + 3], settings.temperature.repeat(rows)[: rows + 3])
    logits = random_logits(rows, vocab, torch.float32, device)
    out = torch.full((rows + 3, 2, vocab), -1.0, device=device)
    tokens, largest = torch.full((rows,), -7, device=device), torch.full((rows,), -7.0, device=device)
    weighed = run(sampling.weigh_rows)(logits, request, settings)
    run(sampling.write_probabilities)(weighed, out[:, 1])
    run(sampling.draw_rows)(weighed, torch.rand(rows, dtype=torch.float64, device=device), tokens, largest)
    sampled = settings.sampled[request]
    expected = defined_probabilities(logits, request, settings).float()
    torch.testing.assert_close(out[request[sampled], 1], expected[sampled], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(largest[sampled], expected.amax(-1)[sampled], rtol=2e-5, atol=0.0)
    assert (out[:, 0] == -1).all()
    assert (out[request[~sampled]] == -1).all()
    assert (largest[~sampled] == -7).all()


def reject(
    batch: int,
    depth: int,
    vocab: int,
    device: str,
    *,
    filtering: bool = False,
    flat: bool = False,
    run: Run = in_triton,
) -> None:
    """As by `accept_rejection`, where a random number is not at an edge; requests without drawn drafts are left alone.

    `flat`: places are decided by rows in another order.
    """
    of_entry, settings = rows_of_requests(batch, device, filtering=filtering)
    settings = settings._replace(sampled=torch.ones_like(settings.sampled))
    width, requests = depth + 1, len(settings.sampled)
    of_entry = torch.randperm(requests, device=device)[:batch]
    order = torch.randperm(batch * width, device=device) if flat else torch.arange(batch * width, device=device)
    at = order.argsort().view(batch, width)
    logits = random_logits(batch * width, vocab, torch.float32, device)[order].contiguous()
    request = of_entry.repeat_interleave(width)[order]
    p = defined_probabilities(logits, request, settings)[at].float()  # [batch, width, vocab]
    q = (p.roll(1, dims=1) + p)[:, :depth] / 2 if depth else p[:, :0]
    q[0] = p[0, :depth]  # of which nothing is left to correct with
    draft_probs = torch.full((requests, depth + 1, vocab), torch.nan, device=device)
    draft_probs[of_entry, :depth] = q
    drafts = torch.multinomial(q.flatten(0, 1), 1).view(batch, depth)
    counts = torch.arange(batch, device=device) % (depth + 1)
    counts[:3] = depth
    are_drawn = torch.arange(requests, device=device) % 4 != 2
    uniforms = [torch.rand(batch, n, dtype=torch.float64, device=device) for n in (depth, width)]
    expected = accept_rejection(drafts, q, p, *uniforms, draft_lengths=counts)
    outcome = Accepted(torch.full((batch, width), -7, device=device), torch.full((batch,), -7, device=device))
    weighed = run(sampling.weigh_rows)(logits, request, settings)
    drawn = DrawnDrafts(drafts, of_entry, are_drawn, counts, draft_probs)
    run(reject_drafts)(outcome, drawn, weighed, at, (uniforms[0], uniforms[1]))

    judged = are_drawn[of_entry] & (counts > 0)
    assert (outcome.tokens[~judged] == -7).all()
    assert (outcome.accepted[~judged] == -7).all()
    taken = q.gather(2, drafts[..., None]).squeeze(2), p[:, :depth].gather(2, drafts[..., None]).squeeze(2)
    near_edge = ((uniforms[0] * taken[0] - taken[1]).abs() < EDGE).any(-1)
    certain = judged & ~near_edge
    assert torch.equal(outcome.accepted[certain], expected.accepted[certain])
    for entry in certain.nonzero().squeeze(1).tolist():
        stop, tokens = int(expected.accepted[entry]), outcome.tokens[entry]
        assert torch.equal(tokens[:stop], drafts[entry, :stop])
        assert (tokens[stop + 1 :] == PADDING).all()
        above = p[entry, stop].double()
        if stop < counts[entry]:
            above = (p[entry, stop] - q[entry, stop]).clamp(min=0.0).double()
            above = p[entry, stop].double() if above.sum() < 1e-5 else above / above.sum()
        reached = float(above.cumsum(0)[tokens[stop]])
        # What is left is a difference: of little, the last bits of p count for more.
        slack = EDGE * 100
        assert reached - float(above[tokens[stop]]) - slack <= float(uniforms[1][entry, stop]) <= reached + slack


def adjust(batch: int, depth: int, vocab: int, dtype: torch.dtype, device: str, *, flat: bool = False) -> None:
    """By `adjust_logits`, to the bit. Three entries hold slots; one has nothing left but an end that is held back.

    `flat`: some rows are not fed.
    """
    width, slots = depth + 1, 4
    entry, slot = torch.tensor([batch - 1, 0, 1, batch]), torch.tensor([2, 0, 1, slots - 1])
    params = [
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.1),
        SamplingParams(logit_bias={1: 3.0, 2: -100.0}, repetition_penalty=0.8),
        SamplingParams(frequency_penalty=-0.3),
        SamplingParams(),
    ]
    settings = SamplingRows.from_params(params, [0] * slots, vocab_size=vocab, device=device)
    tables = SlotTables(
        bias=settings.logit_bias,
        stops=torch.rand(slots, vocab, device=device) < 0.3,
        stops_from=torch.tensor([100, 2, 0, 0], device=device),
        refused=torch.rand(slots, depth + 2, vocab, device=device) < 0.4,
        in_prompt=torch.rand(slots, vocab, device=device) < 0.3,
        counts=(torch.rand(slots, vocab, device=device) * 3).to(torch.int32),
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
    )
    tables.refused[0, 0] = ~tables.stops[0]  # nothing is left but what is held back
    drafts = torch.randint(0, vocab, (batch + 2, depth + 1), device=device)
    drafts[:, depth - 1] = PADDING
    request = torch.randperm(batch + 2, device=device)[:batch]
    positions = torch.arange(width, device=device) + torch.zeros(batch, 1, dtype=torch.int64, device=device)
    fed = torch.full((batch,), width) if not flat else torch.arange(batch) % width + 1
    starts = fed.cumsum(0) - fed
    at = (starts[:, None] + torch.minimum(torch.arange(width), fed[:, None] - 1)).to(device)
    logits = randn(int(fed.sum()), vocab, dtype=dtype, device=device) * 3
    expected = logits.float().clone()
    for e, s in zip(entry.tolist(), slot.tolist(), strict=True):
        for place in range(int(fed[e]) if e < batch else 0):
            seen = TokenHistory(prompt_mask=tables.in_prompt[s : s + 1], output_counts=tables.counts[s : s + 1])
            history = seen.after_chain(drafts[request[e], :place][None])
            held = tables.stops[s] & (positions[e, place] < tables.stops_from[s])
            both = held | tables.refused[s, place]
            forbidden = (tables.refused[s, place] if both.all() else both)[None]
            last = TokenHistory(prompt_mask=history.prompt_mask[-1:], output_counts=history.output_counts[-1:])
            row = slice(int(at[e, place]), int(at[e, place]) + 1)
            own = settings.select(torch.tensor([s], device=device))
            expected[row] = adjust_logits(logits[row], own, history=last, forbidden=forbidden)
    adjusted = AdjustedEntries(torch.stack([entry, slot]).to(device), request, positions, at if flat else None)
    found = adjust_rows_triton(logits, drafts, adjusted, tables)
    assert torch.equal(found, expected)
