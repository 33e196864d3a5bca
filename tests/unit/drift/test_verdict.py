"""What is said of made-up suites: no more than the figures and their intervals bear."""

from dataclasses import replace

import pytest

from fledge.drift.perturb import UNPERTURBED
from fledge.drift.report import DrafterVerdict, make_report
from fledge.report.prose import percent
from tests.unit.drift.report_cases import made_up


def verdict(accepted=None, **options) -> DrafterVerdict:
    return verdicts(*made_up({"drafter": accepted or {}}, **options))[0]


def verdicts(suite, results) -> tuple[DrafterVerdict, ...]:
    return make_report(suite, results, {}).verdicts


def comparison(suite, results):
    return make_report(suite, results, {}).comparison


def sentence(verdict: DrafterVerdict, start: str):
    (found,) = [one for one in verdict.sentences if one.text.startswith(start)]
    return found


def test_drift_is_named_with_its_depth_and_changes():
    found = verdict(recent={"drafter": (0.1, 0.1, 0.6)})
    assert (found.headline, found.status, found.tone, found.title) == ("Drifts at depth 3", "drifts", "bad", "EAGLE-3")
    text = sentence(found, "From depth 1 to 3").text
    assert text.startswith(
        "From depth 1 to 3 attention on the last 4 tokens goes from 10 % to 60 % (+50.0 points, 95 % "
    )
    assert "on the first token from 65 % to 15 % (-50.0 points, 95 % interval -50." in text
    assert text.endswith("Drift is a gain of the one or a loss of the other of 5 points at least.")
    assert verdict(recent={"drafter": (0.0, 0.3, 0.5, 0.6)}).headline == "Drifts from depth 2 on"


def test_no_drift_however_much_is_looked_at_recent_tokens():
    found = verdict(recent={"drafter": (0.50, 0.51, 0.53)})
    assert (found.headline, found.tone) == ("No drift to depth 3", "good")
    assert found.sentences[0].text.endswith("a loss of the other of 5 points: it does not drift.")


def test_few_prompts_get_no_verdict():
    found = verdict(prompts=19)
    assert (found.headline, found.tone) == ("19 prompts: too few for a verdict", "neutral")
    assert verdict(prompts=1).headline == "1 prompt: too few for a verdict"


def test_a_target_that_loops_is_named():
    suite, results = made_up()
    cell = replace(suite.cells[0], repeated_share=0.48, acceptance_length_with_repetition=2.9)
    found = verdicts(replace(suite, cells=(cell,)), results)[0]
    assert sentence(found, "The target loops: 48 % of its tokens").tone == "bad"
    assert sentence(found, "Acceptance length 1.80").text.endswith(
        "that is, 0.80 accepted drafts per round, drafting 3 ahead; rounds that begin in repetition are left out, with "
        "them it is 2.90."
    )
    assert not [one for one in verdict().sentences if "repetition" in one.text or "loops" in one.text]


def test_copies_of_the_prompt_are_named():
    suite, results = made_up()
    cell = replace(suite.cells[0], copied_share=0.71, acceptance_length_without_copies=1.45)
    found = verdicts(replace(suite, cells=(cell,)), results)[0]
    assert sentence(found, "71 % of the tokens copy the prompt").text.endswith(
        "which is easy to draft: without the rounds that begin there acceptance length is 1.45."
    )
    assert not [one for one in verdict().sentences if "copy" in one.text]


def test_what_cannot_be_measured_is_not_judged():
    shallow = verdict(recent={"drafter": (0.0,)})
    assert (shallow.headline, shallow.tone) == ("Not measured", "neutral")
    assert "--depth" in shallow.sentences[0].text
    suite, results = made_up()
    nothing = replace(results["drafter", UNPERTURBED], by_depth=(), prompt_rows=(), tally=())
    (cell,) = suite.cells
    suite = replace(suite, cells=(replace(cell, drift=None, attention=None, acceptance_length=None),))
    (silent,) = verdicts(suite, {("drafter", UNPERTURBED): nothing})
    assert silent.headline == "Not measured"
    assert [one.tone for one in silent.sentences] == ["neutral"] * 2


def test_growth_is_that_before_the_norm():
    growth = sentence(verdict(), "The state fed")
    assert growth.text == "The state fed from depth to depth has grown to 3 times its size by depth 3."
    assert (growth.section, growth.tone) == ("states", "bad")
    suite, results = made_up()
    normed = {key: replace(result, norm_output=True) for key, result in results.items()}
    assert sentence(verdicts(suite, normed)[0], "Before the final norm").text == (
        "Before the final norm the state has grown to 3 times its size by depth 3; what is fed on comes from the norm "
        "and keeps its size by construction."
    )


def test_a_sure_loss_has_its_interval_and_its_name():
    found = verdict({"template:llama3": 12, "template:plain": 8, "system:long": 16})
    lost = sentence(found, "Template changes")
    assert lost.text.startswith("Template changes cost up to 22 % of acceptance length (95 % interval 2")
    assert lost.text.endswith("; the worst of 2: template:plain.")
    assert (lost.section, lost.tone) == ("perturbations", "bad")
    same = sentence(found, "No loss from other system prompts")
    assert same.tone == "neutral"
    assert "not asked for" in sentence(found, "Not measured: long contexts").text


def test_a_gain_is_a_gain():
    found = sentence(verdict({"history:2": 19}), "Earlier turns")
    assert found.text.startswith("Earlier turns gain 8 % of acceptance length")
    assert found.tone == "good"


@pytest.mark.parametrize("name", ["json", "temperature:0.7"])
def test_losses_of_what_changes_the_answer_say_so(name):
    found = [one for one in verdict({name: 8}).sentences if one.section == "perturbations" and one.tone == "bad"]
    assert len(found) == 1
    assert found[0].text.endswith("The answers change too, so part of this is the task's.")


def test_skipped_perturbations_are_told_with_their_reason():
    found = sentence(verdict({"pad:64k:before": "does not fit"}), "Not measured")
    assert "long contexts (does not fit)" in found.text
    assert sentence(verdict(), "Not measured").text.endswith("(no perturbation was asked for).")


def test_one_prompt_gives_no_interval_and_few_a_warning():
    alone = verdict({"template:plain": 8}, prompts=1)
    assert "interval" not in " ".join(one.text for one in alone.sentences)
    assert sentence(alone, "Template changes").tone == "neutral"
    assert sentence(verdict(prompts=4), "These are 4 prompts").section == "acceptance"


def test_beyond_the_trained_depth():
    suite, results = made_up()
    result = replace(results["drafter", UNPERTURBED], trained_depth=1)
    found = verdicts(suite, {("drafter", UNPERTURBED): result})[0]
    beyond = sentence(found, "Beyond the 1 depths")
    assert "0 % of the drafts that follow right ones are right too, against 80 % up to there" in beyond.text
    assert beyond.tone == "bad"


def test_every_sentence_leads_to_a_section_of_the_report():
    from fledge.drift.report import render

    accepted = {"template:plain": 8, "pad:1k:before": "no room", "json": 4}
    suite, results = made_up({"a3": accepted, "b3.1": accepted})
    report = make_report(suite, results, {})
    page = render(report, results, ())
    sentences = [one for verdict in report.verdicts for one in verdict.sentences] + list(report.comparison)
    assert all(f'id="{one.section}"' in page for one in sentences)


def test_drafters_are_compared_only_as_far_as_intervals_go():
    runs = {"template:plain": 12, UNPERTURBED: 16}
    suite, results = made_up(
        {"a3": runs, "b3.1": {**runs, "template:plain": 16}},
        recent={"a3": (0.0, 0.1, 0.6), "b3.1": (0.0, 0.1, 0.2)},
    )
    texts = [one.text for one in comparison(suite, results)]
    assert texts[0] == (
        "Both drift, EAGLE-3.1 less than EAGLE-3: from depth 1 to 3 recent attention changes by +20.0 points in "
        "EAGLE-3.1 and by +60.0 in EAGLE-3 (difference -40.0 points, 95 % interval -40.0 to -40.0)."
    )
    assert texts[1].startswith("On the unperturbed workload, no difference in acceptance length can be told")
    assert texts[2].startswith("Under template changes, EAGLE-3.1 has the longer acceptance length: 1.80 against 1.60")
    assert texts[2].endswith("; accepted drafts per round: 0.80 against 0.60.")
    alike, results = made_up({"a3": runs, "b3.1": runs})
    assert "cannot be told" in comparison(alike, results)[0].text
    steady = {"a3": (0.10, 0.11, 0.13), "b3.1": (0.50, 0.53, 0.52)}
    neither = comparison(*made_up({"a3": runs, "b3.1": runs}, recent=steady))[0]
    assert neither.text.startswith(
        "Neither EAGLE-3.1 nor EAGLE-3 drifts: from depth 1 to 3 recent attention changes by +2"
    )
    one = comparison(*made_up({"a3": runs, "b3.1": runs}, recent={**steady, "a3": (0.1, 0.2, 0.3)}))[0]
    assert one.text.startswith("EAGLE-3 drifts, EAGLE-3.1 does not: ")
    few = comparison(*made_up({"a3": runs, "b3.1": runs}, recent=steady, prompts=5))[0]
    assert few.text.startswith("5 prompts are too few to say whether EAGLE-3.1 or EAGLE-3 drifts less: ")
    assert comparison(*made_up()) == ()


def test_titles_tell_drafters_of_a_kind_apart():
    suite, _ = made_up({"x/one": {}, "y/two": {}, "z/b3.1": {}})
    assert list(suite.titles.values()) == ["EAGLE-3 (one)", "EAGLE-3 (two)", "EAGLE-3.1"]
    suite, _ = made_up({"x/one": {}, "y/one": {}})
    assert list(suite.titles.values()) == ["EAGLE-3 (x/one)", "EAGLE-3 (y/one)"]


def test_percent():
    assert [percent(x) for x in (0.612, 0.004, 0.0, -0.0, -0.25)] == ["61 %", "0.4 %", "0 %", "0 %", "-25 %"]
