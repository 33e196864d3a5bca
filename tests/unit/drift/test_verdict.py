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


def test_drift_is_named_with_its_depth_and_shares():
    found = verdict(own={"drafter": (0.0, 0.1, 0.6)})
    assert (found.headline, found.tone, found.title) == ("Drifts at depth 3", "bad", "EAGLE-3")
    assert sentence(found, "This drafter").text == (
        "This drafter drifts at depth 3: 60 % of its attention is on its own drafts at depth 3, 25 % on the prompt; at "
        "depth 2 it was 10 %. That is no more than the 60 % that even attention would give: try longer prompts."
    )
    assert verdict(own={"drafter": (0.0, 0.3, 0.5, 0.6)}).headline == "Drifts from depth 2 on"
    assert verdict(own={"drafter": (0.0, 0.3, 0.1, 0.6)}).headline == "Drifts at some depths (2, 4)"


def test_even_attention_is_told_where_there_is_more_than_that():
    suite, results = made_up()
    key = ("drafter", UNPERTURBED)
    last = results[key].by_depth[-1]
    even = replace(last, uniform_mass={**last.uniform_mass, "drafted": 0.07})
    results = {key: replace(results[key], by_depth=(*results[key].by_depth[:-1], even))}
    assert sentence(verdicts(suite, results)[0], "This drafter").text.endswith("Even attention would give them 7 %.")


def test_no_drift():
    found = verdict(own={"drafter": (0.0, 0.05, 0.1)})
    assert (found.headline, found.tone) == ("No drift to depth 3", "good")
    assert "10 % of its attention is on its own drafts at depth 3, 25 % on the prompt" in found.sentences[0].text
    assert found.sentences[0].text.endswith("Even attention would give them 10 %.")
    assert found.sentences[0].tone == "good"


def test_what_cannot_be_measured_is_not_judged():
    shallow = verdict(own={"drafter": (0.0,)})
    assert (shallow.headline, shallow.tone) == ("Not measured", "neutral")
    assert "--depth" in shallow.sentences[0].text
    suite, results = made_up()
    nothing = replace(results["drafter", UNPERTURBED], by_depth=(), prompt_rows=(), tally=())
    (cell,) = suite.cells
    suite = replace(suite, cells=(replace(cell, drift=None, acceptance_length=None),))
    (silent,) = verdicts(suite, {("drafter", UNPERTURBED): nothing})
    assert silent.headline == "Not measured"
    assert [one.tone for one in silent.sentences] == ["neutral"] * 2


def test_growth_is_told_and_the_sink():
    found = verdict()
    growth = sentence(found, "The state fed")
    assert growth.text == (
        "The state fed from depth to depth has grown to 1.5 times its size by depth 3; before the final norm it has "
        "grown to 3 times its size."
    )
    assert (growth.section, growth.tone) == ("states", "bad")
    sink = sentence(found, "The first token")
    assert sink.text == "The first token keeps 15 % of attention at depth 3, of 75 % at 1."
    assert sink.tone == "bad"


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
        own={"a3": (0.0, 0.1, 0.6), "b3.1": (0.0, 0.1, 0.2)},
    )
    texts = [one.text for one in comparison(suite, results)]
    assert texts[0].startswith("EAGLE-3.1 drifts less than EAGLE-3: 20 % of attention is on own drafts at depth 3")
    assert "against 60 % (difference, 95 % interval: 40 to 40 points)" in texts[0]
    assert texts[1].startswith("On the unperturbed workload, no difference in acceptance length can be told")
    assert texts[2].startswith("Under template changes, EAGLE-3.1 has the longer acceptance length: 1.80 against 1.60")
    alike, results = made_up({"a3": runs, "b3.1": runs})
    assert "cannot be told" in comparison(alike, results)[0].text
    assert comparison(*made_up()) == ()


def test_titles_tell_drafters_of_a_kind_apart():
    suite, _ = made_up({"x/one": {}, "y/two": {}, "z/b3.1": {}})
    assert list(suite.titles.values()) == ["EAGLE-3 (one)", "EAGLE-3 (two)", "EAGLE-3.1"]
    suite, _ = made_up({"x/one": {}, "y/one": {}})
    assert list(suite.titles.values()) == ["EAGLE-3 (x/one)", "EAGLE-3 (y/one)"]


def test_percent():
    assert [percent(x) for x in (0.612, 0.004, 0.0, -0.0, -0.25)] == ["61 %", "0.4 %", "0 %", "0 %", "-25 %"]
