"""The page in a real browser: Debian's Chromium, driven by playwright. Skipped where either is absent."""

import shutil
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
playwright = pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Page, expect  # noqa: E402

from fledge import LLM  # noqa: E402
from fledge.server.app import create_app  # noqa: E402
from fledge.server.options import ServeOptions  # noqa: E402
from fledge.server.service import Service  # noqa: E402
from tests.page_service import ANSWER, DRAFTED, THINK, PageService, running  # noqa: E402
from tests.serving import EngineThread  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

SLOW = 10_000  # milliseconds: the machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def service() -> Iterator[PageService]:
    with PageService() as service:
        yield service


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a fresh session. The test fails if the page reports an error or leaves its server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(SLOW)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("request", lambda request: problems.append(request.url) if "//127.0.0.1:" not in request.url else None)
    yield page
    context.close()
    assert problems == []


def _open(page: Page, service: PageService) -> None:
    page.goto(service.url)
    expect(page.locator("#connection")).to_have_class("live", timeout=SLOW)


def _feed(service: PageService) -> None:
    """Traffic of which one template does not pay."""
    for _ in range(10):
        service.feed.step(depth=3, accepted=2, seconds=0.012)
        service.feed.step(depth=0, accepted=0, seconds=0.010)
        service.feed.finished(accepted=2)
        service.feed.finished(accepted=0, template="alpaca")


def test_shows_the_verdict_the_figures_and_the_history(page: Page, service: PageService):
    _feed(service)
    time.sleep(2 * service.interval_s)
    _open(page, service)
    findings = page.locator("#findings li")
    expect(findings.first).to_contain_text("Speculation pays")
    expect(findings.nth(1)).to_contain_text("Template alpaca (01234567): 1.00 tokens per round")
    expect(page.locator("#tiles")).to_contain_text("pays from")
    expect(page.locator("#templates tr")).to_have_count(2)
    expect(page.locator("#templates tr", has_text="alpaca").locator("td.no")).to_have_text("no")
    depth = page.locator("figure", has_text="Acceptance by depth")
    assert depth.locator("path.line").count() >= 3
    # The server keeps the history: a reload shows the same.
    page.reload()
    expect(depth.locator(".keys li")).to_have_count(3, timeout=SLOW)
    # Arrow keys walk through time.
    plot = page.locator("figure", has_text="Throughput").locator("svg.plot")
    plot.focus()
    page.keyboard.press("Home")
    expect(page.locator("figure", has_text="Throughput").locator(".when")).to_contain_text("s ago")


def test_new_numbers_appear_by_themselves(page: Page, service: PageService):
    _open(page, service)
    expect(page.locator("#findings")).to_contain_text("Nothing was decoded lately")
    _feed(service)
    expect(page.locator("#findings")).to_contain_text("Speculation pays", timeout=SLOW)


def test_a_chat_marks_what_was_drafted(page: Page, service: PageService):
    _open(page, service)
    page.fill("#max-tokens", "24")
    page.fill("#prompt", "What is it?")
    page.press("#prompt", "Enter")
    column = page.locator(".column[data-mode=on]")
    expect(page.locator("#chat-status")).to_have_text("Done.", timeout=SLOW)
    expect(column.locator(".message.assistant")).to_contain_text("".join(ANSWER))
    marked = column.locator("mark.drafted").all_text_contents()
    assert "".join(marked) == "".join(t for t, drafted in zip(ANSWER, DRAFTED, strict=True) if drafted) * 2
    expect(column.locator(".stats")).to_contain_text("3.00 tokens per round")
    body = service.chats[0]
    assert body["speculation"] == {"enabled": True, "report": True}
    assert body["messages"] == [{"role": "user", "content": "What is it?"}]
    expect(page.locator(".column[data-mode=off]")).to_be_hidden()
    # The next turn carries the conversation.
    page.fill("#prompt", "And then?")
    page.click("#send")
    expect(page.locator("#send")).to_be_enabled(timeout=SLOW)
    assert [message["role"] for message in service.chats[1]["messages"]] == ["user", "assistant", "user"]


def test_a_thought_is_told_apart_and_marks_find_their_place(page: Page, service: PageService):
    _open(page, service)
    page.fill("#prompt", THINK)
    page.press("#prompt", "Enter")
    expect(page.locator("#chat-status")).to_have_text("Done.", timeout=SLOW)
    expect(page.locator(".message.assistant:visible")).to_have_text("Hm.Yes")  # the marks of thinking are not shown
    expect(page.locator("mark.thought.drafted")).to_have_text("Hm.")
    expect(page.locator("mark.own.drafted")).to_have_text("es")
    page.fill("#prompt", "Go on")
    page.press("#prompt", "Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=SLOW)
    assert service.chats[1]["messages"][1] == {"role": "assistant", "content": "Yes"}  # thoughts are not sent back


def test_side_by_side_compares_the_same_prompt(page: Page, service: PageService):
    _open(page, service)
    page.check("input[value=both]")
    page.fill("#max-tokens", "24")
    page.fill("#prompt", "<b>Compare</b>")
    page.click("#send")
    expect(page.locator("#chat-status")).to_contain_text("as fast with speculation", timeout=SLOW)
    expect(page.locator("#chat-status")).to_contain_text("The same text")
    assert [body["speculation"]["enabled"] for body in service.chats] == [True, False]
    assert service.chats[0]["messages"] == service.chats[1]["messages"]
    assert service.chats[0]["seed"] == service.chats[1]["seed"]
    assert page.locator(".column[data-mode=off] mark.drafted").count() == 0
    expect(page.locator(".column[data-mode=off] .message.user")).to_have_text("<b>Compare</b>")  # text, never markup


def test_side_by_side_goes_on_with_one_conversation(page: Page, service: PageService):
    """A normal turn, then one side by side, then one without: all of the same history, and all of it is shown."""
    _open(page, service)
    page.fill("#max-tokens", "12")
    for mode in ("on", "both", "off"):
        page.check(f"input[value={mode}]")
        page.fill("#prompt", f"Turn {mode}")
        page.press("#prompt", "Enter")
        expect(page.locator("#send")).to_be_enabled(timeout=SLOW)
    _, on, off, last = [body["messages"] for body in service.chats]
    assert on == off
    assert [one["content"] for one in on] == ["Turn on", "".join(ANSWER), "Turn both"]
    assert [one["content"] for one in last[::2]] == ["Turn on", "Turn both", "Turn off"]
    page.check("input[value=both]")
    for mode in ("on", "off"):
        expect(page.locator(f".column[data-mode={mode}] .message.user")).to_have_count(3)
        expect(page.locator(f".column[data-mode={mode}] .message.assistant")).to_have_count(3)


def test_stop_ends_the_stream_on_both_sides(page: Page):
    with PageService(token_s=0.1) as service:
        _open(page, service)
        page.fill("#max-tokens", "10000")
        page.fill("#prompt", "Go on for ever")
        page.click("#send")
        expect(page.locator(".message.assistant:visible")).to_contain_text("speculative", timeout=SLOW)
        page.click("#stop")
        expect(page.locator("#chat-status")).to_have_text("Stopped.")
        expect(page.locator("#send")).to_be_enabled()
        limit = time.monotonic() + 5
        while service.dropped == 0 and time.monotonic() < limit:
            time.sleep(0.02)
        assert service.dropped == 1
        expect(page.locator(".message.assistant:visible")).to_contain_text("speculative")  # what came stays


def test_reconnects_to_a_restarted_server(page: Page, service: PageService):
    _feed(service)
    _open(page, service)
    expect(page.locator("#server")).to_contain_text("demo-model")
    service.stop()
    expect(page.locator("#banner")).to_contain_text("cannot be reached", timeout=SLOW)
    expect(page.locator("#connection")).to_have_class("lost")
    expect(page.locator("#findings")).to_contain_text("Speculation pays")  # the last numbers stay
    service.start(model="another-model")
    expect(page.locator("#server")).to_contain_text("another-model", timeout=2 * SLOW)
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#findings")).to_contain_text("Nothing was decoded")


def test_behind_a_prefix_with_a_key(page: Page):
    with PageService(prefix="/fledge/one", key="secret") as service:
        page.goto(service.url)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible(timeout=SLOW)
        page.keyboard.press("Escape")  # who does not want to is not pestered
        expect(page.locator("#banner")).to_contain_text("wants an API key", timeout=SLOW)
        expect(dialog).to_be_hidden()
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        expect(dialog).to_be_visible(timeout=SLOW)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-wrong")).to_be_visible(timeout=SLOW)
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#connection")).to_have_class("live", timeout=SLOW)
        expect(page.locator(".message.assistant:visible")).to_contain_text("verifies.", timeout=SLOW)
        page.reload()  # the key is kept for the tab
        expect(page.locator("#connection")).to_have_class("live", timeout=SLOW)
        expect(dialog).to_be_hidden()


def test_fits_a_phone_and_the_keyboard(page: Page, service: PageService):
    _feed(service)
    page.set_viewport_size({"width": 390, "height": 844})
    _open(page, service)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("#prompt")).to_be_focused()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, button')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.id)"
    )
    assert unnamed == []


def test_the_real_service_behind_the_page(page: Page):
    """The bundled pair: the same text with and without speculation, marked, measured and counted."""
    llm = LLM(
        "fledgling",
        dtype="float32",
        max_model_len=256,
        speculative_config={"model": "fledgling-eagle3.1", "num_speculative_tokens": 3},
    )
    app = create_app(Service(EngineThread(llm), ServeOptions(served_model_names=("fledgling",), api_keys=("secret",))))
    with running(app) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#connection")).to_have_class("live", timeout=SLOW)
        page.check("input[value=both]")
        page.fill("#temperature", "0.7")
        page.fill("#max-tokens", "40")
        page.fill("#prompt", "Write a Python function that adds two numbers.")
        page.press("#prompt", "Enter")
        expect(page.locator("#chat-status")).to_contain_text("The same text.", timeout=3 * SLOW)
        assert page.locator(".column[data-mode=on] mark.drafted").count() > 0
        assert page.locator(".column[data-mode=off] mark.drafted").count() == 0
        expect(page.locator(".column[data-mode=on] .stats")).to_contain_text("tokens per round")
        expect(page.locator("#findings")).to_contain_text("plain steps", timeout=SLOW)  # both costs are known now
        expect(page.locator("#templates")).to_contain_text("default")
        metrics = page.request.get(f"http://127.0.0.1:{port}/metrics").text()
        assert "fledge_spec_decode_estimated_speedup" in metrics
