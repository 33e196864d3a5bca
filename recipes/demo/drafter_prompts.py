"""What the target is asked so that drafters can learn from its answers: one shuffled file of many kinds of prompts.

Conversations are asked without their answers, turn after turn (`regenerate.turns: all`), so that later turns follow on
what the target itself said. Some single questions get a second one. Long documents come with a question or a task: drafters
must have met long prompts, and conversations have few.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.demo import jsonlines
from recipes.demo.conversations import weight_of

FOLLOW_UP_SHARE = 0.08  # of single questions
FOLLOW_UPS = (
    "Can you say that in fewer words?",
    "Please give an example.",
    "Why is that so?",
    "Now put the same into a list.",
    "What would you change if there were twice as many?",
    "Could you explain the last part once more?",
    "Write it again for somebody who knows nothing about it.",
    "Is there another way to do this?",
    "What comes next?",
    "And what can go wrong?",
)
DOCUMENT_TASKS = (
    "Summarise the text above in three sentences.",
    "What is this text about?",
    "Name the persons or things that matter most here, and say what they do.",
    "Go on with the text.",
    "Which three points should a reader remember?",
    "Explain the most important sentence of the text.",
    "How does it end?",
    "Ask a question that the text answers, and answer it.",
    "What does the writer think, and how do you know?",
    "Write a title and a short introduction for it.",
)
SHORTEST, LONGEST = 1_500, 11_500  # characters of a document; some 3,200 tokens
SYSTEM_DROPPED = 0.5  # of short system prompts: most requests come without any


def questions(record: jsonlines.Record, rng: random.Random) -> jsonlines.Record | None:
    """The user's turns, with a system prompt before them where there is one; None where nobody asks."""
    asked = [{"role": "user", "content": m["content"]} for m in record["messages"] if m["role"] == "user"]
    if not asked:
        return None
    first = record["messages"][0]
    if first["role"] == "system" and (len(first["content"]) > 120 or rng.random() > SYSTEM_DROPPED):
        asked.insert(0, first)
    if len(asked) == 1 and rng.random() < FOLLOW_UP_SHARE:
        asked.append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
    return {"messages": asked, "category": str(record["source"]).split("/", 1)[0]}


def long_prompts(documents: Iterable[jsonlines.Record], count: int, rng: random.Random) -> Iterator[jsonlines.Record]:
    """Parts of long documents, of sizes spread evenly over their logarithm, each with a task before or after it."""
    enough = [record for record in documents if len(record["text"]) > SHORTEST]
    for _ in range(count if enough else 0):
        text = rng.choice(enough)["text"]
        size = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
        start = rng.randrange(max(1, len(text) - size))
        part, task = text[start : start + size].strip(), rng.choice(DOCUMENT_TASKS)
        content = f"{part}\n\n{task}" if rng.random() < 0.8 else f"{task.replace('above', 'below')}\n\n{part}"
        yield {"messages": [{"role": "user", "content": content}], "category": "long-document"}


def write_prompts(
    conversations: list[Path], documents: list[Path], out: Path, *, long_count: int, seed: int = 4
) -> int:
    """Write the file; return how many prompts it has."""
    rng, prompts = random.Random(seed), []
    for path in conversations:
        for record in jsonlines.read(path):
            weight = 1.0 if "category" in record else min(1.0, weight_of(record["source"]))
            if rng.random() < weight and (prompt := questions(record, rng)) is not None:
                prompts.append(prompt)
    prompts += long_prompts((r for path in documents for r in jsonlines.read(path)), long_count, rng)
    rng.shuffle(prompts)
    return jsonlines.write(out, prompts)
