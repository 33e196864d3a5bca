"""Everyday programs beyond the tasks of the prompts."""

from .program import program

EVERYDAY = (
    program(
        "checks whether a year is a leap year",
        """A year is a leap year if it is divisible by 4. Full centuries are an exception, unless they are divisible
        by 400.""",
        "O(1)",
        """
assert is_leap_year(2024)
assert is_leap_year(2000)
assert not is_leap_year(1900)
""",
        '''
def is_leap_year(year: int) -> bool:
    """Check whether a year has 366 days."""
    # Centuries must be divisible by 400.
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
''',
        javascript="""
function isLeapYear(year) {
  return year % 4 === 0 && (year % 100 !== 0 || year % 400 === 0);
}
""",
    ),
    program(
        "checks whether a number is even",
        "The remainder of a division by two is zero exactly for even numbers.",
        "O(1)",
        """
assert is_even(4)
assert not is_even(7)
assert is_even(0)
""",
        '''
def is_even(number: int) -> bool:
    """Check whether a number is even."""
    # Even numbers leave no remainder.
    return number % 2 == 0
''',
        javascript="""
function isEven(number) {
  return number % 2 === 0;
}
""",
    ),
    program(
        "computes the factorial of a number",
        "The result starts at one. It is multiplied by every number from 2 up to the given one.",
        "O(n), because there are n - 1 multiplications",
        """
assert factorial(5) == 120
assert factorial(1) == 1
assert factorial(0) == 1
""",
        '''
def factorial(number: int) -> int:
    """Return the product of all numbers from 1 to number."""
    if number < 0:
        raise ValueError("number must not be negative")
    result = 1
    # Multiply all factors.
    for factor in range(2, number + 1):
        result *= factor
    return result
''',
        (
            '''
def factorial(number: int) -> int:
    """Return the factorial of a number, using recursion."""
    # The factorial of 0 and 1 is 1.
    if number < 2:
        return 1
    # Multiply with the factorial of the number before.
    return number * factorial(number - 1)
''',
            """The factorial of 0 and 1 is 1. For a larger number it is the number times the factorial of the number
            before.""",
        ),
        javascript="""
function factorial(number) {
  let result = 1;
  for (let factor = 2; factor <= number; factor++) {
    result *= factor;
  }
  return result;
}
""",
    ),
    program(
        "computes the least common multiple of two integers",
        "The product of the numbers is divided by their greatest common divisor. This gives the least common multiple.",
        "O(log(min(a, b))), because of the greatest common divisor",
        """
assert lcm(4, 6) == 12
assert lcm(7, 3) == 21
assert lcm(0, 5) == 0
""",
        '''
import math


def lcm(a: int, b: int) -> int:
    """Return the least common multiple of a and b."""
    if a == 0 or b == 0:
        return 0
    # Divide the product by the common part.
    return abs(a * b) // math.gcd(a, b)
''',
    ),
    program(
        "adds up the digits of a number",
        "The number is written as a string. Each character is turned into a digit, and the digits are added.",
        "O(d), where d is the number of digits",
        """
assert digit_total(1234) == 10
assert digit_total(-56) == 11
assert digit_total(0) == 0
""",
        '''
def digit_total(number: int) -> int:
    """Return the sum of the digits of a number."""
    # Ignore the sign and add the digits.
    return sum(int(digit) for digit in str(abs(number)))
''',
        (
            '''
def digit_total(number: int) -> int:
    """Return the sum of the digits of a number, with divisions."""
    number = abs(number)
    total = 0
    while number:
        # Split off the last digit and add it.
        number, digit = divmod(number, 10)
        total += digit
    return total
''',
            "The last digit is split off with `divmod` and added to the total. This is repeated until nothing is left.",
        ),
        javascript="""
function digitTotal(number) {
  return [...String(Math.abs(number))].reduce((total, digit) => total + Number(digit), 0);
}
""",
    ),
    program(
        "reverses a string",
        "The slice with step -1 goes through the string from the end to the start.",
        "O(n), where n is the length of the string",
        """
assert reverse_text("hello") == "olleh"
assert reverse_text("a") == "a"
assert reverse_text("") == ""
""",
        '''
def reverse_text(text: str) -> str:
    """Return the text from back to front."""
    # A negative step walks backwards.
    return text[::-1]
''',
        (
            '''
def reverse_text(text: str) -> str:
    """Return the text from back to front, using recursion."""
    # An empty text stays empty.
    if not text:
        return ""
    # The first character goes to the end.
    return reverse_text(text[1:]) + text[0]
''',
            """An empty text is its own reverse. Otherwise the rest is reversed, and the first character is put at the
            end.""",
        ),
        (
            '''
def reverse_text(text: str) -> str:
    """Return the text from back to front, with a loop."""
    result = ""
    for char in text:
        # Put each character in front of the result.
        result = char + result
    return result
''',
            "Each character is put in front of the result. So the last character ends up first.",
        ),
        javascript="""
function reverseText(text) {
  return [...text].reverse().join("");
}
""",
    ),
    program(
        "counts the words in a sentence",
        "The sentence is split at white space. The length of the resulting list is the number of words.",
        "O(n), where n is the length of the sentence",
        """
assert word_count("the quick brown fox") == 4
assert word_count("  hello  ") == 1
assert word_count("") == 0
""",
        '''
def word_count(sentence: str) -> int:
    """Return the number of words in a sentence."""
    # split ignores repeated spaces.
    return len(sentence.split())
''',
    ),
    program(
        "capitalises the first letter of every word",
        "The text is split into words. Each word gets a capital first letter, and the words are joined again.",
        "O(n), where n is the length of the text",
        """
assert title_words("good morning everyone") == "Good Morning Everyone"
assert title_words("") == ""
""",
        '''
def title_words(text: str) -> str:
    """Return the text with a capital letter at the start of every word."""
    # Change each word, then join them again.
    return " ".join(word.capitalize() for word in text.split(" "))
''',
        javascript="""
function titleWords(text) {
  return text
    .split(" ")
    .map((word) => word.slice(0, 1).toUpperCase() + word.slice(1))
    .join(" ");
}
""",
    ),
    program(
        "finds the longest word in a sentence",
        "The sentence is split into words. `max` with `key=len` returns the first word with the greatest length.",
        "O(n), where n is the length of the sentence",
        """
assert longest_word("we walked through the garden") == "through"
assert longest_word("one two") == "one"
assert longest_word("") == ""
""",
        '''
def longest_word(sentence: str) -> str:
    """Return the longest word of a sentence."""
    # An empty sentence has no words, so there is a default.
    return max(sentence.split(), key=len, default="")
''',
        javascript="""
function longestWord(sentence) {
  return sentence.split(" ").reduce((longest, word) => (word.length > longest.length ? word : longest), "");
}
""",
    ),
    program(
        "computes the average of a list of numbers",
        "The sum of the numbers is divided by their count. An empty list has no average, so it raises a ValueError.",
        "O(n), where n is the length of the list",
        """
assert average([2, 4, 9]) == 5.0
assert average([1, 2]) == 1.5
""",
        '''
def average(numbers: list[float]) -> float:
    """Return the arithmetic mean of the numbers."""
    if not numbers:
        raise ValueError("the list must not be empty")
    # Divide the sum by the count.
    return sum(numbers) / len(numbers)
''',
        javascript="""
function average(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
}
""",
    ),
    program(
        "computes the standard deviation of a list of numbers",
        """First the mean is computed. The variance is the average squared distance from the mean, and its square root
        is the standard deviation.""",
        "O(n), where n is the length of the list",
        """
assert standard_deviation([2, 4, 4, 4, 5, 5, 7, 9]) == 2.0
assert standard_deviation([3]) == 0.0
""",
        '''
import math


def standard_deviation(numbers: list[float]) -> float:
    """Return the standard deviation of the whole population."""
    # The mean of all numbers.
    mean = sum(numbers) / len(numbers)
    # The average squared distance from the mean.
    variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
    return math.sqrt(variance)
''',
    ),
    program(
        "finds the smallest and the largest number in a list",
        "Both values start with the first number. Each further number can replace the smallest or the largest one.",
        "O(n), because the list is read once",
        """
assert find_extremes([4, -2, 9, 3]) == (-2, 9)
assert find_extremes([5]) == (5, 5)
""",
        '''
def find_extremes(numbers: list[int]) -> tuple[int, int]:
    """Return the smallest and the largest number."""
    if not numbers:
        raise ValueError("the list must not be empty")
    low = high = numbers[0]
    for number in numbers:
        # Update both limits.
        low = min(low, number)
        high = max(high, number)
    return low, high
''',
    ),
    program(
        "sorts a list with bubble sort",
        """It compares neighbouring items and swaps them if they are in the wrong order. After each pass the largest
        item of the rest is at the end.""",
        "O(n^2), because of the two nested loops",
        """
assert bubble_sort([5, 2, 9, 1]) == [1, 2, 5, 9]
assert bubble_sort([]) == []
""",
        '''
def bubble_sort(items: list[int]) -> list[int]:
    """Return a sorted copy of the list."""
    result = list(items)
    for end in range(len(result) - 1, 0, -1):
        for i in range(end):
            # Swap neighbours in the wrong order.
            if result[i] > result[i + 1]:
                result[i], result[i + 1] = result[i + 1], result[i]
    return result
''',
        javascript="""
function bubbleSort(items) {
  const result = [...items];
  for (let end = result.length - 1; end > 0; end--) {
    for (let i = 0; i < end; i++) {
      if (result[i] > result[i + 1]) {
        [result[i], result[i + 1]] = [result[i + 1], result[i]];
      }
    }
  }
  return result;
}
""",
    ),
    program(
        "sorts a list with insertion sort",
        """Each item is taken in turn. Larger items before it move one place to the right, until the item fits into
        the gap.""",
        "O(n^2) in the worst case, and O(n) if the list is already sorted",
        """
assert insertion_sort([3, 1, 2]) == [1, 2, 3]
assert insertion_sort([]) == []
""",
        '''
def insertion_sort(items: list[int]) -> list[int]:
    """Return a sorted copy of the list."""
    result = list(items)
    for i in range(1, len(result)):
        item = result[i]
        # Move larger items to the right.
        while i > 0 and result[i - 1] > item:
            result[i] = result[i - 1]
            i -= 1
        # Put the item into the gap.
        result[i] = item
    return result
''',
    ),
    program(
        "sorts a list with selection sort",
        "For each position it finds the smallest item of the rest. This item is swapped to the position.",
        "O(n^2), because the rest is searched for every position",
        """
assert selection_sort([4, 3, 8, 1]) == [1, 3, 4, 8]
assert selection_sort([]) == []
""",
        '''
def selection_sort(items: list[int]) -> list[int]:
    """Return a sorted copy of the list."""
    result = list(items)
    for i in range(len(result)):
        # Find the smallest item of the rest.
        smallest = min(range(i, len(result)), key=lambda j: result[j])
        # Swap it to its place.
        result[i], result[smallest] = result[smallest], result[i]
    return result
''',
    ),
    program(
        "sorts a list with merge sort",
        """A list with at most one item is already sorted. Otherwise both halves are sorted by recursive calls, and
        the sorted halves are merged.""",
        "O(n log n), because there are log n levels and each one merges n items",
        """
assert merge_sort([6, 3, 9, 1, 3]) == [1, 3, 3, 6, 9]
assert merge_sort([]) == []
""",
        '''
from heapq import merge


def merge_sort(items: list[int]) -> list[int]:
    """Return a sorted copy of the list."""
    # A short list is already sorted.
    if len(items) < 2:
        return list(items)
    # Sort both halves.
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    # Merge the sorted halves.
    return list(merge(left, right))
''',
        javascript="""
function mergeSort(items) {
  if (items.length < 2) {
    return [...items];
  }
  const middle = Math.floor(items.length / 2);
  const left = mergeSort(items.slice(0, middle));
  const right = mergeSort(items.slice(middle));
  const result = [];
  while (left.length > 0 && right.length > 0) {
    result.push(left[0] <= right[0] ? left.shift() : right.shift());
  }
  return [...result, ...left, ...right];
}
""",
    ),
    program(
        "sorts a list with quicksort",
        """The first item is the pivot. Smaller items go to the left and the others to the right, and both parts are
        sorted by recursive calls.""",
        "O(n log n) on average, and O(n^2) in the worst case",
        """
assert quicksort([3, 6, 1, 8, 2]) == [1, 2, 3, 6, 8]
assert quicksort([]) == []
""",
        '''
def quicksort(items: list[int]) -> list[int]:
    """Return a sorted copy of the list."""
    if len(items) < 2:
        return items
    # Split the rest around the first item.
    pivot, *rest = items
    smaller = [item for item in rest if item < pivot]
    larger = [item for item in rest if item >= pivot]
    # Sort both parts.
    return quicksort(smaller) + [pivot] + quicksort(larger)
''',
        javascript="""
function quicksort(items) {
  if (items.length < 2) {
    return items;
  }
  const [pivot, ...rest] = items;
  const smaller = rest.filter((item) => item < pivot);
  const larger = rest.filter((item) => item >= pivot);
  return [...quicksort(smaller), pivot, ...quicksort(larger)];
}
""",
    ),
    program(
        "searches a list for a value and returns its position",
        "It looks at the items one after another. The position of the first equal item is returned, or -1 at the end.",
        "O(n), because every item may have to be looked at",
        """
assert linear_search([4, 8, 15], 15) == 2
assert linear_search(["a", "b"], "c") == -1
assert linear_search([], 1) == -1
""",
        '''
def linear_search(items: list, target: object) -> int:
    """Return the first position of target, or -1."""
    for position, item in enumerate(items):
        # Stop at the first match.
        if item == target:
            return position
    return -1
''',
    ),
    program(
        "counts how often a letter occurs in a word",
        "Both are made lower case, so that capitals count too. The method `count` does the rest.",
        "O(n), where n is the length of the word",
        """
assert letter_count("Banana", "a") == 3
assert letter_count("Anna", "a") == 2
assert letter_count("", "x") == 0
""",
        '''
def letter_count(word: str, letter: str) -> int:
    """Return how often a letter occurs in a word, ignoring case."""
    # Compare in lower case.
    return word.lower().count(letter.lower())
''',
        javascript="""
function letterCount(word, letter) {
  return word.toLowerCase().split(letter.toLowerCase()).length - 1;
}
""",
    ),
    program(
        "finds the first character that does not repeat in a string",
        "A Counter counts all characters. The first character with a count of one is returned.",
        "O(n), where n is the length of the string",
        """
assert first_single("swiss") == "w"
assert first_single("aabb") is None
assert first_single("") is None
""",
        '''
from collections import Counter


def first_single(text: str) -> str | None:
    """Return the first character that occurs only once, or None."""
    # Count all characters.
    counts = Counter(text)
    # Find the first one with a count of one.
    return next((char for char in text if counts[char] == 1), None)
''',
        javascript="""
function firstSingle(text) {
  return [...text].find((char) => text.indexOf(char) === text.lastIndexOf(char)) ?? null;
}
""",
    ),
    program(
        "checks whether a sentence contains every letter of the alphabet",
        "The letters of the sentence are collected in a set. It must contain the whole alphabet as a subset.",
        "O(n), where n is the length of the sentence",
        """
assert is_pangram("The quick brown fox jumps over the lazy dog")
assert not is_pangram("Hello world")
assert not is_pangram("")
""",
        '''
import string


def is_pangram(sentence: str) -> bool:
    """Check whether a sentence uses the whole alphabet."""
    # All letters must be in the set.
    return set(string.ascii_lowercase) <= set(sentence.lower())
''',
        javascript="""
function isPangram(sentence) {
  const letters = new Set(sentence.toLowerCase());
  return [..."abcdefghijklmnopqrstuvwxyz"].every((letter) => letters.has(letter));
}
""",
    ),
    program(
        "turns a title into a URL slug",
        """The title is made lower case. Everything that is not a letter or a digit is replaced by a hyphen, and
        hyphens at the ends are removed.""",
        "O(n), where n is the length of the title",
        """
assert slugify("Hello, World!") == "hello-world"
assert slugify("  10 Tips & Tricks ") == "10-tips-tricks"
assert slugify("") == ""
""",
        '''
import re


def slugify(title: str) -> str:
    """Return the title as lower case words with hyphens."""
    # Replace everything else by single hyphens.
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower())
    # Remove hyphens at the ends.
    return slug.strip("-")
''',
        javascript="""
function slugify(title) {
  return title
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-|-$/g, "");
}
""",
    ),
    program(
        "counts the sentences in a paragraph",
        "A regular expression finds every group of sentence marks. The number of groups is the number of sentences.",
        "O(n), where n is the length of the paragraph",
        """
assert sentence_count("Hi! How are you? I am fine.") == 3
assert sentence_count("Wait... what?") == 2
assert sentence_count("") == 0
""",
        '''
import re


def sentence_count(paragraph: str) -> int:
    """Return the number of sentences in a paragraph."""
    # Several marks in a row end only one sentence.
    return len(re.findall(r"[.!?]+", paragraph))
''',
    ),
    program(
        "removes punctuation from a text",
        "A translation table maps every punctuation mark to nothing. `translate` applies the table to the text.",
        "O(n), where n is the length of the text",
        """
assert remove_punctuation("Well, that's it!") == "Well thats it"
assert remove_punctuation("") == ""
""",
        '''
import string


def remove_punctuation(text: str) -> str:
    """Return the text without punctuation marks."""
    # The third argument lists the characters to delete.
    table = str.maketrans("", "", string.punctuation)
    return text.translate(table)
''',
    ),
    program(
        "replaces several spaces in a row by one space",
        "The text is split at white space, which ignores repeated spaces. The parts are joined with single spaces.",
        "O(n), where n is the length of the text",
        """
assert squeeze_spaces("too   many    spaces") == "too many spaces"
assert squeeze_spaces("  trim ") == "trim"
assert squeeze_spaces("") == ""
""",
        '''
def squeeze_spaces(text: str) -> str:
    """Return the text with single spaces between the words."""
    # split without arguments drops all extra spaces.
    return " ".join(text.split())
''',
    ),
    program(
        "checks whether a string starts with a capital letter",
        "An empty string has no first letter. Otherwise `isupper` checks the first character.",
        "O(1)",
        """
assert starts_with_capital("Berlin")
assert not starts_with_capital("river")
assert not starts_with_capital("")
""",
        '''
def starts_with_capital(text: str) -> bool:
    """Check whether the first character is a capital letter."""
    # The slice is empty for an empty text.
    return text[:1].isupper()
''',
    ),
    program(
        "builds an acronym from a phrase",
        "The phrase is split into words. The first letters are made upper case and joined.",
        "O(n), where n is the length of the phrase",
        """
assert acronym("as soon as possible") == "ASAP"
assert acronym("random access memory") == "RAM"
assert acronym("") == ""
""",
        '''
def acronym(phrase: str) -> str:
    """Return the first letters of the words in upper case."""
    # Take the first letter of each word.
    return "".join(word[0].upper() for word in phrase.split())
''',
        javascript="""
function acronym(phrase) {
  return phrase
    .split(" ")
    .map((word) => word.slice(0, 1).toUpperCase())
    .join("");
}
""",
    ),
    program(
        "converts kilometres to miles",
        "One kilometre is about 0.621371 miles. The distance is multiplied by this factor and rounded.",
        "O(1)",
        """
assert km_to_miles(10) == 6.21
assert km_to_miles(0) == 0
""",
        '''
def km_to_miles(kilometres: float) -> float:
    """Convert kilometres to miles, with two decimals."""
    # One kilometre is about 0.621371 miles.
    return round(kilometres * 0.621371, 2)
''',
    ),
    program(
        "computes the body mass index",
        """The weight in kilograms is divided by the square of the height in metres. The result is rounded to one
        decimal.""",
        "O(1)",
        """
assert body_mass_index(70, 1.75) == 22.9
assert body_mass_index(90, 1.8) == 27.8
""",
        '''
def body_mass_index(weight: float, height: float) -> float:
    """Return the body mass index for kilograms and metres."""
    if height <= 0:
        raise ValueError("height must be positive")
    # Divide by the square of the height.
    return round(weight / height**2, 1)
''',
    ),
    program(
        "computes the price after a discount",
        "The discount is given in percent. The price is multiplied by the remaining part and rounded to cents.",
        "O(1)",
        """
assert discounted_price(80, 25) == 60.0
assert discounted_price(19.99, 0) == 19.99
""",
        '''
def discounted_price(price: float, percent: float) -> float:
    """Return the price after a discount in percent."""
    if not 0 <= percent <= 100:
        raise ValueError("percent must be between 0 and 100")
    # Keep the part that has to be paid.
    return round(price * (100 - percent) / 100, 2)
''',
        javascript="""
function discountedPrice(price, percent) {
  return Math.round(price * (100 - percent)) / 100;
}
""",
    ),
    program(
        "splits a restaurant bill with a tip",
        "The tip is added to the bill. The sum is divided by the number of people and rounded to cents.",
        "O(1)",
        """
assert split_bill(100, 10, 4) == 27.5
assert split_bill(60, 0, 3) == 20.0
""",
        '''
def split_bill(amount: float, tip_percent: float, people: int) -> float:
    """Return what each person has to pay."""
    if people < 1:
        raise ValueError("there must be at least one person")
    # Add the tip to the bill.
    total = amount * (1 + tip_percent / 100)
    # Share it equally.
    return round(total / people, 2)
''',
    ),
    program(
        "computes the area and the circumference of a circle",
        "The area is pi times the square of the radius. The circumference is two times pi times the radius.",
        "O(1)",
        """
assert circle(1) == (3.14, 6.28)
assert circle(0) == (0.0, 0.0)
""",
        '''
import math


def circle(radius: float) -> tuple[float, float]:
    """Return the area and the circumference of a circle."""
    if radius < 0:
        raise ValueError("radius must not be negative")
    area = math.pi * radius**2
    circumference = 2 * math.pi * radius
    # Two decimals are enough.
    return round(area, 2), round(circumference, 2)
''',
    ),
    program(
        "computes the distance between two points",
        "The differences of the coordinates are the sides of a right triangle. `math.hypot` returns its long side.",
        "O(1)",
        """
assert distance((0, 0), (3, 4)) == 5.0
assert distance((1, 1), (1, 1)) == 0.0
""",
        '''
import math


def distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the straight distance between two points."""
    # Use the differences of both coordinates.
    return math.hypot(b[0] - a[0], b[1] - a[1])
''',
        javascript="""
function distance(a, b) {
  return Math.hypot(b[0] - a[0], b[1] - a[1]);
}
""",
    ),
    program(
        "solves a quadratic equation",
        """The discriminant decides how many real solutions there are. If it is negative, there is none. Otherwise the
        formula gives the solutions, and the set removes a double one.""",
        "O(1)",
        """
assert solve_quadratic(1, -3, 2) == [1.0, 2.0]
assert solve_quadratic(1, 2, 1) == [-1.0]
assert solve_quadratic(1, 0, 1) == []
""",
        '''
import math


def solve_quadratic(a: float, b: float, c: float) -> list[float]:
    """Return the real solutions of a*x^2 + b*x + c = 0."""
    if a == 0:
        raise ValueError("a must not be zero")
    discriminant = b * b - 4 * a * c
    # A negative discriminant means no real solution.
    if discriminant < 0:
        return []
    root = math.sqrt(discriminant)
    # The set removes a double solution.
    return sorted({(-b - root) / (2 * a), (-b + root) / (2 * a)})
''',
    ),
    program(
        "computes the square root of a number with Newton's method",
        """It starts with a first guess. Each step replaces the guess by the mean of the guess and the number divided
        by it, until the square is close enough.""",
        "O(log d) steps for d correct digits, because the digits double in each step",
        """
assert round(newton_sqrt(2), 6) == 1.414214
assert round(newton_sqrt(81), 6) == 9.0
assert newton_sqrt(0) == 0
""",
        '''
def newton_sqrt(number: float) -> float:
    """Return the square root of a number."""
    if number < 0:
        raise ValueError("number must not be negative")
    guess = max(number, 1.0)
    # Improve the guess until its square is close enough.
    while abs(guess * guess - number) > 1e-12 * max(number, 1.0):
        guess = (guess + number / guess) / 2
    return guess if number else 0.0
''',
    ),
    program(
        "computes a power by repeated squaring",
        """If the exponent is odd, the result is multiplied by the base. Then the base is squared and the exponent is
        halved, until the exponent is zero.""",
        "O(log n), where n is the exponent",
        """
assert fast_power(2, 10) == 1024
assert fast_power(3, 5) == 243
assert fast_power(7, 0) == 1
""",
        '''
def fast_power(base: int, exponent: int) -> int:
    """Return base to the power of a non-negative exponent."""
    result = 1
    while exponent:
        # An odd exponent uses the current base once.
        if exponent % 2:
            result *= base
        # Square the base and halve the exponent.
        base *= base
        exponent //= 2
    return result
''',
        (
            '''
def fast_power(base: int, exponent: int) -> int:
    """Return base to the power of a non-negative exponent, using recursion."""
    if exponent == 0:
        return 1
    # Compute the half power once and square it.
    half = fast_power(base, exponent // 2)
    return half * half * (base if exponent % 2 else 1)
''',
            "The power with half the exponent is computed first and squared. An odd exponent needs one more factor.",
        ),
        javascript="""
function fastPower(base, exponent) {
  let result = 1;
  while (exponent > 0) {
    if (exponent % 2 === 1) {
      result *= base;
    }
    base *= base;
    exponent = Math.floor(exponent / 2);
  }
  return result;
}
""",
    ),
    program(
        "lists all divisors of a number",
        "Every number from 1 to the given one is tried. It is a divisor if the division leaves no remainder.",
        "O(n), because n numbers are tried",
        """
assert divisors(12) == [1, 2, 3, 4, 6, 12]
assert divisors(7) == [1, 7]
""",
        '''
def divisors(number: int) -> list[int]:
    """Return all positive divisors of a number."""
    # Keep the numbers that divide without a remainder.
    return [d for d in range(1, number + 1) if number % d == 0]
''',
        javascript="""
function divisors(number) {
  const result = [];
  for (let d = 1; d <= number; d++) {
    if (number % d === 0) {
      result.push(d);
    }
  }
  return result;
}
""",
    ),
    program(
        "checks whether a number is a perfect square",
        "`math.isqrt` returns the integer part of the square root. Its square must be equal to the number.",
        "O(1) for numbers of normal size",
        """
assert is_square(49)
assert not is_square(50)
assert is_square(0)
assert not is_square(-4)
""",
        '''
import math


def is_square(number: int) -> bool:
    """Check whether a number is the square of an integer."""
    # Negative numbers are never squares.
    return number >= 0 and math.isqrt(number) ** 2 == number
''',
    ),
    program(
        "builds the first rows of Pascal's triangle",
        "The first row is a single one. Each further row adds the neighbouring numbers of the row before.",
        "O(n^2), where n is the number of rows",
        """
assert pascal(4) == [[1], [1, 1], [1, 2, 1], [1, 3, 3, 1]]
assert pascal(1) == [[1]]
assert pascal(0) == []
""",
        '''
def pascal(count: int) -> list[list[int]]:
    """Return the first rows of Pascal's triangle."""
    rows = []
    row = [1]
    for _ in range(count):
        rows.append(row)
        # Add the row to itself, shifted by one.
        row = [a + b for a, b in zip([0, *row], [*row, 0])]
    return rows
''',
        javascript="""
function pascal(count) {
  const rows = [];
  let row = [1];
  for (let i = 0; i < count; i++) {
    rows.push(row);
    row = [...row, 0].map((value, k) => value + (row[k - 1] ?? 0));
  }
  return rows;
}
""",
    ),
    program(
        "computes the Collatz sequence of a number",
        "An even number is halved, and an odd number is multiplied by three and increased by one. It stops at one.",
        "O(k), where k is the length of the sequence",
        """
assert list(collatz(6)) == [6, 3, 10, 5, 16, 8, 4, 2, 1]
assert list(collatz(1)) == [1]
""",
        '''
from collections.abc import Iterator


def collatz(number: int) -> Iterator[int]:
    """Yield the Collatz sequence that starts with number."""
    if number < 1:
        raise ValueError("number must be positive")
    yield number
    while number != 1:
        # Halve even numbers, otherwise use 3n + 1.
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        yield number
''',
    ),
    program(
        "counts down from a number to zero",
        "The generator yields the current number. Then it subtracts one, until the number is negative.",
        "O(n), where n is the start number",
        """
assert list(countdown(3)) == [3, 2, 1, 0]
assert list(countdown(0)) == [0]
""",
        '''
from collections.abc import Iterator


def countdown(start: int) -> Iterator[int]:
    """Yield the numbers from start down to zero."""
    while start >= 0:
        # Pause here until the next number is wanted.
        yield start
        start -= 1
''',
        javascript="""
function* countdown(start) {
  while (start >= 0) {
    yield start;
    start -= 1;
  }
}
""",
    ),
    program(
        "converts a binary string to an integer",
        "The value starts at zero. For each digit the value is doubled and the digit is added.",
        "O(n), where n is the number of digits",
        """
assert parse_binary("1010") == 10
assert parse_binary("11111111") == 255
assert parse_binary("") == 0
""",
        '''
def parse_binary(digits: str) -> int:
    """Return the value of a string of binary digits."""
    value = 0
    for digit in digits:
        if digit not in "01":
            raise ValueError("only the digits 0 and 1 are allowed")
        # Shift the value by one place and add the digit.
        value = value * 2 + int(digit)
    return value
''',
    ),
    program(
        "converts an RGB colour to a hexadecimal string",
        "Each of the three values is written with two hexadecimal digits. A hash sign is put in front.",
        "O(1)",
        """
assert rgb_to_hex(255, 136, 0) == "#ff8800"
assert rgb_to_hex(0, 0, 0) == "#000000"
""",
        '''
def rgb_to_hex(red: int, green: int, blue: int) -> str:
    """Return a colour such as #ff8800."""
    for value in (red, green, blue):
        if not 0 <= value <= 255:
            raise ValueError("values must be between 0 and 255")
    # Two hexadecimal digits for each value.
    return f"#{red:02x}{green:02x}{blue:02x}"
''',
        javascript="""
function rgbToHex(red, green, blue) {
  return "#" + [red, green, blue].map((value) => value.toString(16).padStart(2, "0")).join("");
}
""",
    ),
    program(
        "formats a file size in a readable way",
        "The size is divided by 1024 until it is small enough. Each division moves on to the next unit.",
        "O(1), because there are only a few units",
        """
assert format_size(500) == "500.0 B"
assert format_size(2048) == "2.0 KB"
assert format_size(5 * 1024**2) == "5.0 MB"
""",
        '''
def format_size(size: float) -> str:
    """Return a size in bytes with a fitting unit."""
    for unit in ("B", "KB", "MB", "GB"):
        # Stop at the first unit that fits.
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
''',
    ),
    program(
        "computes the age of a person on a given day",
        """The difference of the years is the age, if the birthday has already been. Otherwise one year is subtracted,
        which the comparison of month and day decides.""",
        "O(1)",
        """
assert age_on("2000-06-15", "2024-06-14") == 23
assert age_on("2000-06-15", "2024-06-15") == 24
""",
        '''
from datetime import date


def age_on(birthday: str, day: str) -> int:
    """Return the age in years on the given day."""
    born = date.fromisoformat(birthday)
    today = date.fromisoformat(day)
    # True counts as one if the birthday is still to come.
    return today.year - born.year - ((today.month, today.day) < (born.month, born.day))
''',
    ),
    program(
        "checks whether a date falls on a weekend",
        "The date is parsed. `weekday` returns 5 for Saturday and 6 for Sunday.",
        "O(1)",
        """
assert is_weekend("2024-03-02")
assert not is_weekend("2024-03-04")
""",
        '''
from datetime import date


def is_weekend(day: str) -> bool:
    """Check whether a date is a Saturday or a Sunday."""
    # Monday is 0, so Saturday is 5.
    return date.fromisoformat(day).weekday() >= 5
''',
        javascript="""
function isWeekend(day) {
  return [0, 6].includes(new Date(day).getUTCDay());
}
""",
    ),
    program(
        "adds a number of days to a date",
        "The date is parsed, and a timedelta with the days is added. The result is written as a string again.",
        "O(1)",
        """
assert add_days("2024-02-28", 2) == "2024-03-01"
assert add_days("2024-01-10", -10) == "2023-12-31"
""",
        '''
from datetime import date, timedelta


def add_days(day: str, count: int) -> str:
    """Return the date that is the given number of days later."""
    # Parse, add and format again.
    later = date.fromisoformat(day) + timedelta(days=count)
    return later.isoformat()
''',
    ),
    program(
        "returns the number of days in a month",
        "`monthrange` returns the first weekday and the number of days of a month. The second value is the answer.",
        "O(1)",
        """
assert days_in_month(2024, 2) == 29
assert days_in_month(2023, 4) == 30
""",
        '''
import calendar


def days_in_month(year: int, month: int) -> int:
    """Return how many days a month has."""
    # The second value is the number of days.
    return calendar.monthrange(year, month)[1]
''',
        javascript="""
function daysInMonth(year, month) {
  return new Date(year, month, 0).getDate();
}
""",
    ),
    program(
        "greets a person by name",
        "The name is put into the greeting with an f-string. Without a name it greets the world.",
        "O(1)",
        """
assert greet("Maria") == "Hello, Maria!"
assert greet("") == "Hello, world!"
""",
        '''
def greet(name: str) -> str:
    """Return a friendly greeting."""
    # An empty name counts as false.
    return f"Hello, {name or 'world'}!"
''',
        javascript="""
function greet(name) {
  return `Hello, ${name || "world"}!`;
}
""",
    ),
    program(
        "turns a percentage of points into a school grade",
        "The limits are checked from the highest to the lowest. The first limit that is reached decides the grade.",
        "O(1), because there are only five grades",
        """
assert grade(93) == "A"
assert grade(75) == "C"
assert grade(20) == "F"
""",
        '''
def grade(percent: float) -> str:
    """Return the grade for a percentage of points."""
    # Check the highest limit first.
    for limit, letter in ((90, "A"), (80, "B"), (70, "C"), (60, "D")):
        if percent >= limit:
            return letter
    return "F"
''',
        javascript="""
function grade(percent) {
  const limits = [[90, "A"], [80, "B"], [70, "C"], [60, "D"]];
  const found = limits.find(([limit]) => percent >= limit);
  return found ? found[1] : "F";
}
""",
    ),
    program(
        "keeps only the even numbers of a list",
        "A list comprehension goes through the numbers. A number is kept if its remainder by two is zero.",
        "O(n), where n is the length of the list",
        """
assert keep_even([1, 2, 3, 4]) == [2, 4]
assert keep_even([]) == []
""",
        '''
def keep_even(numbers: list[int]) -> list[int]:
    """Return the even numbers of a list."""
    # Keep the numbers without a remainder.
    return [number for number in numbers if number % 2 == 0]
''',
        javascript="""
function keepEven(numbers) {
  return numbers.filter((number) => number % 2 === 0);
}
""",
    ),
    program(
        "squares every number in a list",
        "A list comprehension goes through the numbers. Each number is multiplied by itself.",
        "O(n), where n is the length of the list",
        """
assert squares([1, 2, 3]) == [1, 4, 9]
assert squares([]) == []
""",
        '''
def squares(numbers: list[int]) -> list[int]:
    """Return the squares of the numbers."""
    # Multiply each number by itself.
    return [number * number for number in numbers]
''',
        (
            '''
def squares(numbers: list[int]) -> list[int]:
    """Return the squares of the numbers, with a loop."""
    result = []
    for number in numbers:
        # Add the square of each number.
        result.append(number**2)
    return result
''',
            "The loop goes through the numbers. The square of each number is added to the result.",
        ),
        javascript="""
function squares(numbers) {
  return numbers.map((number) => number * number);
}
""",
    ),
    program(
        "computes the running total of a list",
        "The total grows by each number. After every step it is added to the result.",
        "O(n), where n is the length of the list",
        """
assert running_total([1, 2, 3, 4]) == [1, 3, 6, 10]
assert running_total([]) == []
""",
        '''
def running_total(numbers: list[int]) -> list[int]:
    """Return the sums of the first one, two, three and more numbers."""
    total = 0
    result = []
    for number in numbers:
        # Add the number and store the new total.
        total += number
        result.append(total)
    return result
''',
        (
            '''
from itertools import accumulate


def running_total(numbers: list[int]) -> list[int]:
    """Return the running totals with itertools."""
    # accumulate adds up by default.
    return list(accumulate(numbers))
''',
            "`itertools.accumulate` yields the sum after each number. The sums are collected in a list.",
        ),
        javascript="""
function runningTotal(numbers) {
  let total = 0;
  return numbers.map((number) => (total += number));
}
""",
    ),
    program(
        "splits a list into even and odd numbers",
        "Each number is added to one of two lists. The remainder by two decides which one.",
        "O(n), where n is the length of the list",
        """
assert split_parity([1, 2, 3, 4, 5]) == ([2, 4], [1, 3, 5])
assert split_parity([]) == ([], [])
""",
        '''
def split_parity(numbers: list[int]) -> tuple[list[int], list[int]]:
    """Return the even and the odd numbers in two lists."""
    even: list[int] = []
    odd: list[int] = []
    for number in numbers:
        # Choose the list by the remainder.
        (odd if number % 2 else even).append(number)
    return even, odd
''',
    ),
    program(
        "moves all zeros to the end of a list",
        "First all other numbers are collected in order. Then as many zeros as are missing are added.",
        "O(n), where n is the length of the list",
        """
assert zeros_last([0, 3, 0, 1, 2]) == [3, 1, 2, 0, 0]
assert zeros_last([]) == []
""",
        '''
def zeros_last(numbers: list[int]) -> list[int]:
    """Return the numbers with all zeros at the end."""
    # Keep the order of the other numbers.
    others = [number for number in numbers if number != 0]
    # Fill up with zeros.
    return others + [0] * (len(numbers) - len(others))
''',
        javascript="""
function zerosLast(numbers) {
  return [...numbers.filter((number) => number !== 0), ...numbers.filter((number) => number === 0)];
}
""",
    ),
    program(
        "finds the most common letter in a text",
        "Only letters are counted, in lower case. `most_common(1)` returns the letter with the highest count.",
        "O(n), where n is the length of the text",
        """
assert common_letter("Hello world") == "l"
assert common_letter("Aab") == "a"
""",
        '''
from collections import Counter


def common_letter(text: str) -> str:
    """Return the letter that occurs most often."""
    counts = Counter(char for char in text.lower() if char.isalpha())
    # There may be no letter at all.
    if not counts:
        raise ValueError("the text contains no letters")
    return counts.most_common(1)[0][0]
''',
    ),
    program(
        "translates a text into Morse code",
        """Each letter is looked up in a dictionary. The codes are joined with spaces, and other characters are left
        out.""",
        "O(n), where n is the length of the text",
        """
assert to_morse("SOS") == "... --- ..."
assert to_morse("hi") == ".... .."
assert to_morse("") == ""
""",
        '''
CODES = ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."
MORSE = dict(zip("abcdefghijklmnopqrstuvwxyz", CODES.split()))


def to_morse(text: str) -> str:
    """Translate the letters of a text into Morse code."""
    # Look up every letter and skip everything else.
    return " ".join(MORSE[char] for char in text.lower() if char in MORSE)
''',
    ),
    program(
        "translates a word into Pig Latin",
        """If the word starts with a vowel, "way" is added. Otherwise the letters before the first vowel move to the
        end, followed by "ay".""",
        "O(n), where n is the length of the word",
        """
assert pig_latin("apple") == "appleway"
assert pig_latin("string") == "ingstray"
""",
        '''
def pig_latin(word: str) -> str:
    """Translate a word into Pig Latin."""
    for i, letter in enumerate(word):
        # Move the letters before the first vowel to the end.
        if letter in "aeiou":
            return word[i:] + word[:i] + ("ay" if i else "way")
    # There is no vowel.
    return word + "ay"
''',
    ),
    program(
        "simulates a coin toss",
        "`random.choice` picks one of the two sides with equal probability.",
        "O(1)",
        """
assert toss_coin() in ("heads", "tails")
assert {toss_coin() for _ in range(200)} == {"heads", "tails"}
""",
        '''
import random


def toss_coin() -> str:
    """Return heads or tails at random."""
    # Both sides have the same probability.
    return random.choice(["heads", "tails"])
''',
        javascript="""
function tossCoin() {
  return Math.random() < 0.5 ? "heads" : "tails";
}
""",
    ),
    program(
        "shuffles a deck of cards",
        "The deck is built from all ranks and suits. `random.shuffle` puts the cards in a random order.",
        "O(n), where n is the number of cards",
        """
assert len(shuffled_deck()) == 52
assert len(set(shuffled_deck())) == 52
""",
        '''
import random


def shuffled_deck() -> list[str]:
    """Return the 52 cards in random order."""
    ranks = ["2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K", "A"]
    suits = ["clubs", "diamonds", "hearts", "spades"]
    # Combine every rank with every suit.
    deck = [f"{rank} of {suit}" for suit in suits for rank in ranks]
    # Shuffle the list in place.
    random.shuffle(deck)
    return deck
''',
    ),
    program(
        "checks whether a list is empty",
        "An empty list counts as false. So `not` turns it into the answer.",
        "O(1)",
        """
assert is_empty([])
assert not is_empty([0])
""",
        '''
def is_empty(items: list) -> bool:
    """Check whether a list has no items."""
    # Empty lists are false.
    return not items
''',
    ),
    program(
        "checks whether a matrix is symmetric",
        "A matrix is symmetric if it is equal to its transpose. `zip` builds the rows of the transpose.",
        "O(n^2) for an n by n matrix",
        """
assert is_symmetric([[1, 2], [2, 3]])
assert not is_symmetric([[1, 2], [3, 4]])
""",
        '''
def is_symmetric(matrix: list[list[float]]) -> bool:
    """Check whether a matrix is equal to its transpose."""
    # Compare the rows with the columns.
    return matrix == [list(column) for column in zip(*matrix)]
''',
    ),
    program(
        "rotates a square matrix by 90 degrees",
        "The rows are put in reverse order. Then `zip` turns the columns into rows, which gives a clockwise rotation.",
        "O(n^2) for an n by n matrix",
        """
assert rotate_matrix([[1, 2], [3, 4]]) == [[3, 1], [4, 2]]
assert rotate_matrix([]) == []
""",
        '''
def rotate_matrix(matrix: list[list[int]]) -> list[list[int]]:
    """Return the matrix rotated clockwise."""
    # Reverse the rows, then exchange rows and columns.
    return [list(row) for row in zip(*matrix[::-1])]
''',
        javascript="""
function rotateMatrix(matrix) {
  return matrix.map((_, column) => matrix.map((row) => row[column]).reverse());
}
""",
    ),
    program(
        "creates an identity matrix",
        "The entry is one where the row and the column are equal. All other entries are zero.",
        "O(n^2), because the matrix has n * n entries",
        """
assert identity(2) == [[1, 0], [0, 1]]
assert identity(1) == [[1]]
""",
        '''
def identity(size: int) -> list[list[int]]:
    """Return the identity matrix of the given size."""
    # Ones on the diagonal, zeros elsewhere.
    return [[int(row == column) for column in range(size)] for row in range(size)]
''',
    ),
    program(
        "keeps the entries of a dictionary whose values are above a limit",
        "A dictionary comprehension goes through the entries. An entry is kept if its value is larger than the limit.",
        "O(n), where n is the number of entries",
        """
assert above_limit({"a": 5, "b": 12}, 10) == {"b": 12}
assert above_limit({}, 1) == {}
""",
        '''
def above_limit(scores: dict[str, float], limit: float) -> dict[str, float]:
    """Return the entries with a value above the limit."""
    # Keep only the large values.
    return {name: score for name, score in scores.items() if score > limit}
''',
        javascript="""
function aboveLimit(scores, limit) {
  return Object.fromEntries(Object.entries(scores).filter(([, score]) => score > limit));
}
""",
    ),
    program(
        "adds the values of two dictionaries",
        "It goes through the keys of both dictionaries. A missing value counts as zero, and the two values are added.",
        "O(n), where n is the number of keys",
        """
assert add_dicts({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": 1, "b": 5, "c": 4}
assert add_dicts({}, {}) == {}
""",
        '''
def add_dicts(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Add the values of equal keys."""
    # Start with a copy of the first dictionary.
    result = dict(first)
    for key, value in second.items():
        # A new key starts at zero.
        result[key] = result.get(key, 0) + value
    return result
''',
        javascript="""
function addDicts(first, second) {
  const result = { ...first };
  for (const [key, value] of Object.entries(second)) {
    result[key] = (result[key] ?? 0) + value;
  }
  return result;
}
""",
    ),
    program(
        "finds the key with the largest value in a dictionary",
        "`max` goes through the keys. The key function tells it to compare the values.",
        "O(n), where n is the number of entries",
        """
assert best_key({"ann": 3, "bob": 7}) == "bob"
assert best_key({"x": 1}) == "x"
""",
        '''
def best_key(scores: dict[str, float]) -> str:
    """Return the key with the largest value."""
    if not scores:
        raise ValueError("the dictionary must not be empty")
    # Compare the keys by their values.
    return max(scores, key=lambda name: scores[name])
''',
    ),
    program(
        "moves the disks in the Towers of Hanoi",
        """To move n disks, the n - 1 smaller ones first go to the spare peg. Then the largest disk is moved, and the
        smaller ones follow.""",
        "O(2^n), because n disks need 2^n - 1 moves",
        """
assert hanoi(2) == [("A", "B"), ("A", "C"), ("B", "C")]
assert len(hanoi(5)) == 31
assert hanoi(0) == []
""",
        '''
def hanoi(disks: int, source: str = "A", spare: str = "B", target: str = "C") -> list[tuple[str, str]]:
    """Return the moves that bring all disks from source to target."""
    # Without disks there is nothing to do.
    if disks == 0:
        return []
    # Move the smaller disks away, then the largest, then the smaller ones on top.
    first = hanoi(disks - 1, source, target, spare)
    last = hanoi(disks - 1, spare, source, target)
    return first + [(source, target)] + last
''',
    ),
    program(
        "appends a line to a text file",
        "The mode `a` opens the file for appending. The line is written at the end with a line break.",
        "O(n), where n is the length of the line",
        """
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "log.txt")
    append_line(str(path), "first")
    append_line(str(path), "second")
    assert path.read_text() == "first\\nsecond\\n"
""",
        r'''
def append_line(path: str, line: str) -> None:
    """Write a line at the end of a text file."""
    # The mode "a" keeps what is already in the file.
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
''',
    ),
    program(
        "reads a CSV file into a list of dictionaries",
        "`DictReader` uses the first line as the keys. Every further line becomes one dictionary.",
        "O(n), where n is the size of the file",
        """
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "people.csv")
    path.write_text("name,age\\nAnn,30\\n")
    assert read_csv(str(path)) == [{"name": "Ann", "age": "30"}]
""",
        '''
import csv


def read_csv(path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries."""
    with open(path, newline="", encoding="utf-8") as file:
        # The first line contains the keys.
        return list(csv.DictReader(file))
''',
    ),
    program(
        "models a bank account with deposits and withdrawals",
        """The class stores the balance. A deposit adds to it, and a withdrawal subtracts from it if there is enough
        money. Otherwise a ValueError is raised.""",
        "O(1) for every operation",
        """
account = BankAccount(100)
account.deposit(50)
account.withdraw(30)
assert account.balance == 120
""",
        '''
class BankAccount:
    """A bank account that cannot be overdrawn."""

    def __init__(self, balance: float = 0) -> None:
        self.balance = balance

    def deposit(self, amount: float) -> None:
        self.balance += amount

    def withdraw(self, amount: float) -> None:
        # There must be enough money.
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
''',
        javascript="""
class BankAccount {
  constructor(balance = 0) {
    this.balance = balance;
  }

  deposit(amount) {
    this.balance += amount;
  }

  withdraw(amount) {
    if (amount > this.balance) {
      throw new Error("not enough money");
    }
    this.balance -= amount;
  }
}
""",
    ),
)
