import re
from importlib import resources

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.testclient import TestClient

from fledge.server.dashboard import FILES, router
from fledge.server.errors import RequestError
from fledge.server.metrics import Metrics
from tests.page_service import EngineFeed

STATIC = resources.files("fledge.server.dashboard") / "static"
CSS = (STATIC / "page.css").read_text(encoding="utf-8")


def _client(metrics: Metrics | None = None, *, prefix: str = "", closed: bool = False) -> TestClient:
    async def refuse(_request: Request) -> None:
        raise HTTPException(401)

    app = FastAPI()
    metrics = metrics or Metrics(model_name="m", has_drafter=True)
    app.include_router(router(metrics, authorize=refuse if closed else None), prefix=prefix)
    return TestClient(app)


@pytest.mark.parametrize("prefix", ["", "/some/where"])
def test_every_file_the_page_names_is_served(prefix):
    client = _client(prefix=prefix)
    page = client.get(f"{prefix}/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
    assert {name.removeprefix("dashboard/") for name in named} <= set(FILES)
    for name in FILES:
        answer = client.get(f"{prefix}/dashboard/{name}")
        assert answer.status_code == 200, name
        assert answer.content
    imports = re.findall(r'from "\./([^"]+)"', client.get(f"{prefix}/dashboard/page.js").text)
    assert set(imports) <= set(FILES)


def test_every_file_of_the_page_is_listed_and_packaged():
    assert {entry.name for entry in STATIC.iterdir()} == {"index.html", *FILES}


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    client = _client()
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page.text)
    for name in ("index.html", *FILES):
        text = (STATIC / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import", text), name
        assert not re.search(r'(?:src|href)="/', text), f"{name}: an absolute address breaks behind a prefix"
        assert "innerHTML" not in text, f"{name}: text of models and clients must not become markup"


def test_an_unchanged_file_is_not_sent_again():
    client = _client()
    tag = client.get("/dashboard/page.js").headers["etag"]
    again = client.get("/dashboard/page.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_data_tells_the_metrics_and_checks_its_argument():
    metrics = Metrics(model_name="m", has_drafter=True)
    feed = EngineFeed(metrics)
    feed.step()
    feed.finished()
    client = _client(metrics)
    answer = client.get("/dashboard/data")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["server"]["model"] == "m"
    assert answer.json()["tiles"]["acceptance_length"] == 3.0
    for wrong in ("x", "-5", "", "1e9", "9" * 400, "٣"):
        with pytest.raises(RequestError, match="after"):
            client.get("/dashboard/data", params={"after": wrong})


def test_numbers_are_guarded_and_the_page_is_not():
    client = _client(closed=True)
    assert client.get("/dashboard/data").status_code == 401
    assert client.get("/").status_code == 200
    assert client.get("/dashboard/page.js").status_code == 200


def _luminance(colour: str) -> float:
    if len(colour) == 4:
        colour = "#" + "".join(2 * digit for digit in colour[1:])
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_enough_contrast(scheme):
    """WCAG AA: 4.5 for text, 3 for lines of charts and borders of controls."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block)) for block in re.split("@media", CSS, maxsplit=2)[:2]
    )
    colours = light if scheme == "light" else dark
    assert len(colours) == 17
    text = ("text", "muted", "good", "info", "warning", "bad")
    for ground in ("panel", "ground"):
        for name in text:
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert _contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert _contrast(colours["text"], colours["drafted"]) >= 4.5
    for name in ("c1", "c2", "c3", "c4", "drafted-line", "muted"):
        assert _contrast(colours[name], colours["panel"]) >= 3, name
