"""The optimizer: its schedule, its clipping, and steps that break."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fledge.errors import FledgeError
from fledge.training.recipe import FitSection
from fledge.training.trainer import Optimisation

FIT = FitSection(lr=0.1, warmup=0.2, clip=1.0, min_lr_ratio=0.1, max_bad_steps=3)
LOSS = torch.tensor(1.0)


MUON = replace(FIT, optimizer="muon")


def make(fit: FitSection = FIT) -> tuple[nn.Linear, Optimisation]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, Optimisation(model.parameters(), fit, total_steps=20)


def set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def counters(optimisation: Optimisation) -> dict[str, int]:
    return {name: int(getattr(optimisation, name)) for name in ("skipped", "bad_in_a_row", "longest_bad_run")}


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    _, optimisation = make()
    rates = [optimisation.rate(step) for step in range(20)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[12] == pytest.approx(0.01 + 0.09 * 0.5)  # half way
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert optimisation.rate(20) == pytest.approx(0.01)
    assert make(replace(FIT, warmup=0.0))[1].rate(0) == pytest.approx(0.1)


def test_it_is_adamw_with_clipped_gradients() -> None:
    model, optimisation = make(replace(FIT, weight_decay=0.1))
    other = nn.Linear(4, 4)
    other.load_state_dict(model.state_dict())
    groups = [{"params": [other.weight], "weight_decay": 0.1}, {"params": [other.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(3):
        set_gradients(model, 0.5 + step)
        set_gradients(other, 0.5 + step)
        norm, good = optimisation.step(step, LOSS)
        assert float(norm) == pytest.approx((0.5 + step) * math.sqrt(20))
        assert bool(good)
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        for group in reference.param_groups:
            group["lr"] = optimisation.rate(step)
        reference.step()
        assert model.weight.grad is None
    torch.testing.assert_close(model.weight, other.weight)
    torch.testing.assert_close(model.bias, other.bias)


def test_the_rate_follows_the_time_where_that_is_ahead_of_the_steps() -> None:
    _, optimisation = make()
    optimisation.spent = 0.1  # half of the warm-up
    assert optimisation.rate(0) == pytest.approx(0.05)
    optimisation.spent = 0.6
    assert optimisation.rate(1) == optimisation.rate(9) == pytest.approx(0.01 + 0.09 * 0.5)
    assert optimisation.rate(18) == pytest.approx(make()[1].rate(18))  # steps are ahead
    optimisation.spent = 1.2
    assert optimisation.rate(2) == pytest.approx(0.01)


def test_muon_moves_matrices_as_torch_does_and_leaves_ends_to_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 8))
    ends = list(model[1].parameters())
    optimisation = Optimisation(model.parameters(), replace(MUON, weight_decay=0.1, clip=100.0), 20, ends)
    others, weight = [p.detach().clone() for p in model.parameters()], nn.Parameter(model[0].weight.detach().clone())
    theirs = torch.optim.Muon([weight], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = [nn.Parameter(p) for p in others[1:]]
    reference = torch.optim.AdamW(
        [{"params": [adam[1]], "weight_decay": 0.1}, {"params": [adam[0], adam[2]], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for step in range(4):
        for parameter, copy in zip(model.parameters(), [weight, *adam], strict=True):
            parameter.grad = torch.randn_like(parameter)
            copy.grad = parameter.grad.clone()
        optimisation.step(step, LOSS)
        for optimizer in (theirs, reference):
            for group in optimizer.param_groups:
                group["lr"] = optimisation.rate(step)
            optimizer.step()
    torch.testing.assert_close(model[0].weight, weight, atol=2e-3, rtol=0)  # of sums in bfloat16
    for parameter, copy in zip([*model.parameters()][1:], adam, strict=True):
        torch.testing.assert_close(parameter, copy)


@pytest.mark.parametrize("fit", [FIT, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_step_leaves_weights_and_moments_as_they_were(what: str, value: float, fit: FitSection) -> None:
    model, optimisation = make(fit)
    set_gradients(model, 0.3)
    optimisation.step(0, LOSS)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimisation.optimizers[-1]
    assert model.weight in optimizer.state
    moments = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    set_gradients(model, value if what == "gradient" else 0.3)
    _, good = optimisation.step(1, LOSS if what == "gradient" else torch.tensor(value))
    assert not good
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
    for name, old in moments.items():
        assert torch.equal(optimizer.state[model.weight][name], old), name
    assert counters(optimisation) == {"skipped": 1, "bad_in_a_row": 1, "longest_bad_run": 1}
    set_gradients(model, 0.3)
    optimisation.step(2, LOSS)
    assert not torch.equal(before[0], model.weight)
    assert counters(optimisation) == {"skipped": 1, "bad_in_a_row": 0, "longest_bad_run": 1}


def test_too_many_broken_steps_in_a_row_are_an_error() -> None:
    model, optimisation = make()
    for step, value in enumerate([math.nan, math.nan, 0.1, math.nan, math.nan]):
        set_gradients(model, value)
        optimisation.step(step, LOSS)
        optimisation.check(step)
    set_gradients(model, math.nan)
    optimisation.step(5, LOSS)
    with pytest.raises(FledgeError, match=r"3 steps in a row up to step 5 .* not finite"):
        optimisation.check(5)


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    assert len(Optimisation(model.parameters(), FIT, 10).parameters) == 1
