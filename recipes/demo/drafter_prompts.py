"""What drafters learn from: text to read along with the target, and what the target is asked, each in one file.

Text: conversations as the chat template writes them, and documents, most of them as answers to a request to go on
with their beginning, since drafters will meet nothing but conversations. The tokenizer begins no text by itself, and
the target was trained with none but such that begin: the first token is written out.

Prompts, shuffled: conversations are asked without their answers, turn after turn (`regenerate.turns: all`), so that
later turns follow on what the target itself said. Some single questions get a second one. Long documents come with a
question or a task, for drafters must have met long prompts, and conversations have few; so do short parts, of which
there are more kinds than of questions. Others are made of both (`made_prompts`). What shares words with prompts of an
evaluation is left out of those.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.demo import jsonlines, made_prompts
from recipes.demo.code_prompts import code_prompts
from recipes.demo.conversations import weight_of
from recipes.demo.tokenizer import BEGIN, END, TURN_END, TURN_START

MOST_TURNS = 5  # of a conversation: turns are answered one after another, and few have many
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
GOING_ON = (
    "Go on with this text:\n\n{}",
    "Here is how a text begins. Write the rest.\n\n{}",
    "{}\n\nWhat comes after this?",
    "Continue:\n\n{}",
)
AS_ANSWER = 0.8  # of documents
PART = 13_500  # characters of a document; some 3,700 tokens
LONG, SHORT = (1_500, 11_500), (150, 1_500)  # characters of a document in a prompt; up to some 3,200 tokens
MADE_COPIES = 2  # of a problem, with other numbers
SYSTEM_DROPPED = 0.5  # of short system prompts: most requests come without any


def rendered(messages: Iterable[dict[str, str]]) -> str:
    """A conversation as the bundled target's chat template writes it."""
    turns = (f"{TURN_START}{m['role']}\n{m['content'].strip()}{TURN_END}\n" for m in messages)
    return BEGIN + "".join(turns)


def texts(document: str, rng: random.Random) -> Iterator[str]:
    """The parts of a document, as they are or as answers."""
    plain = document.replace("<|", "< |")  # what spells a special token stays text
    for start in range(0, len(plain), PART):
        part, is_last = plain[start : start + PART], start + PART >= len(plain)
        middle = part.find(" ", rng.randrange(60, 400))
        if middle > 0 and rng.random() < AS_ANSWER:
            asked = rng.choice(GOING_ON).format(part[:middle].strip())
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": part[middle:]}]
            yield rendered(turns)
        else:
            yield f"{BEGIN}{part}{END if is_last else ''}"


def write_text(conversations: list[Path], documents: list[Path], out: Path, *, seed: int = 4) -> int:
    """Write {"text", "category"} lines; return how many."""
    rng, count = random.Random(seed), 0
    partial = out.with_name(f"{out.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for path in (*conversations, *documents):
            for record in jsonlines.read(path):
                is_chat = "messages" in record
                for text in [rendered(record["messages"])] if is_chat else texts(record["text"], rng):
                    line = {"text": text, "category": path.name.split("-")[0].split(".")[0]}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    count += 1
    partial.replace(out)
    return count


def questions(record: jsonlines.Record, rng: random.Random) -> jsonlines.Record | None:
    """The user's turns, with a system prompt before them where there is one; None where nobody asks."""
    asked = [{"role": "user", "content": m["content"]} for m in record["messages"] if m["role"] == "user"]
    if not asked:
        return None
    if len(asked) > 1:
        asked = asked[: rng.randint(2, MOST_TURNS)]
    first = record["messages"][0]
    if first["role"] == "system" and (len(first["content"]) > 120 or rng.random() > SYSTEM_DROPPED):
        asked.insert(0, first)
    if len(asked) == 1 and rng.random() < FOLLOW_UP_SHARE:
        asked.append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
    return {"messages": asked, "category": str(record["source"]).split("/", 1)[0]}


def document_prompts(
    documents: list[jsonlines.Record], count: int, sizes: tuple[int, int], rng: random.Random
) -> Iterator[jsonlines.Record]:
    """Parts of documents, of sizes spread evenly over their logarithm, each with a task before or after it."""
    shortest, longest = sizes
    enough = [record["text"] for record in documents if len(record["text"]) > shortest]
    for _ in range(count if enough else 0):
        text, size = rng.choice(enough), round(shortest * (longest / shortest) ** rng.random())
        start = rng.randrange(max(1, len(text) - size))
        part, task = text[start : start + size].strip(), rng.choice(DOCUMENT_TASKS)
        content = f"{part}\n\n{task}" if rng.random() < 0.8 else f"{task.replace('above', 'below')}\n\n{part}"
        yield {"messages": [{"role": "user", "content": content}], "category": "document"}


def write_prompts(
    conversations: list[Path],
    documents: list[Path],
    out: Path,
    *,
    long_count: int,
    short_count: int,
    made_count: int = 0,
    evaluation: Path | None = None,
    seed: int = 4,
) -> int:
    """Write the file; return how many prompts it has. None is there twice.

    With a `made_count` so many are made of topics and so many of code, half as many of pages, a fifth of crossed tasks,
    and others as there are problems and conversations to make them of.
    """
    reserved = sorted(evaluation.glob("*.jsonl*")) if evaluation else []
    if evaluation and not reserved:
        jsonlines.fail(f"{evaluation}: no *.jsonl and no *.jsonl.xz to keep out are there")
    rng, prompts = random.Random(seed), []
    talks = [record for path in conversations for record in jsonlines.read(path)]
    for record in talks:
        weight = 1.0 if "category" in record else min(1.0, weight_of(record["source"]))
        if rng.random() < weight and (prompt := questions(record, rng)) is not None:
            prompts.append(prompt)
    read = [record for path in documents for record in jsonlines.read(path)]
    for count, sizes in ((long_count, LONG), (short_count, SHORT)):
        prompts += document_prompts(read, count, sizes, rng)
    if made_count:
        shares = made_prompts.kept_out(record for path in reserved for record in jsonlines.read(path))
        code = [record for record in read if record["source"].startswith("code")]
        requests = code_prompts(code, made_count, rng)
        new = made_prompts.made(
            talks,
            [record for record in read if not record["source"].startswith("code")],
            topic_count=made_count,
            page_count=made_count // 2,
            crossed_count=made_count // 5,
            problem_copies=MADE_COPIES,
            most_turns=MOST_TURNS,
            rng=rng,
        )
        prompts += (prompt for prompt in (*new, *requests) if not shares(prompt))
    rng.shuffle(prompts)
    once = {json.dumps(prompt["messages"]): prompt for prompt in prompts}
    return jsonlines.write(out, once.values())
