"""`fledge demo`, as a newcomer runs it."""

import json
from pathlib import Path

from tests.command_line import fledge

QUICK = ("--max-tokens", "24", "--repeats", "1", "--device", "cpu", "--threads", "1")


def test_it_shows_the_same_tokens_four_ways(tmp_path: Path) -> None:
    done = fledge("demo", *QUICK, "What is a list in Python?", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Lossless: the same" in done.stdout
    assert "1 prompt, greedy" in done.stdout
    for name in ("transformers", "no speculation", "EAGLE-3", "EAGLE-3.1", "acceptance"):
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_object(tmp_path: Path) -> None:
    done = fledge("demo", *QUICK, "--json", "--depth", "3", "Hello!", cwd=tmp_path)
    figures = json.loads(done.stdout)
    assert figures["identical"]
    assert figures["identical_to_transformers"]
    assert set(figures["contenders"]) == {"transformers", "no speculation", "EAGLE-3", "EAGLE-3.1"}
    assert figures["contenders"]["EAGLE-3.1"]["acceptance_length"] >= 1
    assert len(figures["contenders"]["EAGLE-3.1"]["rate_by_depth"]) == 3


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    for options in (("--depth", "17"), ("--max-tokens", "0"), ("--device", "abacus")):
        done = fledge("demo", *options, cwd=tmp_path)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stdout == ""
