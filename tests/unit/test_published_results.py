"""The results in docs/results: small, complete, and still read by the commands that made them."""

import re
from pathlib import Path

import pytest

from tests.command_line import fledge

RESULTS = Path(__file__).parents[2] / "docs" / "results"
MIB = 2**20


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for file in RESULTS.iterdir()) <= 3 * MIB


def test_every_link_of_the_documents_leads_somewhere() -> None:
    documents = [*RESULTS.glob("*.md"), *RESULTS.parent.glob("*.md"), RESULTS.parents[1] / "README.md"]
    links = [(file, link) for file in documents for link in re.findall(r"\]\(([^)#\s]+)", file.read_text())]
    local = [(file, link) for file, link in links if "://" not in link]
    assert len(local) > 20
    assert [f"{file.name}: {link}" for file, link in local if not (file.parent / link).exists()] == []


@pytest.mark.usefixtures("_blank_pictures")
def test_a_page_can_be_made_anew(tmp_path: Path) -> None:
    file = str(RESULTS / "servers-cpu.json.xz")
    done = fledge("bench", "report", file, "--out", "page.html", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "page.html").read_text().count('<svg class="chart"') > 5


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cut.json.xz").write_bytes((RESULTS / "servers-cpu.json.xz").read_bytes()[:1000])
    done = fledge("bench", "report", "cut.json.xz", cwd=tmp_path)
    assert done.returncode == 2
    assert "cut.json.xz: no readable JSON: damaged" in done.stderr
    assert len(done.stderr.splitlines()) == 1
