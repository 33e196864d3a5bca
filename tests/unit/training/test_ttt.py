"""Training-time test against the recipe written out, and the mistakes that others made."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.decoding.statistics import AcceptanceStatistics
from fledge.models.drafter.base import Drafter
from fledge.models.target.decoder import TargetModel, TargetStates
from fledge.training.data.examples import PackedBatch
from fledge.training.recipe import FitSection
from fledge.training.ttt import StepInputs, TttModel, TttOutputs
from tests.tiny_models import make_drafter, make_target
from tests.unit.training.ttt_cases import (
    VARIANTS,
    Document,
    as_double,
    documents,
    pack,
    states_of,
    teacher_of,
    usual_batch,
    written_out_loss,
    written_out_steps,
)

SETTINGS = FitSection(depth=4, depth_decay=0.7, feature_weight=0.3)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return make_target()


def trainable(name: str, target: TargetModel) -> Drafter:
    """A drafter whose own parameters want gradients; what it shares with the target does not."""
    drafter = make_drafter(VARIANTS[name], target)
    shared = {id(parameter) for parameter in target.parameters()}
    for parameter in drafter.parameters():
        parameter.requires_grad_(id(parameter) not in shared)
    return drafter


def run(
    drafter: Drafter,
    target: TargetModel,
    batch: PackedBatch,
    settings: FitSection = SETTINGS,
    *,
    states: TargetStates | None = None,
    denominators: Tensor | None = None,
    checkpointing: bool = False,
    record: bool = False,
) -> TttOutputs:
    torch.manual_seed(0)
    states = states_of(target, batch, drafter.aux_layer_ids) if states is None else states
    denominators = batch.supervised_counts(settings.depth) if denominators is None else denominators
    teacher = teacher_of(target, drafter, states)
    model = TttModel(drafter, replace(settings, activation_checkpointing=checkpointing))
    outputs: TttOutputs = model(batch, states, teacher, denominators, record)
    return outputs


def gradients(loss: Tensor, drafter: Drafter) -> dict[str, Tensor]:
    named = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradient_are_those_of_the_recipe_written_out(name: str, checkpointing: bool) -> None:
    """In float64, where only the norms (float32 inside, as in serving) round: 1e-6 of the largest gradient."""
    target, batch = make_target(), usual_batch()
    drafter = trainable(name, target)
    states = as_double(states_of(target, batch, drafter.aux_layer_ids))
    target.double()
    drafter.double()
    result = run(drafter, target, batch, states=states, checkpointing=checkpointing)
    expected = written_out_loss(drafter, target, batch, states, SETTINGS)
    assert expected.item() > 0.1
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
    right = gradients(expected, drafter)
    for key, grad in gradients(result.loss, drafter).items():
        bound = 2e-6 * right[key].abs().max().item() + 1e-12
        torch.testing.assert_close(grad, right[key], rtol=0, atol=bound, msg=lambda text, key=key: f"{key}: {text}")


def test_each_step_reads_and_is_taught_one_token_further() -> None:
    batch = pack([[Document(length=5, answer_from=2), Document(length=3, answer_from=1)]], 9)
    tokens = batch.tokens[0].tolist()
    for step in range(4):
        inputs = StepInputs.of(batch, step)
        for start, length, answer_from in ((0, 5, 2), (5, 3, 1)):
            for t in range(length):
                slot, ahead = start + t, t + 1 + step
                assert inputs.tokens[0, slot] == (tokens[start + ahead] if ahead < length else 0)
                assert inputs.positions[0, slot] == t + step
                assert inputs.supervised[0, slot] == (answer_from <= ahead + 1 < length)
                if inputs.supervised[0, slot]:
                    assert inputs.target_rows[slot] == start + ahead
        assert not inputs.supervised[0, 8]  # padding


@pytest.mark.parametrize("prompt", [3, 6])
def test_the_first_drafts_after_the_prompt_are_taught(target: TargetModel, prompt: int) -> None:
    """Mistake 2: with an unshifted mask, drafting what follows the prompt was never trained.

    Slot n-2 of a prompt of n tokens predicts the answer's first token, slot n-1 its second.
    """
    batch = pack([[Document(length=10, answer_from=prompt)]], 10)
    drafter, settings = trainable("eagle3.1", target), replace(SETTINGS, depth=1)
    states = states_of(target, batch, drafter.aux_layer_ids)
    teacher = teacher_of(target, drafter, states)

    def loss(changed_row: int | None) -> float:
        logits = teacher.draft_logits.clone()
        if changed_row is not None:
            logits[changed_row] = logits[changed_row].flip(0)
        changed = replace(teacher, draft_logits=logits)
        counts = batch.supervised_counts(1)
        return TttModel(drafter, settings)(batch, states, changed, counts).loss.item()

    supervised = [row for row in range(10) if loss(row) != loss(None)]
    assert supervised == list(range(prompt - 1, 9))  # the target's distributions after x[n-1], x[n], ... up to x[8]


def test_any_split_of_a_batch_gives_the_same_gradient(target: TargetModel) -> None:
    """Mistake 8: a mean over each micro-batch weighs the slots of a poor one more."""
    drafter, batch = trainable("eagle3.1", target), usual_batch()
    whole = run(drafter, target, batch)
    states = states_of(target, batch, drafter.aux_layer_ids)
    assert states.aux is not None
    counts = batch.supervised_counts(SETTINGS.depth)
    parts, own_counts = [], []
    for rows in (slice(0, 1), slice(1, 3)):
        piece = PackedBatch(**{key: value[rows] for key, value in vars(batch).items()})
        some = TargetStates(final=states.final[rows], aux=states.aux[rows])
        own_counts.append(piece.supervised_counts(SETTINGS.depth))
        parts.append(run(drafter, target, piece, states=some, denominators=counts))
    assert not torch.equal(own_counts[0], own_counts[1])
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    right = gradients(whole.loss, drafter)
    grads = [gradients(part.loss, drafter) for part in parts]
    for key in right:
        torch.testing.assert_close(grads[0][key] + grads[1][key], right[key], rtol=1e-4, atol=1e-6)
    joined = parts[0].metrics
    joined.add(parts[1].metrics)
    for mine, all_at_once in zip(joined.tensors(), whole.metrics.tensors(), strict=True):
        torch.testing.assert_close(mine, all_at_once, rtol=1e-5, atol=1e-5)


def test_documents_do_not_leak_and_padding_is_inert(target: TargetModel) -> None:
    """Only the first document of row 0 is supervised; nothing that happens elsewhere may change a bit."""
    batch = usual_batch()
    elsewhere = batch.document != 0
    elsewhere[1:] = True
    batch = replace(batch, answer=batch.answer & ~elsewhere)
    drafter = trainable("two-layers", target)
    states = states_of(target, batch, drafter.aux_layer_ids)
    assert states.aux is not None
    plain = run(drafter, target, batch, states=states)
    noise = TargetStates(
        final=torch.where(elsewhere[..., None], torch.randn_like(states.final), states.final),
        aux=torch.where(elsewhere[..., None], 30 * torch.randn_like(states.aux), states.aux),
    )
    other = replace(batch, tokens=torch.where(elsewhere, 39 - batch.tokens, batch.tokens))
    changed = run(drafter, target, other, states=noise)
    assert torch.equal(plain.loss, changed.loss)
    right = gradients(plain.loss, drafter)
    for key, grad in gradients(changed.loss, drafter).items():
        torch.testing.assert_close(grad, right[key], rtol=1e-5, atol=1e-7)
    assert torch.equal(plain.metrics.tally, changed.metrics.tally)
    own = replace(batch, tokens=torch.where(elsewhere, batch.tokens, 39 - batch.tokens))
    assert not torch.allclose(plain.loss, run(drafter, target, own, states=states).loss)


@pytest.mark.parametrize("name", ["eagle1", "eagle3.1", "two-layers"])
def test_checkpointing_changes_nothing(name: str, target: TargetModel) -> None:
    drafter, batch = trainable(name, target), usual_batch()
    plain, again = (run(drafter, target, batch, checkpointing=on, record=True) for on in (False, True))
    assert torch.equal(plain.loss, again.loss)
    right = gradients(plain.loss, drafter)
    for key, grad in gradients(again.loss, drafter).items():
        assert torch.equal(grad, right[key]), key
    for mine, theirs in zip(plain.metrics.tensors(), again.metrics.tensors(), strict=True):
        assert torch.equal(mine, theirs)


def test_checkpointing_keeps_less(target: TargetModel) -> None:
    drafter, batch = trainable("eagle3.1", target), usual_batch()

    def kept(checkpointing: bool) -> int:
        seen: dict[int, int] = {}

        def pack_hook(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            run(drafter, target, batch, checkpointing=checkpointing)
        return sum(seen.values())

    assert kept(True) < kept(False) / 2


@pytest.mark.parametrize("name", ["eagle1", "eagle3.1", "norm-output-only", "head-norms", "reduced-vocabulary"])
def test_bfloat16_by_autocast_or_throughout_is_close_to_float32(name: str, target: TargetModel) -> None:
    drafter, batch = trainable(name, target), usual_batch()
    states = states_of(target, batch, drafter.aux_layer_ids)
    half = TargetStates(final=states.final.bfloat16(), aux=None if states.aux is None else states.aux.bfloat16())
    exact = run(drafter, target, batch, states=states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(drafter, target, batch, states=half)
    assert all(
        grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients(mixed.loss, drafter).values()
    )
    torch.testing.assert_close(mixed.loss, exact.loss, rtol=0.1, atol=0)
    own = make_target()
    low = trainable(name, own).bfloat16()
    own.bfloat16()
    result = run(low, own, batch, states=half)
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in gradients(result.loss, low).values())
    torch.testing.assert_close(result.loss, exact.loss, rtol=0.1, atol=0)


def test_choices_outside_the_draft_vocabulary_count_but_do_not_teach(target: TargetModel) -> None:
    drafter, batch = trainable("reduced-vocabulary", target), usual_batch()
    states = states_of(target, batch, drafter.aux_layer_ids)
    teacher = teacher_of(target, drafter, states)
    counts = batch.supervised_counts(SETTINGS.depth)
    plain = TttModel(drafter, SETTINGS)(batch, states, teacher, counts)
    noise = torch.where(teacher.choice_in_draft[:, None], teacher.draft_logits, torch.randn_like(teacher.draft_logits))
    other = TttModel(drafter, SETTINGS)(batch, states, replace(teacher, draft_logits=noise), counts)
    assert torch.equal(plain.loss, other.loss)
    metrics = plain.metrics
    assert torch.equal(metrics.supervised, counts)
    assert 0 < int(metrics.outside[0]) < int(counts[0])
    assert (metrics.correct <= metrics.supervised - metrics.outside).all()
    none = replace(teacher, choice_in_draft=torch.zeros_like(teacher.choice_in_draft))
    silent = TttModel(drafter, SETTINGS)(batch, states, none, counts)
    assert silent.loss.item() == 0
    assert silent.metrics.report()["simulated_acceptance_length"] == 1.0


def test_accuracy_and_simulated_acceptance_are_those_of_slot_by_slot_counting(target: TargetModel) -> None:
    """A teacher that follows the drafter from every fifth slot on, for a while, gives runs of many lengths."""
    drafter, batch = trainable("reduced-vocabulary", target), usual_batch()
    states = states_of(target, batch, drafter.aux_layer_ids)
    drafted = {  # (step, flat slot) -> target id
        (k, row * batch.length + slots.start + t): int(token)
        for row, slots, k, out in written_out_steps(drafter, batch, states, SETTINGS.depth)
        for t, token in enumerate(drafter.to_target_ids(drafter.logits(out.head).argmax(-1)))
    }
    teacher = teacher_of(target, drafter, states)
    choice = teacher.choice.clone()
    for (k, flat), token in drafted.items():
        if flat % 5 == 2 and k <= flat % 4 and flat + 1 + k < len(choice):
            choice[flat + 1 + k] = token
    vocabulary = drafter.vocabulary
    assert vocabulary is not None
    teacher = replace(teacher, choice=choice, choice_in_draft=vocabulary.in_draft[choice])
    expected, right = AcceptanceStatistics(), [0] * SETTINGS.depth
    for row, slots in documents(batch):
        for slot in range(slots.start, slots.stop):
            flat = row * batch.length + slot
            steps = [k for k in range(SETTINGS.depth) if slot + 2 + k < slots.stop and batch.answer[row, slot + 2 + k]]
            is_right = [drafted[k, flat] == int(choice[flat + 1 + k]) for k in steps]
            for k, hit in zip(steps, is_right, strict=True):
                right[k] += hit
            if steps and steps[0] == 0:  # otherwise the prompt goes on, and nobody drafts
                expected.add(drafted=len(steps), accepted=[*is_right, False].index(False))
    counts = batch.supervised_counts(SETTINGS.depth)
    metrics = TttModel(drafter, SETTINGS)(batch, states, teacher, counts).metrics
    assert metrics.correct.tolist() == right
    assert metrics.acceptance().tally == expected.tally
    assert len({accepted for _, accepted in expected.tally}) > 2
    report = metrics.report()
    assert report["simulated_acceptance_length"] == expected.acceptance_length
    assert report["accuracy_by_depth"] == [hits / int(count) for hits, count in zip(right, counts, strict=True)]


def test_a_round_ends_with_its_answer(target: TargetModel) -> None:
    """Two turns in one document: drafts do not jump over the second question."""
    batch = pack([[Document(length=12, answer_from=2)]], 12)
    batch.answer[0, 4:7] = False
    drafter, settings = trainable("eagle3.1", target), replace(SETTINGS, depth=7)
    tally = run(drafter, target, batch, settings).metrics.tally
    expected = [0] * 8
    for slot in range(10):
        run_length = 0
        while run_length < 7 and slot + 2 + run_length < 12 and batch.answer[0, slot + 2 + run_length]:
            run_length += 1
        expected[run_length] += run_length > 0
    assert tally.sum(1).tolist() == expected


def test_signals_of_drift(target: TargetModel) -> None:
    batch = usual_batch()
    grown, steady = (run(trainable(name, target), target, batch, record=True) for name in ("eagle3", "eagle3.1"))
    for result in (grown, steady):
        report = result.metrics.report()
        assert report["own_attention_by_depth"][0] == 0
        assert all(0 < mass < 1 for mass in report["own_attention_by_depth"][1:])
        assert all(0 < mass <= 1 for mass in report["sink_attention_by_depth"])
    hidden = grown.metrics.report()["hidden_rms_by_depth"]
    assert hidden == sorted(hidden)  # the unnormalised stream grows
    same = steady.metrics.report()
    assert same["hidden_rms_by_depth"] == same["head_rms_by_depth"]
    assert "hidden_rms_by_depth" not in run(trainable("eagle3", target), target, batch).metrics.report()


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_other_losses_reach_every_parameter(loss: Any, target: TargetModel) -> None:
    drafter = trainable("reduced-vocabulary", target)
    result = run(drafter, target, usual_batch(), replace(SETTINGS, loss=loss, kl_weight=0.1))
    assert all(grad.abs().max() > 0 for grad in gradients(result.loss, drafter).values())


def test_a_batch_that_teaches_nothing_costs_nothing_and_breaks_nothing(target: TargetModel) -> None:
    batch = pack([[Document(length=2, answer_from=0)], []], 4)
    drafter = trainable("eagle3.1", target)
    result = run(drafter, target, batch, record=True)
    assert result.loss.item() == 0
    assert all(grad.isfinite().all() for grad in gradients(result.loss, drafter).values())
    assert result.metrics.report()["simulated_acceptance_length"] is None
