"""Prompts that nobody asked: data has more kinds of text than of questions, and a drafter must have met many contexts.

Only prompts are made, which the target then answers itself, so none need make sense or have a right answer:

changed    problems with other numbers and names
topics     open requests (explain, compare, write a letter about ...) on the headings of documents and books
headings   questions about a section of a page, worded as those of the data are
crossed    one task's instruction with another task's input
later      conversations from a later turn on

Requests about code are made by `code_prompts`.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator

from recipes.demo import jsonlines
from recipes.demo.code_files import word_sequences

Messages = list[dict[str, str]]
NUMBER = re.compile(r"(?<![\w^_{])\d{1,6}(?![\w}])")
WORD = re.compile(r"\w+")
NAME = re.compile(r"\b[A-Z][a-z]{2,9}\b")
PHRASES_FROM = 20_000  # characters
INSTRUCTION = 80  # characters that one has at least
NAMES = [
    "Ada",
    "Ben",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Leo",
    "Mina",
    "Nils",
    "Olga",
    "Pablo",
    "Quinn",
    "Rosa",
    "Samir",
    "Tara",
    "Umar",
    "Vera",
    "Wei",
    "Xenia",
    "Yusuf",
    "Zoe",
    "Amir",
    "Bella",
    "Cyrus",
    "Dora",
    "Emil",
    "Fatima",
    "Gideon",
    "Hana",
    "Igor",
    "Jade",
    "Karim",
    "Lena",
    "Mateo",
    "Nadia",
]
THINGS = [
    "apples",
    "bicycles",
    "books",
    "bottles",
    "boxes",
    "bracelets",
    "bricks",
    "buttons",
    "cakes",
    "candles",
    "cards",
    "chairs",
    "coins",
    "cookies",
    "cups",
    "eggs",
    "flowers",
    "hats",
    "keys",
    "lamps",
    "letters",
    "marbles",
    "mugs",
    "notebooks",
    "oranges",
    "pencils",
    "plants",
    "plates",
    "posters",
    "puzzles",
    "ribbons",
    "rocks",
    "seeds",
    "shells",
    "shirts",
    "stamps",
    "stickers",
    "tickets",
    "toys",
    "trees",
]
OPEN = (
    "What is {}?",
    "Explain {} to a beginner.",
    "Explain {} in two or three sentences.",
    "Explain {} as if I were ten years old.",
    "Why does {} matter?",
    "Tell me something about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me three facts about {}.",
    "List five things that one should know about {}.",
    "Make a short list of questions that a student could ask about {}.",
    "How does {} work?",
    "What is the history of {}?",
    "What are common mistakes with {}, and how can they be avoided?",
    "How would you teach {} to a class?",
    "Write a short story in which {} plays a part.",
    "Write a poem about {}.",
    "Write a limerick about {}.",
    "Write an email to a colleague who has asked about {}.",
    "Write a polite letter to a company about {}.",
    "Write a short blog post about {}.",
    "Write an introduction to an essay about {}.",
    "Write a dialogue between two friends who disagree about {}.",
    "Write a product description for {}.",
    "Write a news report about {}.",
    "Write a short speech on {}.",
    "Describe {} vividly, using all five senses.",
    "Draft a plan for a one-week project on {}.",
    "Give step-by-step instructions for somebody who must deal with {}.",
    "What would happen if there were no {}?",
    "What would you recommend to somebody who is interested in {}?",
    "Imagine that you are an expert on {}. What is your advice?",
    "Pretend to be a detective who investigates {}. What do you do first?",
    "Imagine you are a traveller from the past who sees {} for the first time. What do you say?",
    "You are a teacher. A pupil asks you: what is {}? Answer in a friendly way.",
    "Please argue for {}, then against it.",
    "Summarise what is known about {} in one paragraph.",
    "Make a table with two columns about {}.",
    "Classify the parts of {} into groups.",
    "Ask me three questions about {}, with answers.",
    "Is {} a good idea? Give reasons.",
    "Fix the spelling and the grammar: i has heard much of {}, but dont know what it are.",
    "Translate this into simple words: {}.",
    "Give a title, a summary and three keywords for a text about {}.",
    "Answer with a single sentence: what do people mean by {}?",
)
PAIRED = (
    "What is the difference between {} and {}?",
    "Compare {} with {}.",
    "How are {} and {} connected?",
    "Which is more important, {} or {}? Explain your choice.",
    "Write a conversation between somebody who likes {} and somebody who prefers {}.",
    "Write a paragraph that mentions both {} and {}.",
)
OF_PAGE = (
    "What does {page} do?",
    "What is {page} used for?",
    "Can you explain {page}?",
    "Show an example of {page}.",
    "What should I know when using {page}?",
    "How does {page} work?",
    "Give me an introduction to this topic: {page}.",
    "When would I use {page}?",
)
OF_SECTION = (
    'Can you explain "{section}" in relation to {page}?',
    'In {page}, explain the section on "{section}".',
    "What should I know about {section} when working with {page}?",
    "Tell me about {section} ({page}).",
    "I want to understand {section} (topic: {page}). How should I go about it?",
    "In the context of {page}, explain {section}.",
    "How is {section} related to {page}?",
)
OPENINGS = ("", "", "", "", "Hi, ", "Hello! ", "Quick question: ", "Could you help me? ", "I was wondering: ")
HEADING = re.compile(r"^#{1,4} (.{4,70})$", re.MULTILINE)
PHRASE = re.compile(r"\bthe [a-z]{4,} of (?:the )?[a-z]{4,}\b")  # of books, which have few headings
PLAIN = [
    "abstract",
    "arguments",
    "attributes",
    "cause",
    "constructor",
    "contents",
    "description",
    "example",
    "examples",
    "exceptions",
    "html",
    "css",
    "introduction",
    "message",
    "methods",
    "motivation",
    "note",
    "notes",
    "options",
    "overview",
    "parameters",
    "properties",
    "rationale",
    "remarks",
    "requirements",
    "result",
    "summary",
    "syntax",
    "type",
    "usage",
    "value",
    "values",
]


def changed(text: str, rng: random.Random) -> str:
    """A problem with other numbers, of about the same size, and in half of the cases other people and things."""

    def other(match: re.Match[str]) -> str:
        value = int(match[0])
        if value < 2 or (1900 < value < 2100) or rng.random() < 0.15:
            return match[0]
        return str(rng.randint(max(2, value // 2), max(value * 2, 6)))

    text = NUMBER.sub(other, text)
    if rng.random() < 0.5:
        within = {m[0] for m in NAME.finditer(text) if m.start() and text[m.start() - 2] not in ".?!:\n"}
        within = {name for name in within if text.count(name) > 1 and "\\" not in text}
        given = dict(zip(sorted(within), rng.sample(NAMES, len(NAMES)), strict=False))
        text = NAME.sub(lambda m: given.get(m[0], m[0]), text)
        known = [thing for thing in THINGS if re.search(rf"\b{thing}\b", text)]
        for thing, instead in zip(known, rng.sample(THINGS, len(THINGS)), strict=False):
            text = re.sub(rf"\b{thing}\b", instead, text)
    return text


def headings(document: str) -> list[str]:
    """The headings of a document that begins with its title, this one first; without those that every document has."""
    if not document.startswith("# "):
        return []
    found = (" ".join(h.split()).rstrip(".:") for h in HEADING.findall(document[:40_000]))
    return [h for h in found if h.lower() not in PLAIN]


def as_topic(heading: str) -> str:
    """A heading as it would stand within a sentence."""
    plain = heading.strip("`")
    return plain[0].lower() + plain[1:] if re.fullmatch(r"[A-Z][a-z]+(?: [a-z]+)*", plain) else plain


def asked(text: str, category: str) -> jsonlines.Record:
    return {"messages": [{"role": "user", "content": text}], "category": category}


def topics(titles: list[str], count: int, rng: random.Random) -> Iterator[jsonlines.Record]:
    """Open requests, each about one or two of the titles."""
    for _ in range(count if titles else 0):
        wordings = PAIRED if rng.random() < 0.15 else OPEN
        yield asked(rng.choice(wordings).format(rng.choice(titles), rng.choice(titles)), "topics")


def pages(documents: list[list[str]], count: int, rng: random.Random) -> Iterator[jsonlines.Record]:
    """Questions about pages and their sections."""
    enough = [found for found in documents if found]
    for _ in range(count if enough else 0):
        page, *sections = rng.choice(enough)
        if sections and rng.random() < 0.7:
            question = rng.choice(OF_SECTION).format(section=rng.choice(sections), page=page)
        else:
            question = rng.choice(OF_PAGE).format(page=page)
        yield asked(rng.choice(OPENINGS) + question, "pages")


def is_task(messages: Messages) -> bool:
    """Whether an instruction and its input stand apart, and neither is out of the ordinary."""
    if len(messages) < 2:
        return False
    first, second = messages[0], messages[1]
    return first["role"] == "system" and len(first["content"]) > INSTRUCTION and len(second["content"]) < 1_500


def crossed(tasks: list[tuple[str, str]], count: int, rng: random.Random) -> Iterator[jsonlines.Record]:
    """One's instruction with another's input."""
    for _ in range(count if tasks else 0):
        instruction, given = rng.choice(tasks)[0], rng.choice(tasks)[1]
        if rng.random() < 0.5:
            content = f"{instruction}\n\n{given}"
            yield asked(content, "crossed")
        else:
            messages = [{"role": "system", "content": instruction}, {"role": "user", "content": given}]
            yield {"messages": messages, "category": "crossed"}


def later(messages: Messages, rng: random.Random, most: int) -> jsonlines.Record | None:
    """What the user says from a later turn on, as if it were a beginning."""
    said = [m["content"] for m in messages if m["role"] == "user"]
    if len(said) < 3:
        return None
    first = rng.randrange(1, len(said) - 1)
    turns = [{"role": "user", "content": text} for text in said[first : first + rng.randint(1, most)]]
    return {"messages": turns, "category": "later"}


def made(
    conversations: Iterable[jsonlines.Record],
    documents: Iterable[jsonlines.Record],
    *,
    topic_count: int,
    page_count: int,
    crossed_count: int,
    problem_copies: int,
    most_turns: int,
    rng: random.Random,
) -> Iterator[jsonlines.Record]:
    """All kinds, from conversations with `messages` and documents with `text`, in no order."""
    tasks: list[tuple[str, str]] = []
    for record in conversations:
        messages, source = record["messages"], str(record["source"])
        users = [m["content"] for m in messages if m["role"] == "user"]
        if not users:
            continue
        if source in ("gsm8k-train", "math", "synthetic-math"):
            texts = {changed(users[0], rng) for _ in range(problem_copies)} - {users[0]}
            yield from (asked(text, "changed") for text in sorted(texts))
        elif source.startswith("natural-instructions") and is_task(messages):
            tasks.append((messages[0]["content"], users[0]))
        if (prompt := later(messages, rng, most_turns)) is not None:
            yield prompt
    yield from crossed(tasks, crossed_count, rng)
    found, titles = list[list[str]](), dict[str, None]()
    for record in documents:
        found.append(headings(record["text"]))
        titles.update(dict.fromkeys(as_topic(h) for h in found[-1] if len(h.split()) <= 5))
        if not found[-1]:
            titles.update(dict.fromkeys(PHRASE.findall(record["text"][:PHRASES_FROM])))
    yield from topics(list(titles), topic_count, rng)
    yield from pages(found, page_count, rng)


def kept_out(records: Iterable[jsonlines.Record]) -> Callable[[jsonlines.Record], bool]:
    """Return what says whether a message is one of these, word for word, or shares 13 words in a row with any."""
    requests, reserved = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for record in records:
        for message in record.get("messages", []):
            requests.add(tuple(WORD.findall(message["content"].lower())))
            reserved.update(word_sequences(message["content"]))

    def shares(prompt: jsonlines.Record) -> bool:
        texts = [m["content"] for m in prompt["messages"]]
        is_one = any(tuple(WORD.findall(text.lower())) in requests for text in texts if len(text) > 20)
        return is_one or any(not reserved.isdisjoint(word_sequences(text)) for text in texts)

    return shares
