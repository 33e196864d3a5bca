"""Which conversations are fit to learn from."""

from collections import Counter

from fledge.decoding.statistics import repeated_tokens
from recipes.demo import jsonlines

SAME_LINE = 3  # times, at most
REPEATED = 0.2  # of an answer's words inside sequences of it that return, at most: small models copy loops


def repeated_share(text: str) -> float:
    """Share of the words that lie inside a sequence of words seen before in the same text."""
    words = text.split()
    return sum(repeated_tokens(words)) / max(1, len(words))


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
