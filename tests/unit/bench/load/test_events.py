import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.bench.load import client
from fledge.bench.load.client import StreamError, split_events

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)


def parse(parts: list[bytes]) -> list[str]:
    found, rest = list[str](), b""
    for part in (*parts, b"\n\n"):
        events, rest = split_events(rest + part)
        found += events
    return found


@given(data=st.data())
def test_events_come_out_whole_however_the_bytes_are_cut(data: st.DataObject) -> None:
    wanted, text = [], data.draw(st.sampled_from(["", "\ufeff"]))
    for lines in data.draw(st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=5)):
        wanted.append("\n".join(lines))
        end = data.draw(LINE_ENDS)
        for line in lines:
            noise = data.draw(st.sampled_from(["", ": ping", "event: x", "id", "retry: 3", "dataset: 1"]))
            text += (noise + end if noise else "") + f"data: {line}{end}"
        text += end
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    assert parse([encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]) == wanted
    assert parse([encoded[i : i + 1] for i in range(len(encoded))]) == wanted


def test_an_event_without_the_last_empty_line_is_not_lost() -> None:
    assert parse([b"data: a\n\ndata: [DONE]"]) == ["a", "[DONE]"]
    assert parse([b"data: a\n\n: bye\n"]) == ["a"]


def test_an_event_is_given_as_soon_as_it_is_complete() -> None:
    first, rest = split_events(b"data: a\r\n\r")
    assert first == ["a"]
    assert split_events(rest + b"\ndata:b\n\n")[0] == ["b"]


def test_only_one_space_is_dropped_and_bytes_that_are_no_text_do_not_hurt() -> None:
    assert parse([b"data:  a\n\ndata:\xff\n\n"]) == [" a", "\ufffd"]


def test_an_event_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_EVENT_BYTES", 100)
    _, rest = split_events(b"data: " + b"x" * 60)
    with pytest.raises(StreamError, match="an event of more than"):
        split_events(rest + b"x" * 60)
