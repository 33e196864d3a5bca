"""Which conversations are fit to learn from."""

from collections import Counter

from recipes.demo import jsonlines

SAME_LINE = 3  # times, at most
SIZE = 8  # words of a sequence whose return is a repetition
REPEATED = 0.2  # of an answer's words inside such sequences, at most: small models copy loops


def repeated_share(text: str, size: int = SIZE) -> float:
    """Share of the words that lie inside a sequence of `size` words seen before in the same text."""
    words = text.split()
    inside = [False] * len(words)
    seen: set[tuple[str, ...]] = set()
    for start, window in enumerate(zip(*(words[i:] for i in range(size)), strict=False)):
        if window in seen:
            inside[start : start + size] = [True] * size
        seen.add(window)
    return sum(inside) / max(1, len(words))


def acceptable(record: jsonlines.Record) -> bool:
    """Leave out conversations with an answer that claims another identity, is empty, or repeats itself."""
    for message in record["messages"]:
        if message["role"] != "assistant":
            continue
        text = message["content"].strip()
        if not text or "openai" in text.lower() or "chatgpt" in text.lower():
            return False
        lines = Counter(line for line in text.splitlines() if len(line) > 12)
        if max(lines.values(), default=0) > SAME_LINE or repeated_share(text) > REPEATED:
            return False
    return True
