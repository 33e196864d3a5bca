"""Programs on strings."""

from .program import program

TEXTS = (
    program(
        "checks whether a string is a palindrome",
        "It keeps only letters and digits in lower case. Then it compares the result with its own reverse.",
        "O(n), where n is the length of the string",
        """
assert is_palindromic("Level")
assert is_palindromic("Was it a car or a cat I saw?")
assert not is_palindromic("python")
assert is_palindromic("")
""",
        '''
def is_palindromic(text: str) -> bool:
    """Check whether text is the same in both directions, ignoring case and punctuation."""
    # Keep only letters and digits, in lower case.
    cleaned = [char.lower() for char in text if char.isalnum()]
    # Compare with the reversed list.
    return cleaned == cleaned[::-1]
''',
        (
            '''
def is_palindromic(text: str) -> bool:
    """Check whether text is the same in both directions, using recursion."""
    cleaned = "".join(char.lower() for char in text if char.isalnum())
    # A text of at most one character always reads the same.
    if len(cleaned) < 2:
        return True
    # The outer characters must match, and so must the rest.
    return cleaned[0] == cleaned[-1] and is_palindromic(cleaned[1:-1])
''',
            """The text is cleaned first. A text with fewer than two characters is a palindrome. Otherwise the first
            and last characters must be equal, and the function calls itself on the part between them.""",
        ),
        javascript=r"""
function isPalindromic(text) {
  const cleaned = text.toLowerCase().replace(/[^a-z0-9]/g, "");
  return cleaned === [...cleaned].reverse().join("");
}
""",
    ),
    program(
        "checks whether parentheses in a string are balanced",
        """It keeps the opening brackets on a stack. Each closing bracket must match the bracket on top of the stack.
        At the end the stack must be empty.""",
        "O(n), where n is the length of the string, because every character is looked at once",
        """
assert is_balanced("(a + b) * [c - d]")
assert not is_balanced("(]")
assert not is_balanced("((")
assert is_balanced("")
""",
        '''
def is_balanced(text: str) -> bool:
    """Check whether every bracket in text is closed in the right order."""
    pairs = {")": "(", "]": "[", "}": "{"}
    stack = []
    for char in text:
        # Remember every opening bracket.
        if char in pairs.values():
            stack.append(char)
        # A closing bracket must match the last opening one.
        elif char in pairs:
            if not stack or stack.pop() != pairs[char]:
                return False
    # Nothing may stay open.
    return not stack
''',
        javascript="""
function isBalanced(text) {
  const pairs = { ")": "(", "]": "[", "}": "{" };
  const stack = [];
  for (const char of text) {
    if ("([{".includes(char)) {
      stack.push(char);
    } else if (char in pairs && stack.pop() !== pairs[char]) {
      return false;
    }
  }
  return stack.length === 0;
}
""",
    ),
    program(
        "checks whether two strings are anagrams",
        """It removes the spaces and ignores case. Two strings are anagrams if every letter occurs equally often in
        both, so it compares their letter counts.""",
        "O(n), where n is the total length of the two strings",
        """
assert are_anagrams("listen", "Silent")
assert are_anagrams("dirty room", "dormitory")
assert not are_anagrams("apple", "papal")
assert are_anagrams("", "")
""",
        '''
from collections import Counter


def are_anagrams(first: str, second: str) -> bool:
    """Check whether two strings use the same letters equally often."""

    # Ignore spaces and case, then count the letters.
    def letters(text: str) -> Counter:
        return Counter(text.replace(" ", "").lower())

    # Equal counts mean anagrams.
    return letters(first) == letters(second)
''',
        (
            '''
def are_anagrams(first: str, second: str) -> bool:
    """Check whether two strings have the same letters, by sorting them."""
    # Ignore spaces and case.
    first = first.replace(" ", "").lower()
    second = second.replace(" ", "").lower()
    # Anagrams are equal once they are sorted.
    return sorted(first) == sorted(second)
''',
            "Spaces and case are ignored. Anagrams contain the same letters, so they are equal once sorted.",
        ),
        javascript="""
function areAnagrams(first, second) {
  const key = (text) => [...text.replaceAll(" ", "").toLowerCase()].sort().join("");
  return key(first) === key(second);
}
""",
    ),
    program(
        "computes the Levenshtein distance between two strings",
        """It fills a table row by row, keeping only the previous row. Each cell is the cheapest of a deletion, an
        insertion and a substitution. The last cell is the distance.""",
        "O(m * n), where m and n are the lengths of the two strings",
        """
assert levenshtein("kitten", "sitting") == 3
assert levenshtein("book", "back") == 2
assert levenshtein("", "abc") == 3
""",
        '''
def levenshtein(a: str, b: str) -> int:
    """Return the smallest number of edits that turn a into b."""
    # The first row: build each prefix of b from nothing.
    previous = list(range(len(b) + 1))
    for i, char_a in enumerate(a, start=1):
        current = [i]
        for j, char_b in enumerate(b, start=1):
            # Take the cheapest of deletion, insertion and substitution.
            cost = 0 if char_a == char_b else 1
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + cost))
        previous = current
    return previous[-1]
''',
        (
            '''
from functools import cache


@cache
def levenshtein(a: str, b: str) -> int:
    """Return the edit distance of a and b, using recursion with a cache."""
    # If one string is empty, all characters of the other are inserted.
    if not a or not b:
        return len(a) + len(b)
    # Equal first characters cost nothing.
    if a[0] == b[0]:
        return levenshtein(a[1:], b[1:])
    # Otherwise try a deletion, an insertion and a substitution.
    return 1 + min(levenshtein(a[1:], b), levenshtein(a, b[1:]), levenshtein(a[1:], b[1:]))
''',
            """If one string is empty, the distance is the length of the other. Equal first characters are skipped.
            Otherwise it tries all three edits and takes the best one, and the cache avoids repeated work.""",
        ),
        javascript="""
function levenshtein(a, b) {
  let previous = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const current = [i];
    for (let j = 1; j <= b.length; j++) {
      const cost = a[i - 1] === b[j - 1] ? 0 : 1;
      current.push(Math.min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + cost));
    }
    previous = current;
  }
  return previous[b.length];
}
""",
    ),
    program(
        "converts camelCase names to snake_case",
        """The regular expression finds every capital letter that is not at the start. An underscore is put before it,
        and the whole name is made lower case.""",
        "O(n), where n is the length of the name",
        """
assert camel_to_snake("userName") == "user_name"
assert camel_to_snake("maxLineLength") == "max_line_length"
assert camel_to_snake("") == ""
""",
        r'''
import re


def camel_to_snake(name: str) -> str:
    """Convert a camelCase name to snake_case."""
    # Put an underscore before each capital letter, except at the start.
    separated = re.sub(r"(?<!^)([A-Z])", r"_\1", name)
    # Make everything lower case.
    return separated.lower()
''',
        (
            '''
def camel_to_snake(name: str) -> str:
    """Convert a camelCase name to snake_case without regular expressions."""
    parts = []
    for char in name:
        # A capital letter starts a new word.
        if char.isupper() and parts:
            parts.append("_")
        parts.append(char.lower())
    return "".join(parts)
''',
            """The loop goes through the characters. Before each capital letter that is not the first character it
            adds an underscore, and every letter is added in lower case.""",
        ),
        javascript=r"""
function camelToSnake(name) {
  return name.replace(/(?!^)([A-Z])/g, "_$1").toLowerCase();
}
""",
    ),
    program(
        "converts snake_case names to camelCase",
        """It splits the name at the underscores. The first word stays as it is, and each following word gets a
        capital first letter.""",
        "O(n), where n is the length of the name",
        """
assert snake_to_camel("user_name") == "userName"
assert snake_to_camel("max_line_length") == "maxLineLength"
assert snake_to_camel("") == ""
""",
        '''
def snake_to_camel(name: str) -> str:
    """Convert a snake_case name to camelCase."""
    # The first word stays as it is.
    first, *rest = name.split("_")
    # Every other word starts with a capital letter.
    return first + "".join(word.capitalize() for word in rest)
''',
        javascript=r"""
function snakeToCamel(name) {
  return name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
}
""",
    ),
    program(
        "counts how often each word appears in a text",
        """The text is made lower case, and a regular expression finds the words. A Counter then counts how often each
        word occurs.""",
        "O(n), where n is the length of the text",
        """
assert count_words("the cat and the dog") == {"the": 2, "cat": 1, "and": 1, "dog": 1}
assert count_words("Go, go, go!") == {"go": 3}
assert count_words("") == {}
""",
        r'''
import re
from collections import Counter


def count_words(text: str) -> dict[str, int]:
    """Return how often each word occurs in text, ignoring case."""
    # Find the words in lower case.
    words = re.findall(r"[a-z']+", text.lower())
    # Count them.
    return dict(Counter(words))
''',
        (
            '''
def count_words(text: str) -> dict[str, int]:
    """Return how often each word occurs in text, with a plain dictionary."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        # Remove punctuation around the word.
        word = word.strip(".,;:!?")
        # Add one to its count.
        counts[word] = counts.get(word, 0) + 1
    return counts
''',
            """The text is split into words, and punctuation around each word is removed. The dictionary stores one
            count per word, starting from zero.""",
        ),
        javascript=r"""
function countWords(text) {
  const counts = {};
  for (const word of text.toLowerCase().match(/[a-z']+/g) ?? []) {
    counts[word] = (counts[word] ?? 0) + 1;
  }
  return counts;
}
""",
    ),
    program(
        "counts the vowels in a string",
        "It goes through the characters in lower case. It counts those that are one of the letters a, e, i, o and u.",
        "O(n), where n is the length of the string",
        """
assert count_vowels("education") == 5
assert count_vowels("Rhythm") == 0
assert count_vowels("") == 0
""",
        '''
def count_vowels(text: str) -> int:
    """Return the number of vowels in text."""
    # Compare in lower case, so that capitals count too.
    return sum(char in "aeiou" for char in text.lower())
''',
        (
            '''
def count_vowels(text: str) -> int:
    """Return the number of vowels in text, with a loop."""
    count = 0
    for char in text.lower():
        # Add one for every vowel.
        if char in "aeiou":
            count += 1
    return count
''',
            "The counter starts at zero. For each character that is a vowel, it grows by one.",
        ),
        (
            '''
def count_vowels(text: str) -> int:
    """Return the number of vowels in text, using recursion."""
    # An empty text has no vowels.
    if not text:
        return 0
    # Count the first character, then the rest.
    first = 1 if text[0].lower() in "aeiou" else 0
    return first + count_vowels(text[1:])
''',
            """An empty string has no vowels. Otherwise it checks the first character and adds the number of vowels in
            the rest of the string.""",
        ),
        javascript="""
function countVowels(text) {
  return [...text.toLowerCase()].filter((char) => "aeiou".includes(char)).length;
}
""",
    ),
    program(
        "encodes a string with run-length encoding",
        """`groupby` collects equal neighbouring characters into runs. For each run it writes the length followed by
        the character.""",
        "O(n), where n is the length of the string",
        """
assert rle_encode("aaabcc") == "3a1b2c"
assert rle_encode("zzzz") == "4z"
assert rle_encode("") == ""
""",
        '''
from itertools import groupby


def rle_encode(text: str) -> str:
    """Replace each run of equal characters by its length and the character."""
    # Each group is a run of equal characters.
    return "".join(f"{len(list(run))}{char}" for char, run in groupby(text))
''',
        (
            '''
def rle_encode(text: str) -> str:
    """Encode text with run-length encoding, using a loop."""
    result = []
    start = 0
    for end in range(1, len(text) + 1):
        # A run ends where the character changes or the text stops.
        if end == len(text) or text[end] != text[start]:
            result.append(f"{end - start}{text[start]}")
            start = end
    return "".join(result)
''',
            """The variable `start` marks the beginning of the current run. When the character changes, the length of
            the run and its character are added to the result.""",
        ),
        javascript=r"""
function rleEncode(text) {
  return text.replace(/(.)\1*/g, (run, char) => run.length + char);
}
""",
    ),
    program(
        "decodes a run-length encoded string",
        """It collects digits until it meets another character. Then it repeats that character as often as the number
        says and starts a new number.""",
        "O(n), where n is the length of the decoded string",
        """
assert rle_decode("3a1b2c") == "aaabcc"
assert rle_decode("12x") == "xxxxxxxxxxxx"
assert rle_decode("") == ""
""",
        '''
def rle_decode(encoded: str) -> str:
    """Expand pairs of a count and a character, such as 3a, into runs."""
    result = []
    digits = ""
    for char in encoded:
        # Collect the digits of the count.
        if char.isdigit():
            digits += char
        # Repeat the character and start a new count.
        else:
            result.append(char * int(digits))
            digits = ""
    return "".join(result)
''',
        (
            r'''
import re


def rle_decode(encoded: str) -> str:
    """Expand pairs of a count and a character with a regular expression."""
    # Each match is a count and the character after it.
    pairs = re.findall(r"(\d+)(\D)", encoded)
    return "".join(char * int(count) for count, char in pairs)
''',
            """The regular expression finds all pairs of a number and a character. Each character is repeated as often
            as its number says, and the pieces are joined.""",
        ),
        javascript=r"""
function rleDecode(encoded) {
  return encoded.replace(/(\d+)(\D)/g, (_, count, char) => char.repeat(Number(count)));
}
""",
    ),
    program(
        "extracts all e-mail addresses from a text",
        """The regular expression matches a name, an at sign and a domain with at least one dot. `findall` returns all
        matches in the order of the text.""",
        "O(n), where n is the length of the text",
        """
assert extract_emails("Write to ann@example.com or bob.lee@mail.org.") == ["ann@example.com", "bob.lee@mail.org"]
assert extract_emails("No address here") == []
assert extract_emails("") == []
""",
        r'''
import re


def extract_emails(text: str) -> list[str]:
    """Return all e-mail addresses in text, in order."""
    # A name, an at sign, and a domain with at least one dot.
    pattern = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
    return re.findall(pattern, text)
''',
        javascript=r"""
function extractEmails(text) {
  return text.match(/[\w.+-]+@[\w-]+(?:\.[\w-]+)+/g) ?? [];
}
""",
    ),
    program(
        "finds the longest common prefix of a list of strings",
        """It starts with the first string as the prefix. While another string does not start with it, the prefix
        loses its last character.""",
        "O(m * (m + n)), where n is the number of strings and m is the length of the first one",
        """
assert longest_prefix(["flower", "flow", "flight"]) == "fl"
assert longest_prefix(["car", "dog"]) == ""
assert longest_prefix([]) == ""
""",
        '''
def longest_prefix(words: list[str]) -> str:
    """Return the longest prefix that all words share."""
    if not words:
        return ""
    # Start with the whole first word.
    prefix = words[0]
    for word in words[1:]:
        # Shorten the prefix until the word starts with it.
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix
''',
        (
            '''
def longest_prefix(words: list[str]) -> str:
    """Return the longest common prefix, comparing column by column."""
    prefix = []
    # zip yields the first characters, then the second ones, and so on.
    for column in zip(*words):
        # Stop where the characters differ.
        if len(set(column)) > 1:
            break
        prefix.append(column[0])
    return "".join(prefix)
''',
            """`zip` takes the strings apart column by column. As long as all characters in a column are equal, the
            character belongs to the prefix.""",
        ),
        javascript="""
function longestPrefix(words) {
  let prefix = words[0] ?? "";
  for (const word of words) {
    while (!word.startsWith(prefix)) {
      prefix = prefix.slice(0, -1);
    }
  }
  return prefix;
}
""",
    ),
    program(
        "generates all permutations of a string",
        """A string of at most one character has only one permutation. Otherwise each character is put first in turn,
        followed by every permutation of the remaining characters.""",
        "O(n * n!), because there are n! permutations of length n",
        """
assert list(string_permutations("ab")) == ["ab", "ba"]
assert list(string_permutations("abc")) == ["abc", "acb", "bac", "bca", "cab", "cba"]
""",
        '''
def string_permutations(text: str) -> list[str]:
    """Return all permutations of text."""
    # A short text has only one order.
    if len(text) < 2:
        return [text]
    result = []
    for i, char in enumerate(text):
        # Put this character first and permute the others.
        others = text[:i] + text[i + 1 :]
        result.extend(char + rest for rest in string_permutations(others))
    return result
''',
        (
            '''
from collections.abc import Iterator
from itertools import permutations


def string_permutations(text: str) -> Iterator[str]:
    """Yield all permutations of text, one at a time."""
    # itertools yields tuples of characters.
    for order in permutations(text):
        yield "".join(order)
''',
            """`itertools.permutations` yields every order as a tuple of characters. Each tuple is joined to a string
            and yielded, so the permutations are never all in memory.""",
        ),
        javascript="""
function stringPermutations(text) {
  if (text.length < 2) {
    return [text];
  }
  return [...text].flatMap((char, i) =>
    stringPermutations(text.slice(0, i) + text.slice(i + 1)).map((rest) => char + rest)
  );
}
""",
    ),
    program(
        "groups a list of words by their first letter",
        """A dictionary maps each first letter to a list. `setdefault` creates the list when the letter is new, and
        the word is added to it.""",
        "O(n), where n is the number of words",
        """
assert group_by_letter(["apple", "bear", "ant"]) == {"a": ["apple", "ant"], "b": ["bear"]}
assert group_by_letter(["Zoo", "zebra"]) == {"z": ["Zoo", "zebra"]}
assert group_by_letter([]) == {}
""",
        '''
def group_by_letter(words: list[str]) -> dict[str, list[str]]:
    """Group words by their first letter, ignoring case."""
    groups: dict[str, list[str]] = {}
    for word in words:
        # Create the list for a new letter, then add the word.
        groups.setdefault(word[0].lower(), []).append(word)
    return groups
''',
        (
            '''
from collections import defaultdict


def group_by_letter(words: list[str]) -> dict[str, list[str]]:
    """Group words by their first letter with a defaultdict."""
    groups = defaultdict(list)
    for word in words:
        # A missing letter gets an empty list by itself.
        groups[word[0].lower()].append(word)
    return dict(groups)
''',
            """A `defaultdict` creates an empty list for each new letter. Every word is added to the list of its first
            letter, and the result is returned as a normal dictionary.""",
        ),
        javascript="""
function groupByLetter(words) {
  const groups = {};
  for (const word of words) {
    const letter = word[0].toLowerCase();
    (groups[letter] ??= []).push(word);
  }
  return groups;
}
""",
    ),
    program(
        "implements a Caesar cipher",
        """Each letter is moved forward in the alphabet by the shift, and the remainder by 26 wraps around at the end.
        All other characters stay the same.""",
        "O(n), where n is the length of the text",
        """
assert caesar("Hello, World!", 3) == "Khoor, Zruog!"
assert caesar("xyz", 2) == "zab"
assert caesar(caesar("secret", 7), -7) == "secret"
assert caesar("", 5) == ""
""",
        '''
def caesar(text: str, shift: int) -> str:
    """Shift every letter of text by the given number of places."""
    result = []
    for char in text:
        if char.isalpha() and char.isascii():
            # Upper and lower case letters start at different codes.
            start = ord("A") if char.isupper() else ord("a")
            # Move the letter and wrap around after z.
            result.append(chr((ord(char) - start + shift) % 26 + start))
        else:
            result.append(char)
    return "".join(result)
''',
        (
            '''
from string import ascii_lowercase, ascii_uppercase


def caesar(text: str, shift: int) -> str:
    """Shift every letter of text with a translation table."""
    shift %= 26
    # The target alphabets start at the shifted letter.
    lower = ascii_lowercase[shift:] + ascii_lowercase[:shift]
    upper = lower.upper()
    # Translate each letter to its partner.
    table = str.maketrans(ascii_lowercase + ascii_uppercase, lower + upper)
    return text.translate(table)
''',
            """The alphabet is rotated by the shift. A translation table maps each letter to the rotated one, and
            `translate` applies it to the text.""",
        ),
        javascript=r"""
function caesar(text, shift) {
  return text.replace(/[a-z]/gi, (char) => {
    const start = char <= "Z" ? 65 : 97;
    const place = (((char.charCodeAt(0) - start + shift) % 26) + 26) % 26;
    return String.fromCharCode(place + start);
  });
}
""",
    ),
    program(
        "justifies a paragraph to a given width",
        """`textwrap.wrap` breaks the paragraph into lines. In every line except the last, the missing spaces are
        spread over the gaps between the words.""",
        "O(n), where n is the length of the text",
        """
assert justify("one two three four", 9) == "one   two\\nthree\\nfour"
assert justify("a bb ccc", 20) == "a bb ccc"
assert justify("", 10) == ""
""",
        r'''
import textwrap


def justify(text: str, width: int) -> str:
    """Break text into lines and fill all but the last to the given width."""
    lines = [line.split() for line in textwrap.wrap(text, width)]
    for words in lines[:-1]:
        # Count the spaces that the words leave free.
        spaces = width - sum(len(word) for word in words)
        gaps = len(words) - 1
        for i in range(gaps):
            # Spread the spaces evenly, the first gaps get one more.
            words[i] += " " * (spaces // gaps + (i < spaces % gaps))
    filled = ["".join(words) for words in lines[:-1]]
    return "\n".join(filled + [" ".join(words) for words in lines[-1:]])
''',
    ),
    program(
        "masks all but the last four digits of a card number",
        "It removes the spaces. Then every digit except the last four is replaced by a star.",
        "O(n), where n is the length of the number",
        """
assert mask_card("1234 5678 9012 3456") == "************3456"
assert mask_card("4111111111111111") == "************1111"
assert mask_card("99") == "99"
""",
        '''
def mask_card(number: str) -> str:
    """Replace all but the last four digits by stars."""
    # Remove the spaces between the groups.
    digits = number.replace(" ", "")
    # Hide everything before the last four digits.
    return "*" * (len(digits) - 4) + digits[-4:]
''',
        (
            '''
def mask_card(number: str) -> str:
    """Replace all but the last four digits by stars, digit by digit."""
    digits = [char for char in number if char.isdigit()]
    # The digits before this place are hidden.
    visible_from = len(digits) - 4
    return "".join(digit if i >= visible_from else "*" for i, digit in enumerate(digits))
''',
            """It keeps only the digits. A digit is shown if it is one of the last four, and otherwise a star is
            written.""",
        ),
        javascript=r"""
function maskCard(number) {
  return number.replaceAll(" ", "").replace(/\d(?=\d{4})/g, "*");
}
""",
    ),
    program(
        "parses a CSV line with quoted fields",
        """The csv module knows the rules for quotes and commas. The reader gets a list with one line, and `next`
        returns the fields of this line.""",
        "O(n), where n is the length of the line",
        """
assert parse_csv_line("a,b,c") == ["a", "b", "c"]
assert parse_csv_line('1,"Smith, John",42') == ["1", "Smith, John", "42"]
assert parse_csv_line('x,"say ""hi"" now"') == ["x", 'say "hi" now']
""",
        '''
import csv


def parse_csv_line(line: str) -> list[str]:
    """Split a CSV line into fields, respecting quotes."""
    # The reader takes any iterable of lines.
    return next(csv.reader([line]))
''',
        (
            """
def parse_csv_line(line: str) -> list[str]:
    fields = [""]
    quoted = False
    for i, char in enumerate(line):
        if char == '"':
            # A doubled quote inside a quoted field is a real quote.
            if not quoted and i > 0 and line[i - 1] == '"':
                fields[-1] += '"'
            quoted = not quoted
        elif char == "," and not quoted:
            # A comma outside quotes starts the next field.
            fields.append("")
        else:
            fields[-1] += char
    return fields
""",
            """The flag `quoted` tells whether the current character is inside quotes. A comma outside quotes starts a
            new field, and every other character is added to the current field.""",
        ),
        javascript="""
function parseCsvLine(line) {
  const fields = [""];
  let quoted = false;
  for (let i = 0; i < line.length; i++) {
    if (line[i] === '"') {
      if (!quoted && line[i - 1] === '"') {
        fields[fields.length - 1] += '"';
      }
      quoted = !quoted;
    } else if (line[i] === "," && !quoted) {
      fields.push("");
    } else {
      fields[fields.length - 1] += line[i];
    }
  }
  return fields;
}
""",
    ),
    program(
        "parses a query string into a dictionary",
        """A question mark at the start is removed. `parse_qsl` splits the string into pairs and decodes them, and
        `dict` turns the pairs into a dictionary.""",
        "O(n), where n is the length of the query string",
        """
assert parse_query("name=Ann&age=30") == {"name": "Ann", "age": "30"}
assert parse_query("?q=hello+world") == {"q": "hello world"}
assert parse_query("") == {}
""",
        '''
from urllib.parse import parse_qsl


def parse_query(query: str) -> dict[str, str]:
    """Turn a query string such as a=1&b=2 into a dictionary."""
    # Remove a leading question mark, then decode the pairs.
    return dict(parse_qsl(query.lstrip("?")))
''',
        (
            '''
from urllib.parse import unquote_plus


def parse_query(query: str) -> dict[str, str]:
    """Turn a query string into a dictionary by splitting it."""
    result = {}
    # The pairs are separated by ampersands.
    for pair in query.lstrip("?").split("&"):
        if pair:
            # The key stands before the equals sign.
            key, _, value = pair.partition("=")
            result[unquote_plus(key)] = unquote_plus(value)
    return result
''',
            """The string is split at each ampersand. Every pair is divided at the equals sign, and both parts are
            decoded and stored.""",
        ),
        javascript="""
function parseQuery(query) {
  return Object.fromEntries(new URLSearchParams(query));
}
""",
    ),
    program(
        "removes HTML tags from a string",
        """The regular expression matches everything from an opening angle bracket to the next closing one. Each match
        is replaced by nothing.""",
        "O(n), where n is the length of the string",
        """
assert strip_tags("<p>Hello <b>world</b></p>") == "Hello world"
assert strip_tags("no tags") == "no tags"
assert strip_tags("") == ""
""",
        '''
import re


def strip_tags(html: str) -> str:
    """Return the text of html without its tags."""
    # A tag goes from < to the next >.
    return re.sub(r"<[^>]*>", "", html)
''',
        (
            '''
def strip_tags(html: str) -> str:
    """Return the text outside of angle brackets."""
    result = []
    inside = False
    for char in html:
        # Remember whether we are inside a tag.
        if char == "<":
            inside = True
        elif char == ">":
            inside = False
        # Keep only the characters outside of tags.
        elif not inside:
            result.append(char)
    return "".join(result)
''',
            """The flag `inside` is true between the two angle brackets of a tag. Only characters outside of tags are
            kept.""",
        ),
        (
            '''
def strip_tags(html: str) -> str:
    """Remove the tags one at a time, using recursion."""
    # Split at the first tag.
    before, opening, rest = html.partition("<")
    # Without a tag there is nothing left to do.
    if not opening:
        return before
    _, _, after = rest.partition(">")
    return before + strip_tags(after)
''',
            """The string is split at the first opening bracket. If there is none, the text is returned. Otherwise the
            text up to the closing bracket is skipped, and the function calls itself on the rest.""",
        ),
        javascript="""
function stripTags(html) {
  return html.replace(/<[^>]*>/g, "");
}
""",
    ),
    program(
        "reverses the words in a sentence",
        "It splits the sentence at white space. The list of words is reversed and joined with spaces.",
        "O(n), where n is the length of the sentence",
        """
assert reverse_words("the sky is blue") == "blue is sky the"
assert reverse_words("hello") == "hello"
assert reverse_words("") == ""
""",
        '''
def reverse_words(sentence: str) -> str:
    """Return the sentence with its words in reverse order."""
    # Split into words.
    words = sentence.split()
    # Join them from the last to the first.
    return " ".join(reversed(words))
''',
        (
            '''
def reverse_words(sentence: str) -> str:
    """Reverse the order of the words, using recursion."""
    # Split off the first word.
    first, _, rest = sentence.strip().partition(" ")
    # With a single word nothing changes.
    if not rest:
        return first
    # The first word goes to the end.
    return reverse_words(rest) + " " + first
''',
            """The first word is split off. The function reverses the rest of the sentence by calling itself and then
            adds the first word at the end.""",
        ),
        javascript=r"""
function reverseWords(sentence) {
  return sentence.trim().split(/\s+/).reverse().join(" ");
}
""",
    ),
    program(
        "truncates a string to a maximum length without cutting a word",
        """If the text is short enough, it is returned unchanged. Otherwise it is cut at the last space that fits, so
        that no word is cut.""",
        "O(n), where n is the maximum length",
        """
assert truncate("The quick brown fox", 10) == "The quick"
assert truncate("short", 10) == "short"
assert truncate("", 5) == ""
""",
        '''
def truncate(text: str, limit: int) -> str:
    """Shorten text to at most limit characters, at a word boundary."""
    # A short text stays as it is.
    if len(text) <= limit:
        return text
    # Look one character further, in case a word ends exactly here.
    cut = text[: limit + 1].rfind(" ")
    return text[:cut] if cut > 0 else ""
''',
        (
            '''
def truncate(text: str, limit: int) -> str:
    """Keep as many whole words as fit into the limit."""
    result = ""
    for word in text.split():
        # Try to add the next word.
        longer = f"{result} {word}".strip()
        if len(longer) > limit:
            break
        result = longer
    return result
''',
            """The words are added one after another. As soon as the next word would make the result too long, the
            loop stops.""",
        ),
        javascript="""
function truncate(text, limit) {
  if (text.length <= limit) {
    return text;
  }
  const cut = text.slice(0, limit + 1).lastIndexOf(" ");
  return text.slice(0, Math.max(cut, 0));
}
""",
    ),
    program(
        "validates an IPv4 address",
        """It splits the address at the dots and expects four parts. Each part must consist of digits, must not have a
        leading zero, and must be at most 255.""",
        "O(n), where n is the length of the address",
        """
assert is_ipv4("192.168.0.1")
assert not is_ipv4("256.1.1.1")
assert not is_ipv4("1.2.3")
assert not is_ipv4("")
""",
        '''
def is_ipv4(address: str) -> bool:
    """Check whether address is a valid IPv4 address."""
    parts = address.split(".")
    # There must be exactly four parts.
    if len(parts) != 4:
        return False
    for part in parts:
        # Each part is a number without leading zeros.
        if not (part.isascii() and part.isdigit()) or part != str(int(part)):
            return False
        # The largest value is 255.
        if int(part) > 255:
            return False
    return True
''',
        (
            '''
import ipaddress


def is_ipv4(address: str) -> bool:
    """Check an IPv4 address with the ipaddress module."""
    # The constructor raises an error for an invalid address.
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return True
''',
            "The standard library can parse the address. If it raises a ValueError, the address is not valid.",
        ),
        javascript=r"""
function isIpv4(address) {
  const parts = address.split(".");
  return parts.length === 4 && parts.every((part) => /^(0|[1-9]\d{0,2})$/.test(part) && Number(part) <= 255);
}
""",
    ),
    program(
        "checks the strength of a password",
        """It counts how many rules the password fulfils: the length, lower case, upper case, digits and special
        characters. The number of fulfilled rules decides between weak, medium and strong.""",
        "O(n), where n is the length of the password",
        """
assert password_strength("Tr0ub4dor&3x") == "strong"
assert password_strength("Summer24") == "medium"
assert password_strength("abc") == "weak"
assert password_strength("") == "weak"
""",
        '''
def password_strength(password: str) -> str:
    """Rate a password as weak, medium or strong."""
    # Each rule is either fulfilled or not.
    rules = [
        len(password) >= 8,
        any(char.islower() for char in password),
        any(char.isupper() for char in password),
        any(char.isdigit() for char in password),
        any(not char.isalnum() for char in password),
    ]
    # True counts as one.
    score = sum(rules)
    if score == 5:
        return "strong"
    return "medium" if score >= 3 else "weak"
''',
        javascript=r"""
function passwordStrength(password) {
  const rules = [/.{8,}/, /[a-z]/, /[A-Z]/, /\d/, /[^A-Za-z0-9]/];
  const score = rules.filter((rule) => rule.test(password)).length;
  if (score === 5) {
    return "strong";
  }
  return score >= 3 ? "medium" : "weak";
}
""",
    ),
    program(
        "generates a random password of a given length",
        """The alphabet contains letters, digits and some special characters. `secrets.choice` picks a safe random
        character as often as needed.""",
        "O(n), where n is the length of the password",
        """
assert len(random_password(12)) == 12
assert random_password(20) != random_password(20)
""",
        '''
import secrets
import string


def random_password(length: int) -> str:
    """Return a random password with the given length."""
    # Refuse lengths that make no sense.
    if length < 1:
        raise ValueError("length must be at least 1")
    # These characters are allowed.
    alphabet = string.ascii_letters + string.digits + "!@#$%&*"
    # Pick each character at random.
    return "".join(secrets.choice(alphabet) for _ in range(length))
''',
        javascript="""
function randomPassword(length) {
  const alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!@#$%&*";
  const numbers = crypto.getRandomValues(new Uint32Array(length));
  return Array.from(numbers, (number) => alphabet[number % alphabet.length]).join("");
}
""",
    ),
    program(
        "converts a hexadecimal colour to an RGB tuple",
        """The hash sign is removed. The remaining six digits are read in pairs, and each pair is converted from base
        16 to an integer.""",
        "O(1), because a colour always has six digits",
        """
assert hex_to_rgb("#ff8800") == (255, 136, 0)
assert hex_to_rgb("0000FF") == (0, 0, 255)
""",
        '''
def hex_to_rgb(colour: str) -> tuple[int, ...]:
    """Convert a colour such as #ff8800 to a tuple of red, green and blue."""
    # Remove the hash sign.
    digits = colour.lstrip("#")
    if len(digits) != 6:
        raise ValueError("expected six hexadecimal digits")
    # Convert each pair of digits to a number.
    return tuple(int(digits[i : i + 2], 16) for i in (0, 2, 4))
''',
        javascript="""
function hexToRgb(colour) {
  const digits = colour.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(digits.slice(i, i + 2), 16));
}
""",
    ),
    program(
        "converts an integer to a Roman numeral",
        """The table lists the values from large to small, including pairs such as IX. For each value the symbol is
        written as often as the value fits, and the rest is carried on.""",
        "O(1), because the table has a fixed size and the result has a bounded length",
        """
assert to_roman(1994) == "MCMXCIV"
assert to_roman(49) == "XLIX"
assert to_roman(8) == "VIII"
""",
        '''
def to_roman(number: int) -> str:
    """Convert a positive integer to a Roman numeral."""
    # Only these numbers have a usual Roman form.
    if not 0 < number < 4000:
        raise ValueError("number must be between 1 and 3999")
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    symbols = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    result = ""
    for value, symbol in zip(values, symbols):
        # Write the symbol as often as the value fits.
        count, number = divmod(number, value)
        result += symbol * count
    return result
''',
        (
            '''
def to_roman(number: int) -> str:
    """Convert a positive integer to a Roman numeral, using recursion."""
    table = {
        1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC",
        50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I",
    }
    for value, symbol in table.items():
        # Write the largest symbol that fits, then convert the rest.
        if number >= value:
            return symbol + to_roman(number - value)
    # Nothing is left.
    return ""
''',
            """The first value in the table that fits gives the next symbol. The function calls itself with the rest
            until nothing is left.""",
        ),
        javascript="""
function toRoman(number) {
  const values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1];
  const symbols = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"];
  let result = "";
  values.forEach((value, i) => {
    while (number >= value) {
      result += symbols[i];
      number -= value;
    }
  });
  return result;
}
""",
    ),
    program(
        "converts a Roman numeral to an integer",
        """Each symbol has a value. A symbol that stands before a larger one is subtracted, and every other symbol is
        added.""",
        "O(n), where n is the number of symbols",
        """
assert from_roman("MCMXCIV") == 1994
assert from_roman("XLIX") == 49
assert from_roman("viii") == 8
""",
        '''
def from_roman(numeral: str) -> int:
    """Convert a Roman numeral to an integer."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    numbers = [values[symbol] for symbol in numeral.upper()]
    total = 0
    # Look at each number together with the next one.
    for current, following in zip(numbers, numbers[1:] + [0]):
        # A smaller number before a larger one is subtracted.
        total += -current if current < following else current
    return total
''',
        (
            '''
def from_roman(numeral: str) -> int:
    """Convert a Roman numeral to an integer, reading from the right."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    largest = 0
    for symbol in reversed(numeral.upper()):
        if symbol not in values:
            raise ValueError(f"not a Roman symbol: {symbol}")
        value = values[symbol]
        # Symbols smaller than one to their right are subtracted.
        if value < largest:
            total -= value
        else:
            total += value
            largest = value
    return total
''',
            """The symbols are read from right to left. A symbol that is smaller than the largest one so far is
            subtracted, and every other symbol is added. An unknown symbol raises a ValueError.""",
        ),
        javascript="""
function fromRoman(numeral) {
  const values = { I: 1, V: 5, X: 10, L: 50, C: 100, D: 500, M: 1000 };
  const numbers = [...numeral.toUpperCase()].map((symbol) => values[symbol]);
  return numbers.reduce((total, value, i) => (value < numbers[i + 1] ? total - value : total + value), 0);
}
""",
    ),
)
