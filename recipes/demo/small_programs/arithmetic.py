"""Programs on numbers, dates and matrices."""

from .program import program

ARITHMETIC = (
    program(
        "checks whether a number is a power of two",
        """A power of two has exactly one bit set. Subtracting one flips all bits below it, so `n & (n - 1)` is zero
        only for powers of two.""",
        "O(1), because it needs only one comparison and one bit operation",
        """
assert is_power_of_two(64)
assert is_power_of_two(1)
assert not is_power_of_two(12)
assert not is_power_of_two(0)
""",
        '''
def is_power_of_two(n: int) -> bool:
    """Check whether n is a power of two."""
    # Exactly one bit of a power of two is set.
    return n > 0 and n & (n - 1) == 0
''',
        (
            '''
def is_power_of_two(n: int) -> bool:
    """Check whether n is a power of two, using recursion."""
    # One is the smallest power of two.
    if n == 1:
        return True
    # Zero, negative and odd numbers are not powers of two.
    if n < 1 or n % 2:
        return False
    return is_power_of_two(n // 2)
''',
            """One is a power of two, and other odd numbers are not. An even number is a power of two if its half is
            one.""",
        ),
        (
            '''
def is_power_of_two(n: int) -> bool:
    """Check whether n can be halved down to one."""
    if n < 1:
        return False
    # Halve the number as long as it is even.
    while n % 2 == 0:
        n //= 2
    return n == 1
''',
            "The number is halved as long as it is even. Only a power of two ends at one.",
        ),
        javascript="""
function isPowerOfTwo(n) {
  return n > 0 && (n & (n - 1)) === 0;
}
""",
    ),
    program(
        "computes compound interest over several years",
        """The balance grows by the same factor every year. The final balance is the principal times this factor to
        the power of the number of years.""",
        "O(1), because it evaluates one formula",
        """
assert compound_interest(1000, 0.05, 2) == 1102.5
assert compound_interest(500, 0.1, 1) == 550.0
assert compound_interest(200, 0.03, 0) == 200
""",
        '''
def compound_interest(principal: float, rate: float, years: int) -> float:
    """Return the balance after the given years, with rate as a fraction."""
    if principal < 0 or years < 0:
        raise ValueError("principal and years must not be negative")
    # Every year multiplies the balance by the same factor.
    balance = principal * (1 + rate) ** years
    # Round to cents.
    return round(balance, 2)
''',
        (
            '''
def compound_interest(principal: float, rate: float, years: int) -> float:
    """Return the balance after the given years, year by year."""
    balance = principal
    for _ in range(years):
        # Add the interest of this year.
        balance += balance * rate
    return round(balance, 2)
''',
            """The balance starts with the principal. In each year the interest is added, and so it earns interest
            later.""",
        ),
        javascript="""
function compoundInterest(principal, rate, years) {
  const balance = principal * (1 + rate) ** years;
  return Math.round(balance * 100) / 100;
}
""",
    ),
    program(
        "computes the checksum of a number with the Luhn algorithm",
        """The digits are read from right to left. Every second digit is doubled, and 9 is subtracted if the result is
        larger than 9. The number is valid if the sum is divisible by 10.""",
        "O(n), where n is the number of digits",
        """
assert luhn_valid("79927398713")
assert luhn_valid("4539 1488 0343 6467")
assert not luhn_valid("79927398710")
""",
        '''
def luhn_valid(number: str) -> bool:
    """Check a number with the Luhn algorithm."""
    # Read the digits from right to left.
    digits = [int(char) for char in reversed(number) if char.isdigit()]
    total = 0
    for i, digit in enumerate(digits):
        # Double every second digit.
        if i % 2 == 1:
            digit *= 2
            if digit > 9:
                digit -= 9
        total += digit
    return total % 10 == 0
''',
        javascript=r"""
function luhnValid(number) {
  const digits = number.replace(/\D/g, "").split("").reverse().map(Number);
  const total = digits.reduce((sum, digit, i) => {
    const doubled = i % 2 === 1 ? digit * 2 : digit;
    return sum + (doubled > 9 ? doubled - 9 : doubled);
  }, 0);
  return total % 10 === 0;
}
""",
    ),
    program(
        "computes the greatest common divisor of two integers",
        """This is the algorithm of Euclid. The pair is replaced by the second number and the remainder of the
        division, until the remainder is zero.""",
        "O(log(min(a, b))), because the remainders shrink quickly",
        """
assert gcd(48, 18) == 6
assert gcd(17, 5) == 1
assert gcd(0, 9) == 9
""",
        '''
def gcd(a: int, b: int) -> int:
    """Return the greatest common divisor of a and b."""
    # Replace the pair until the remainder is zero.
    while b:
        a, b = b, a % b
    return abs(a)
''',
        (
            '''
def gcd(a: int, b: int) -> int:
    """Return the greatest common divisor of a and b, using recursion."""
    # Nothing is left to divide by.
    if b == 0:
        return abs(a)
    # Continue with the remainder.
    return gcd(b, a % b)
''',
            """If the second number is zero, the first one is the result. Otherwise the function calls itself with the
            second number and the remainder.""",
        ),
        javascript="""
function gcd(a, b) {
  while (b !== 0) {
    [a, b] = [b, a % b];
  }
  return Math.abs(a);
}
""",
    ),
    program(
        "computes the number of days between two dates",
        """Both strings are converted to dates. Subtracting two dates gives a timedelta, and its `days` attribute is
        the number of days.""",
        "O(1), because the dates are only parsed and subtracted",
        """
assert days_between("2024-01-01", "2024-03-01") == 60
assert days_between("2023-12-31", "2024-01-01") == 1
assert days_between("2024-05-05", "2024-05-05") == 0
""",
        '''
from datetime import date


def days_between(first: str, second: str) -> int:
    """Return the number of days between two dates such as 2024-01-31."""
    # Parse both dates; an invalid date raises a ValueError.
    start = date.fromisoformat(first)
    end = date.fromisoformat(second)
    # The order of the dates does not matter.
    return abs((end - start).days)
''',
        javascript="""
function daysBetween(first, second) {
  const difference = new Date(second) - new Date(first);
  return Math.abs(difference) / (24 * 60 * 60 * 1000);
}
""",
    ),
    program(
        "computes the prime factors of an integer",
        """It tries the divisors in ascending order. As long as a divisor fits, it is added to the list and divided
        out. What is left at the end is itself prime.""",
        "O(sqrt(n)), because divisors up to the square root are enough",
        """
assert prime_factors(60) == [2, 2, 3, 5]
assert prime_factors(97) == [97]
assert prime_factors(1) == []
""",
        '''
def prime_factors(number: int) -> list[int]:
    """Return the prime factors of number in ascending order."""
    if number < 1:
        raise ValueError("number must be positive")
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        # Divide by this factor as often as possible.
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    # The rest is a prime number.
    if number > 1:
        factors.append(number)
    return factors
''',
        (
            '''
from collections.abc import Iterator


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of number, collected from a generator."""

    def factors(rest: int) -> Iterator[int]:
        divisor = 2
        while rest > 1:
            # Yield the divisor if it fits, otherwise try the next one.
            if rest % divisor == 0:
                yield divisor
                rest //= divisor
            else:
                divisor += 1

    return list(factors(number))
''',
            """The inner generator yields a divisor whenever it fits and divides it out. The list collects all yielded
            factors.""",
        ),
        (
            '''
def prime_factors(number: int, divisor: int = 2) -> list[int]:
    """Return the prime factors of number, using recursion."""
    # One has no prime factors.
    if number < 2:
        return []
    # Split off the divisor if it fits.
    if number % divisor == 0:
        return [divisor] + prime_factors(number // divisor, divisor)
    return prime_factors(number, divisor + 1)
''',
            """If the divisor fits, it is a prime factor, and the function continues with the quotient. Otherwise it
            tries the next divisor.""",
        ),
        javascript="""
function primeFactors(number) {
  const factors = [];
  for (let divisor = 2; number > 1; divisor++) {
    while (number % divisor === 0) {
      factors.push(divisor);
      number /= divisor;
    }
  }
  return factors;
}
""",
    ),
    program(
        "finds all prime numbers up to n",
        """This is the sieve of Eratosthenes. All numbers start as possible primes, and the multiples of each prime
        are crossed out. The numbers that are left are prime.""",
        "O(n log log n)",
        """
assert primes_up_to(20) == [2, 3, 5, 7, 11, 13, 17, 19]
assert primes_up_to(2) == [2]
assert primes_up_to(1) == []
""",
        '''
def primes_up_to(limit: int) -> list[int]:
    """Return all prime numbers up to and including limit."""
    # At first every number from 2 on may be prime.
    is_prime = [False, False] + [True] * (limit - 1)
    for number in range(2, int(limit**0.5) + 1):
        if is_prime[number]:
            # Cross out the multiples of this prime.
            for multiple in range(number * number, limit + 1, number):
                is_prime[multiple] = False
    return [number for number in range(2, limit + 1) if is_prime[number]]
''',
        (
            '''
def primes_up_to(limit: int) -> list[int]:
    """Return all prime numbers up to limit, by trial division."""
    primes: list[int] = []
    for number in range(2, limit + 1):
        # A prime is not divisible by any smaller prime.
        if all(number % prime for prime in primes):
            primes.append(number)
    return primes
''',
            "Each number is divided by the primes found so far. If none of them fits, the number is prime too.",
        ),
        javascript="""
function primesUpTo(limit) {
  const composite = new Set();
  const primes = [];
  for (let number = 2; number <= limit; number++) {
    if (!composite.has(number)) {
      primes.push(number);
      for (let multiple = number * number; multiple <= limit; multiple += number) {
        composite.add(multiple);
      }
    }
  }
  return primes;
}
""",
    ),
    program(
        "returns the n-th Fibonacci number",
        """It keeps two neighbouring Fibonacci numbers. In each step the pair moves on by one, so after n steps the
        first number is the result.""",
        "O(n), because the loop runs n times",
        """
assert fibonacci(10) == 55
assert fibonacci(1) == 1
assert fibonacci(0) == 0
""",
        '''
def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number, starting with 0 and 1."""
    if n < 0:
        raise ValueError("n must not be negative")
    # Keep two neighbouring numbers of the sequence.
    a, b = 0, 1
    for _ in range(n):
        # Move on by one step.
        a, b = b, a + b
    return a
''',
        (
            '''
from functools import cache


@cache
def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number, using recursion with a cache."""
    # The first two numbers are known.
    if n < 2:
        return n
    # Every other number is the sum of the two before it.
    return fibonacci(n - 1) + fibonacci(n - 2)
''',
            """The first two numbers are 0 and 1. Every other number is the sum of the two before it. The cache makes
            sure that each number is computed only once.""",
        ),
        javascript="""
function fibonacci(n) {
  let [a, b] = [0, 1];
  for (let i = 0; i < n; i++) {
    [a, b] = [b, a + b];
  }
  return a;
}
""",
    ),
    program(
        "converts a decimal number to binary without using bin()",
        """It divides the number by two again and again. Each remainder is one binary digit, and the digits come out
        from the last to the first.""",
        "O(log n), because the number is halved in each step",
        """
assert to_binary(10) == "1010"
assert to_binary(255) == "11111111"
assert to_binary(0) == "0"
""",
        '''
def to_binary(number: int) -> str:
    """Return the binary digits of a non-negative integer."""
    if number < 0:
        raise ValueError("number must not be negative")
    digits = ""
    while number > 0:
        # The remainder is the next digit from the right.
        digits = str(number % 2) + digits
        number //= 2
    # Zero has no digits so far.
    return digits or "0"
''',
        (
            '''
def to_binary(number: int) -> str:
    """Return the binary digits of a non-negative integer, using recursion."""
    # A single digit stays the same.
    if number < 2:
        return str(number)
    # Convert the half and append the last digit.
    return to_binary(number // 2) + str(number % 2)
''',
            """Zero and one are their own binary form. For larger numbers the function converts the half and appends
            the remainder.""",
        ),
        javascript="""
function toBinary(number) {
  let digits = "";
  while (number > 0) {
    digits = (number % 2) + digits;
    number = Math.floor(number / 2);
  }
  return digits || "0";
}
""",
    ),
    program(
        "converts temperatures between Celsius and Fahrenheit",
        """The second argument tells the unit of the given temperature. Celsius is multiplied by 9/5 and increased by
        32, and Fahrenheit is converted the other way round.""",
        "O(1), because it evaluates one formula",
        """
assert convert_temperature(100, "C") == 212
assert convert_temperature(32, "F") == 0
assert convert_temperature(-40, "C") == -40
""",
        '''
def convert_temperature(degrees: float, unit: str) -> float:
    """Convert from Celsius ("C") to Fahrenheit, or from Fahrenheit ("F") to Celsius."""
    # Celsius to Fahrenheit.
    if unit == "C":
        return degrees * 9 / 5 + 32
    # Fahrenheit to Celsius.
    if unit == "F":
        return (degrees - 32) * 5 / 9
    raise ValueError("unit must be C or F")
''',
        javascript="""
function convertTemperature(degrees, unit) {
  if (unit === "C") {
    return (degrees * 9) / 5 + 32;
  }
  if (unit === "F") {
    return ((degrees - 32) * 5) / 9;
  }
  throw new Error("unit must be C or F");
}
""",
    ),
    program(
        "counts the set bits in an integer",
        """The expression `n & (n - 1)` clears the lowest set bit. The loop counts how often this is possible until
        the number is zero.""",
        "O(k), where k is the number of set bits",
        """
assert count_bits(13) == 3
assert count_bits(255) == 8
assert count_bits(0) == 0
""",
        '''
def count_bits(n: int) -> int:
    """Return the number of ones in the binary form of n."""
    if n < 0:
        raise ValueError("n must not be negative")
    count = 0
    while n:
        # Clear the lowest bit that is set.
        n &= n - 1
        count += 1
    return count
''',
        (
            '''
def count_bits(n: int) -> int:
    """Return the number of ones in the binary form of n, using recursion."""
    # Zero has no set bits.
    if n == 0:
        return 0
    # Count the last bit, then the others.
    return n % 2 + count_bits(n // 2)
''',
            "Zero has no set bits. Otherwise the last bit is added to the number of set bits in the half.",
        ),
        javascript="""
function countBits(n) {
  let count = 0;
  while (n > 0) {
    n &= n - 1;
    count++;
  }
  return count;
}
""",
    ),
    program(
        "formats a number of seconds as hours, minutes and seconds",
        """`divmod` splits the seconds into minutes and a rest, and then the minutes into hours and a rest. The format
        adds leading zeros.""",
        "O(1), because it needs two divisions",
        """
assert format_seconds(3725) == "01:02:05"
assert format_seconds(59) == "00:00:59"
assert format_seconds(0) == "00:00:00"
""",
        '''
def format_seconds(total: int) -> str:
    """Format a number of seconds as hours:minutes:seconds."""
    # Split off the seconds, then the minutes.
    minutes, seconds = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    # Write two digits for each part.
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"
''',
        javascript="""
function formatSeconds(total) {
  const parts = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}
""",
    ),
    program(
        "prints a multiplication table",
        """The outer loop goes through the rows and the inner one through the columns. Each product is written with a
        fixed width, so the columns line up.""",
        "O(n^2), because there are n rows with n products each",
        """
assert multiplication_table(2) is None
""",
        '''
def multiplication_table(size: int) -> None:
    """Print the multiplication table up to size times size."""
    for row in range(1, size + 1):
        # Give every product the same width.
        print("".join(f"{row * column:4d}" for column in range(1, size + 1)))
''',
        javascript="""
function multiplicationTable(size) {
  for (let row = 1; row <= size; row++) {
    let line = "";
    for (let column = 1; column <= size; column++) {
      line += String(row * column).padStart(4);
    }
    console.log(line);
  }
}
""",
    ),
    program(
        "draws a triangle of stars of height n",
        "Row number i has 2 * i - 1 stars. Spaces before the stars move them to the middle.",
        "O(n^2), because there are n rows with up to 2n - 1 characters",
        """
assert star_triangle(1) == "*"
assert star_triangle(3) == "  *\\n ***\\n*****"
assert star_triangle(0) == ""
""",
        r'''
def star_triangle(height: int) -> str:
    """Return a triangle of stars with the given height."""
    rows = []
    for row in range(1, height + 1):
        # Spaces on the left, then an odd number of stars.
        rows.append(" " * (height - row) + "*" * (2 * row - 1))
    return "\n".join(rows)
''',
        javascript=r"""
function starTriangle(height) {
  const rows = [];
  for (let row = 1; row <= height; row++) {
    rows.push(" ".repeat(height - row) + "*".repeat(2 * row - 1));
  }
  return rows.join("\n");
}
""",
    ),
    program(
        "returns the weekday name of a given date",
        "The string is converted to a date object. `strftime` with `%A` gives the full name of the weekday.",
        "O(1), because only one date is parsed and formatted",
        """
assert weekday_name("2024-02-29") == "Thursday"
assert weekday_name("2000-01-01") == "Saturday"
""",
        '''
from datetime import date


def weekday_name(day: str) -> str:
    """Return the weekday of a date such as 2024-02-29."""
    # Parse the date; an invalid one raises a ValueError.
    parsed = date.fromisoformat(day)
    # Format it as the name of the weekday.
    return parsed.strftime("%A")
''',
        (
            '''
from datetime import datetime


def weekday_name(day: str) -> str:
    """Return the weekday of a date such as 2024-02-29, from a list of names."""
    names = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    # weekday() is 0 on a Monday.
    return names[datetime.strptime(day, "%Y-%m-%d").weekday()]
''',
            "The date is parsed first. The method `weekday` returns a number from 0 to 6, which selects the name.",
        ),
        javascript="""
function weekdayName(day) {
  const names = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
  return names[new Date(day).getUTCDay()];
}
""",
    ),
    program(
        "swaps two variables without a temporary",
        """Python evaluates the right-hand side as a tuple first. Then it assigns the two values in swapped order, so
        no temporary variable is needed.""",
        "O(1), because only two values are exchanged",
        """
assert swap(1, 2) == (2, 1)
assert swap("a", "b") == ("b", "a")
""",
        '''
from typing import Any


def swap(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the two values in swapped order."""
    # Assign both at once.
    a, b = b, a
    return a, b
''',
        javascript="""
function swap(a, b) {
  [a, b] = [b, a];
  return [a, b];
}
""",
    ),
    program(
        "plays one round of rock, paper, scissors",
        """A dictionary tells which choice each choice beats. If both choices are equal it is a draw. Otherwise the
        dictionary decides who wins.""",
        "O(1), because it makes at most two comparisons",
        """
assert play_round("rock", "scissors") == "You win"
assert play_round("rock", "paper") == "You lose"
assert play_round("paper", "paper") == "Draw"
""",
        '''
def play_round(player: str, computer: str) -> str:
    """Return the result of one round of rock, paper, scissors."""
    # Each key beats its value.
    beats = {"rock": "scissors", "paper": "rock", "scissors": "paper"}
    if player not in beats or computer not in beats:
        raise ValueError("choose rock, paper or scissors")
    # Equal choices are a draw.
    if player == computer:
        return "Draw"
    return "You win" if beats[player] == computer else "You lose"
''',
        javascript="""
function playRound(player, computer) {
  const beats = { rock: "scissors", paper: "rock", scissors: "paper" };
  if (player === computer) {
    return "Draw";
  }
  return beats[player] === computer ? "You win" : "You lose";
}
""",
    ),
    program(
        "simulates rolling two dice many times and returns the frequencies",
        """In every roll two random numbers from 1 to 6 are added. A Counter collects how often each sum occurs, and
        the result is sorted by the sum.""",
        "O(n), where n is the number of rolls",
        """
assert sum(roll_dice(1000).values()) == 1000
assert set(roll_dice(500)) <= set(range(2, 13))
""",
        '''
import random
from collections import Counter


def roll_dice(rolls: int) -> dict[int, int]:
    """Return how often each sum of two dice occurs."""
    # Add two random numbers for every roll.
    sums = (random.randint(1, 6) + random.randint(1, 6) for _ in range(rolls))
    # Count the sums and sort them.
    return dict(sorted(Counter(sums).items()))
''',
        javascript="""
function rollDice(rolls) {
  const die = () => 1 + Math.floor(Math.random() * 6);
  const counts = {};
  for (let i = 0; i < rolls; i++) {
    const sum = die() + die();
    counts[sum] = (counts[sum] ?? 0) + 1;
  }
  return counts;
}
""",
    ),
    program(
        "computes the transpose of a matrix",
        "The star passes every row to `zip`. `zip` then collects the first entries, the second entries and so on.",
        "O(m * n) for a matrix with m rows and n columns",
        """
assert transpose([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]
assert transpose([[7]]) == [[7]]
assert transpose([]) == []
""",
        '''
def transpose(matrix: list[list[float]]) -> list[list[float]]:
    """Return the matrix with rows and columns exchanged."""
    # zip collects the entries of each column.
    return [list(column) for column in zip(*matrix)]
''',
        (
            '''
def transpose(matrix: list[list[float]]) -> list[list[float]]:
    """Return the matrix with rows and columns exchanged, with two loops."""
    if not matrix:
        return []
    result = []
    for column in range(len(matrix[0])):
        # Collect one column as a new row.
        result.append([row[column] for row in matrix])
    return result
''',
            "The loop goes through the columns. The entries of each column become a row of the result.",
        ),
        javascript="""
function transpose(matrix) {
  return (matrix[0] ?? []).map((_, column) => matrix.map((row) => row[column]));
}
""",
    ),
    program(
        "multiplies two matrices given as nested lists",
        """Each entry of the result is the sum of products of a row of the first matrix and a column of the second.
        `zip(*b)` gives the columns.""",
        "O(n^3) for two n by n matrices",
        """
assert matrix_product([[1, 2], [3, 4]], [[5, 6], [7, 8]]) == [[19, 22], [43, 50]]
assert matrix_product([[2]], [[3]]) == [[6]]
""",
        '''
def matrix_product(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """Return the product of two matrices."""
    if len(a[0]) != len(b):
        raise ValueError("the sizes of the matrices do not match")
    # The columns of the second matrix.
    columns = list(zip(*b))
    # Each entry combines one row and one column.
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]
''',
        javascript="""
function matrixProduct(a, b) {
  return a.map((row) =>
    b[0].map((_, column) => row.reduce((sum, value, k) => sum + value * b[k][column], 0))
  );
}
""",
    ),
    program(
        "computes the dot product of two vectors",
        "The vectors must have the same length. `zip` pairs their entries, and the products of the pairs are added.",
        "O(n), where n is the length of the vectors",
        """
assert dot([1, 2, 3], [4, 5, 6]) == 32
assert dot([1, 0], [0, 1]) == 0
assert dot([], []) == 0
""",
        '''
def dot(a: list[float], b: list[float]) -> float:
    """Return the dot product of two vectors."""
    if len(a) != len(b):
        raise ValueError("the vectors must have the same length")
    # Multiply the entries in pairs and add the products.
    return sum(x * y for x, y in zip(a, b))
''',
        (
            '''
def dot(a: list[float], b: list[float]) -> float:
    """Return the dot product of two vectors, with a loop."""
    total = 0
    for x, y in zip(a, b):
        # Add the product of each pair.
        total += x * y
    return total
''',
            "The total starts at zero. For each pair of entries their product is added.",
        ),
        javascript="""
function dot(a, b) {
  return a.reduce((sum, value, i) => sum + value * b[i], 0);
}
""",
    ),
    program(
        "computes the running average of a stream of numbers",
        """It keeps the sum and the count of the numbers seen so far. After each number it yields the sum divided by
        the count.""",
        "O(n) in total, and O(1) for each number",
        """
assert list(running_average([10, 20, 60])) == [10.0, 15.0, 30.0]
assert list(running_average([])) == []
""",
        '''
from collections.abc import Iterable, Iterator


def running_average(numbers: Iterable[float]) -> Iterator[float]:
    """Yield the average of all numbers seen so far."""
    total = 0.0
    for count, number in enumerate(numbers, start=1):
        # Update the sum, then yield the new average.
        total += number
        yield total / count
''',
        javascript="""
function* runningAverage(numbers) {
  let total = 0;
  let count = 0;
  for (const number of numbers) {
    total += number;
    count += 1;
    yield total / count;
  }
}
""",
    ),
    program(
        "normalises a list of numbers to the range 0 to 1",
        """It finds the smallest and the largest number. Then it subtracts the smallest from each number and divides
        by the difference.""",
        "O(n), where n is the number of values",
        """
assert normalise([10, 20, 30]) == [0.0, 0.5, 1.0]
assert normalise([5, 5]) == [0.0, 0.0]
assert normalise([]) == []
""",
        '''
def normalise(values: list[float]) -> list[float]:
    """Scale values so that the smallest is 0 and the largest is 1."""
    if not values:
        return []
    low, high = min(values), max(values)
    # Equal values have no range to scale.
    if low == high:
        return [0.0] * len(values)
    # Move to zero, then divide by the range.
    return [(value - low) / (high - low) for value in values]
''',
        javascript="""
function normalise(values) {
  const low = Math.min(...values);
  const range = Math.max(...values) - low;
  return values.map((value) => (range === 0 ? 0 : (value - low) / range));
}
""",
    ),
    program(
        "evaluates an arithmetic expression in reverse Polish notation",
        """Numbers are pushed on a stack. An operator takes the last two numbers from the stack and pushes the result.
        The last number on the stack is the value.""",
        "O(n), where n is the number of tokens",
        """
assert evaluate_rpn("3 4 + 2 *") == 14
assert evaluate_rpn("10 2 8 * + 3 -") == 23
assert evaluate_rpn("9 2 /") == 4.5
""",
        '''
import operator


def evaluate_rpn(expression: str) -> float:
    """Evaluate an expression such as 3 4 + 2 *."""
    operators = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    stack: list[float] = []
    for token in expression.split():
        # An operator combines the last two numbers.
        if token in operators:
            right = stack.pop()
            left = stack.pop()
            stack.append(operators[token](left, right))
        # Everything else is a number.
        else:
            stack.append(float(token))
    return stack.pop()
''',
        javascript="""
function evaluateRpn(expression) {
  const operators = {
    "+": (a, b) => a + b,
    "-": (a, b) => a - b,
    "*": (a, b) => a * b,
    "/": (a, b) => a / b,
  };
  const stack = [];
  for (const token of expression.split(" ")) {
    if (token in operators) {
      const right = stack.pop();
      const left = stack.pop();
      stack.push(operators[token](left, right));
    } else {
      stack.push(Number(token));
    }
  }
  return stack.pop();
}
""",
    ),
    program(
        "solves the coin change problem",
        """The list stores the fewest coins for every amount, starting with zero coins for zero. For each amount it
        tries every coin and takes the best result.""",
        "O(n * k), where n is the amount and k is the number of coins",
        """
assert fewest_coins([1, 5, 10, 25], 63) == 6
assert fewest_coins([1, 3, 4], 6) == 2
assert fewest_coins([5], 3) == -1
""",
        '''
def fewest_coins(coins: list[int], amount: int) -> int:
    """Return the smallest number of coins for the amount, or -1."""
    # best[a] is the fewest coins for the amount a.
    best = [0] + [amount + 1] * amount
    for a in range(1, amount + 1):
        for coin in coins:
            # Use this coin if it makes the amount cheaper.
            if coin <= a:
                best[a] = min(best[a], best[a - coin] + 1)
    return best[amount] if best[amount] <= amount else -1
''',
        javascript="""
function fewestCoins(coins, amount) {
  const best = [0, ...Array(amount).fill(Infinity)];
  for (let a = 1; a <= amount; a++) {
    for (const coin of coins) {
      if (coin <= a) {
        best[a] = Math.min(best[a], best[a - coin] + 1);
      }
    }
  }
  return Number.isFinite(best[amount]) ? best[amount] : -1;
}
""",
    ),
    program(
        "solves the N-queens problem",
        """The queens are placed row by row. A column is safe if no earlier queen is in the same column or on a
        diagonal. If a row has no safe column, the search goes back.""",
        "O(n!) in the worst case, because the search tries the columns of each row",
        """
assert solve_queens(4) == [1, 3, 0, 2]
assert len(solve_queens(8)) == 8
assert solve_queens(3) is None
""",
        '''
def solve_queens(n: int, queens: tuple[int, ...] = ()) -> list[int] | None:
    """Return the column of the queen in each row, or None."""
    row = len(queens)
    # All queens are placed.
    if row == n:
        return list(queens)
    for column in range(n):
        # A safe column is not attacked by any earlier queen.
        if all(column != c and abs(column - c) != row - r for r, c in enumerate(queens)):
            solution = solve_queens(n, (*queens, column))
            if solution is not None:
                return solution
    return None
''',
        javascript="""
function solveQueens(n, queens = []) {
  const row = queens.length;
  if (row === n) {
    return queens;
  }
  for (let column = 0; column < n; column++) {
    if (queens.every((c, r) => c !== column && Math.abs(c - column) !== row - r)) {
      const solution = solveQueens(n, [...queens, column]);
      if (solution) {
        return solution;
      }
    }
  }
  return null;
}
""",
    ),
    program(
        "fills a Sudoku grid by backtracking",
        """It looks for the first empty cell. Each digit that fits the row, the column and the box is tried, and the
        rest is solved by a recursive call. If nothing fits, the cell is emptied again.""",
        "exponential in the number of empty cells in the worst case",
        """
grid = [[0] * 9 for _ in range(9)]
assert solve_sudoku(grid)
assert all(sorted(row) == list(range(1, 10)) for row in grid)
assert all(sorted(column) == list(range(1, 10)) for column in zip(*grid))
""",
        '''
def fits(grid: list[list[int]], row: int, column: int, digit: int) -> bool:
    """Check the row, the column and the box of a cell."""
    top, left = row - row % 3, column - column % 3
    box = [grid[r][c] for r in range(top, top + 3) for c in range(left, left + 3)]
    return digit not in grid[row] and digit not in [line[column] for line in grid] and digit not in box


def solve_sudoku(grid: list[list[int]]) -> bool:
    """Fill the zeros of the grid in place and return whether it worked."""
    for row in range(9):
        for column in range(9):
            if grid[row][column] == 0:
                # Try every digit in the first empty cell.
                for digit in range(1, 10):
                    if fits(grid, row, column, digit):
                        grid[row][column] = digit
                        if solve_sudoku(grid):
                            return True
                # No digit fits: empty the cell and go back.
                grid[row][column] = 0
                return False
    return True
''',
    ),
)
