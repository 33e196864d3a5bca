"""Programs on lists and dictionaries."""

from .program import program

SEQUENCES = (
    program(
        "computes a moving maximum over a sliding window",
        """A deque stores the positions of values that can still become the maximum, largest first. Smaller values are
        removed from the end, and positions outside the window from the front.""",
        "O(n), because every position enters and leaves the deque at most once",
        """
assert sliding_maximum([1, 3, 2, 5, 4, 0], 3) == [3, 5, 5, 5]
assert sliding_maximum([4, 2], 1) == [4, 2]
assert sliding_maximum([], 2) == []
""",
        '''
from collections import deque


def sliding_maximum(values: list[int], size: int) -> list[int]:
    """Return the maximum of every window with the given size."""
    window: deque[int] = deque()
    result = []
    for i, value in enumerate(values):
        # Smaller values before this one can never be the maximum.
        while window and values[window[-1]] <= value:
            window.pop()
        window.append(i)
        # Drop a position that has left the window.
        if window[0] <= i - size:
            window.popleft()
        if i >= size - 1:
            result.append(values[window[0]])
    return result
''',
        (
            '''
def sliding_maximum(values: list[int], size: int) -> list[int]:
    """Return the maximum of every window, with a simple comprehension."""
    if size < 1:
        raise ValueError("size must be at least 1")
    # Take the maximum of each slice.
    return [max(values[i : i + size]) for i in range(len(values) - size + 1)]
''',
            "For each start position a slice of the given size is taken. The maximum of each slice is collected.",
        ),
        javascript="""
function slidingMaximum(values, size) {
  const result = [];
  for (let i = 0; i + size <= values.length; i++) {
    result.push(Math.max(...values.slice(i, i + size)));
  }
  return result;
}
""",
    ),
    program(
        "computes the maximum sum of a contiguous subarray",
        """This is Kadane's algorithm. The current sum either grows by the next number or starts again with it,
        whichever is larger. The best current sum is the result.""",
        "O(n), because the list is read once",
        """
assert max_subarray([-2, 1, -3, 4, -1, 2, 1, -5, 4]) == 6
assert max_subarray([5]) == 5
assert max_subarray([-3, -1]) == -1
""",
        '''
def max_subarray(numbers: list[int]) -> int:
    """Return the largest sum of neighbouring numbers."""
    if not numbers:
        raise ValueError("the list must not be empty")
    best = current = numbers[0]
    for number in numbers[1:]:
        # Extend the current part or start a new one here.
        current = max(number, current + number)
        # Remember the best sum so far.
        best = max(best, current)
    return best
''',
        javascript="""
function maxSubarray(numbers) {
  let best = numbers[0];
  let current = numbers[0];
  for (const number of numbers.slice(1)) {
    current = Math.max(number, current + number);
    best = Math.max(best, current);
  }
  return best;
}
""",
    ),
    program(
        "computes the power set of a set",
        """It starts with the empty set. For every element, all subsets found so far are added once more with this
        element.""",
        "O(n * 2^n), because a set of n elements has 2^n subsets",
        """
assert sorted(power_set([1, 2])) == [[], [1], [1, 2], [2]]
assert len(power_set([1, 2, 3, 4])) == 16
assert power_set([]) == [[]]
""",
        '''
from typing import Any


def power_set(items: list[Any]) -> list[list[Any]]:
    """Return all subsets of the items."""
    subsets: list[list[Any]] = [[]]
    for item in items:
        # Every subset occurs without and with the new item.
        subsets += [subset + [item] for subset in subsets]
    return subsets
''',
        (
            '''
def power_set(items: list) -> list[list]:
    """Return all subsets of the items, using recursion."""
    # The empty set has only itself as a subset.
    if not items:
        return [[]]
    # Take the subsets of the rest, without and with the first item.
    rest = power_set(items[1:])
    return rest + [[items[0]] + subset for subset in rest]
''',
            """The empty set has one subset. Otherwise the function finds all subsets of the rest and returns them
            without and with the first element.""",
        ),
        javascript="""
function powerSet(items) {
  return items.reduce((subsets, item) => [...subsets, ...subsets.map((subset) => [...subset, item])], [[]]);
}
""",
    ),
    program(
        "deep-merges two nested dictionaries",
        """It starts with a copy of the first dictionary. If a key has a dictionary on both sides, these are merged by
        a recursive call. Otherwise the value of the second dictionary wins.""",
        "O(n), where n is the number of keys in both dictionaries, including nested ones",
        """
assert deep_merge({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}) == {"a": {"x": 1, "y": 2}, "b": 3}
assert deep_merge({"a": 1}, {"a": 2}) == {"a": 2}
assert deep_merge({}, {}) == {}
""",
        '''
def deep_merge(first: dict, second: dict) -> dict:
    """Merge two nested dictionaries; the second one wins."""
    # Do not change the arguments.
    result = dict(first)
    for key, value in second.items():
        # Merge dictionaries, replace everything else.
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = deep_merge(result[key], value)
        else:
            result[key] = value
    return result
''',
        javascript="""
function deepMerge(first, second) {
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  const result = { ...first };
  for (const [key, value] of Object.entries(second)) {
    result[key] = isObject(value) && isObject(result[key]) ? deepMerge(result[key], value) : value;
  }
  return result;
}
""",
    ),
    program(
        "finds pairs in a list that add up to a target",
        """It remembers all numbers seen so far in a set. For each number it checks whether the missing part has
        already been seen.""",
        "O(n), because looking up a number in a set takes constant time",
        """
assert pairs_with_sum([1, 5, 3, 7, 9], 10) == [(3, 7), (1, 9)]
assert pairs_with_sum([2, 4], 5) == []
assert pairs_with_sum([], 5) == []
""",
        '''
def pairs_with_sum(numbers: list[int], target: int) -> list[tuple[int, int]]:
    """Return the pairs of numbers whose sum is the target."""
    seen = set()
    pairs = []
    for number in numbers:
        # Check whether the other part came earlier.
        other = target - number
        if other in seen:
            pairs.append((other, number))
        seen.add(number)
    return pairs
''',
        javascript="""
function pairsWithSum(numbers, target) {
  const seen = new Set();
  const pairs = [];
  for (const number of numbers) {
    if (seen.has(target - number)) {
      pairs.push([target - number, number]);
    }
    seen.add(number);
  }
  return pairs;
}
""",
    ),
    program(
        "finds the differences between two dictionaries",
        """It goes through all keys of both dictionaries. If the two values differ, the key is stored with the old and
        the new value. A missing key counts as None.""",
        "O(n), where n is the number of keys",
        """
assert dict_diff({"a": 1, "b": 2}, {"a": 1, "b": 3}) == {"b": (2, 3)}
assert dict_diff({"x": 1}, {}) == {"x": (1, None)}
assert dict_diff({}, {}) == {}
""",
        '''
def dict_diff(old: dict, new: dict) -> dict:
    """Return the keys whose values differ, with both values."""
    changes = {}
    # Look at the keys of both dictionaries.
    for key in old.keys() | new.keys():
        # Keep the key if its value has changed.
        if old.get(key) != new.get(key):
            changes[key] = (old.get(key), new.get(key))
    return changes
''',
        javascript="""
function dictDiff(oldValues, newValues) {
  const changes = {};
  for (const key of Object.keys({ ...oldValues, ...newValues })) {
    if (oldValues[key] !== newValues[key]) {
      changes[key] = [oldValues[key] ?? null, newValues[key] ?? null];
    }
  }
  return changes;
}
""",
    ),
    program(
        "finds the intersection of two lists",
        """The second list is turned into a set, so that looking up an item is fast. Then all items of the first list
        that are in the set are kept.""",
        "O(n + m), where n and m are the lengths of the lists",
        """
assert list_intersection([1, 2, 3, 4], [3, 4, 5]) == [3, 4]
assert list_intersection(["a"], ["b"]) == []
assert list_intersection([], [1]) == []
""",
        '''
def list_intersection(first: list, second: list) -> list:
    """Return the items of the first list that are also in the second."""
    # A set makes the lookup fast.
    allowed = set(second)
    # Keep the order of the first list.
    return [item for item in first if item in allowed]
''',
        javascript="""
function listIntersection(first, second) {
  const allowed = new Set(second);
  return first.filter((item) => allowed.has(item));
}
""",
    ),
    program(
        "finds the longest increasing subsequence",
        """For every position it stores the longest increasing subsequence that ends there. This is the best one that
        ends at a smaller earlier number, followed by the number itself.""",
        "O(n^2), because each number is compared with all numbers before it",
        """
assert longest_increasing([10, 9, 2, 5, 3, 7, 101]) == [2, 5, 7, 101]
assert longest_increasing([3, 2, 1]) == [3]
assert longest_increasing([]) == []
""",
        '''
def longest_increasing(numbers: list[int]) -> list[int]:
    """Return a longest increasing subsequence of the numbers."""
    # best[i] is the longest one that ends at position i.
    best: list[list[int]] = []
    for i, number in enumerate(numbers):
        # Extend the longest earlier one that ends with a smaller number.
        candidates = [best[j] for j in range(i) if numbers[j] < number]
        best.append(max(candidates, key=len, default=[]) + [number])
    return max(best, key=len, default=[])
''',
        javascript="""
function longestIncreasing(numbers) {
  const best = [];
  let longest = [];
  numbers.forEach((number, i) => {
    let before = [];
    for (let j = 0; j < i; j++) {
      if (numbers[j] < number && best[j].length > before.length) {
        before = best[j];
      }
    }
    best.push([...before, number]);
    if (best[i].length > longest.length) {
      longest = best[i];
    }
  });
  return longest;
}
""",
    ),
    program(
        "finds the majority element of a list",
        """This is the voting algorithm of Boyer and Moore. An equal item adds a vote for the candidate and a
        different one takes a vote away. At the end the candidate is counted to be sure.""",
        "O(n), because the list is read twice",
        """
assert majority([3, 1, 3, 3, 2]) == 3
assert majority([1, 2, 3]) is None
assert majority([]) is None
""",
        '''
from typing import Any


def majority(items: list[Any]) -> Any:
    """Return the item that fills more than half of the list, or None."""
    candidate, votes = None, 0
    for item in items:
        # Without votes the current item becomes the candidate.
        if votes == 0:
            candidate = item
        votes += 1 if item == candidate else -1
    # Check that the candidate really has the majority.
    return candidate if items.count(candidate) > len(items) / 2 else None
''',
        (
            '''
from collections import Counter
from typing import Any


def majority(items: list[Any]) -> Any:
    """Return the item that fills more than half of the list, by counting."""
    if not items:
        return None
    # Find the most common item.
    item, count = Counter(items).most_common(1)[0]
    return item if count > len(items) / 2 else None
''',
            "A Counter counts the items. The most common item is returned if it fills more than half of the list.",
        ),
        javascript="""
function majority(items) {
  const counts = new Map();
  for (const item of items) {
    counts.set(item, (counts.get(item) ?? 0) + 1);
    if (counts.get(item) > items.length / 2) {
      return item;
    }
  }
  return null;
}
""",
    ),
    program(
        "finds the median of a list without sorting it fully",
        """Quickselect picks a pivot and splits the numbers into smaller, equal and larger ones. Only the part that
        contains the wanted position is searched further.""",
        "O(n) on average, because the searched part shrinks quickly",
        """
assert find_median([7, 1, 5]) == 5
assert find_median([4, 1, 3, 2]) == 2.5
assert find_median([9]) == 9
""",
        '''
import random


def select(numbers: list[float], k: int) -> float:
    """Return the k-th smallest number, counted from zero."""
    pivot = random.choice(numbers)
    # Split the numbers around the pivot.
    smaller = [x for x in numbers if x < pivot]
    equal = numbers.count(pivot)
    # Search only the part that contains position k.
    if k < len(smaller):
        return select(smaller, k)
    if k < len(smaller) + equal:
        return pivot
    return select([x for x in numbers if x > pivot], k - len(smaller) - equal)


def find_median(numbers: list[float]) -> float:
    """Return the median without sorting the whole list."""
    if not numbers:
        raise ValueError("the list must not be empty")
    middle = len(numbers) // 2
    if len(numbers) % 2:
        return select(numbers, middle)
    # With an even length, take the mean of the two middle numbers.
    return (select(numbers, middle - 1) + select(numbers, middle)) / 2
''',
        (
            '''
import heapq


def find_median(numbers: list[float]) -> float:
    """Return the median with a heap of the smaller half."""
    if not numbers:
        raise ValueError("the list must not be empty")
    # Only the smaller half of the numbers is put in order.
    half = heapq.nsmallest(len(numbers) // 2 + 1, numbers)
    if len(numbers) % 2:
        return half[-1]
    return (half[-2] + half[-1]) / 2
''',
            """`heapq.nsmallest` puts only the smaller half of the numbers in order. The last of them is the median,
            or the mean of the last two if the length is even.""",
        ),
    ),
    program(
        "finds the missing number in a range",
        """The sum of the numbers from 0 to n is n * (n + 1) / 2. The difference between this sum and the sum of the
        list is the missing number.""",
        "O(n), because the numbers are added once",
        """
assert missing_number([0, 1, 3, 4]) == 2
assert missing_number([1, 2, 3]) == 0
assert missing_number([0]) == 1
""",
        '''
def missing_number(numbers: list[int]) -> int:
    """Return the number from 0 to len(numbers) that is missing."""
    n = len(numbers)
    # The sum if no number were missing.
    expected = n * (n + 1) // 2
    return expected - sum(numbers)
''',
        (
            '''
def missing_number(numbers: list[int]) -> int:
    """Return the missing number with a set."""
    present = set(numbers)
    # Find the first number that does not occur.
    return next(i for i in range(len(numbers) + 1) if i not in present)
''',
            "The numbers are put into a set. The first number of the range that is not in the set is missing.",
        ),
        javascript="""
function missingNumber(numbers) {
  const n = numbers.length;
  const expected = (n * (n + 1)) / 2;
  return expected - numbers.reduce((sum, number) => sum + number, 0);
}
""",
    ),
    program(
        "finds the second largest value in a list",
        """A set removes equal values. If fewer than two values are left, there is no second largest one. Otherwise it
        is the second value in descending order.""",
        "O(n log n), because the distinct values are sorted",
        """
assert second_largest([4, 9, 2, 9, 7]) == 7
assert second_largest([1, 2]) == 1
""",
        '''
def second_largest(values: list[float]) -> float:
    """Return the second largest different value."""
    # Remove duplicates.
    distinct = set(values)
    if len(distinct) < 2:
        raise ValueError("at least two different values are needed")
    # Sort in descending order and take the second.
    return sorted(distinct, reverse=True)[1]
''',
        (
            '''
def second_largest(values: list[float]) -> float | None:
    """Return the second largest value with one pass, or None."""
    first = second = None
    for value in values:
        # A new largest value moves the old one to second place.
        if first is None or value > first:
            first, second = value, first
        # Otherwise it may be the new second.
        elif value != first and (second is None or value > second):
            second = value
    return second
''',
            """The two largest values are kept during one pass. A new largest value moves the old one to second place,
            and other values can only replace the second.""",
        ),
        javascript="""
function secondLargest(values) {
  const distinct = [...new Set(values)].sort((a, b) => b - a);
  return distinct.length > 1 ? distinct[1] : null;
}
""",
    ),
    program(
        "flattens an arbitrarily nested list",
        """It goes through the items. If an item is a list, it is flattened by a recursive call, and its items are
        added. Every other item is added directly.""",
        "O(n), where n is the number of items on all levels",
        """
assert list(flatten([1, [2, [3, 4]], 5])) == [1, 2, 3, 4, 5]
assert list(flatten([[], [[]]])) == []
assert list(flatten([])) == []
""",
        '''
def flatten(items: list) -> list:
    """Return all items of a nested list in one flat list."""
    result = []
    for item in items:
        # A list is flattened first.
        if isinstance(item, list):
            result.extend(flatten(item))
        # Other items are added directly.
        else:
            result.append(item)
    return result
''',
        (
            '''
from collections.abc import Iterator


def flatten(items: list) -> Iterator:
    """Yield all items of a nested list, one at a time."""
    for item in items:
        # Go down into nested lists.
        if isinstance(item, list):
            yield from flatten(item)
        else:
            yield item
''',
            "The generator yields every item that is not a list. For a nested list it yields from a recursive call.",
        ),
        (
            '''
def flatten(items: list) -> list:
    """Return all items of a nested list, using a stack."""
    stack = list(reversed(items))
    result = []
    while stack:
        item = stack.pop()
        # Put the items of a nested list back on the stack.
        if isinstance(item, list):
            stack.extend(reversed(item))
        else:
            result.append(item)
    return result
''',
            """The stack holds the items that still have to be looked at. A nested list is replaced by its items, and
            other items go to the result.""",
        ),
        javascript="""
function flatten(items) {
  return items.reduce((result, item) => result.concat(Array.isArray(item) ? flatten(item) : [item]), []);
}
""",
    ),
    program(
        "implements binary search on a sorted list",
        """It keeps the part of the list that can still contain the value. In each step it compares the value with the
        middle item and continues with one half.""",
        "O(log n), because the searched part is halved in each step",
        """
assert binary_search([1, 3, 5, 7, 9], 7) == 3
assert binary_search([1, 3, 5], 4) == -1
assert binary_search([], 1) == -1
""",
        '''
def binary_search(items: list[int], target: int) -> int:
    """Return the position of target in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        # Look at the middle item.
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        # Continue with the right or the left half.
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
''',
        (
            '''
def binary_search(items: list[int], target: int, start: int = 0) -> int:
    """Return the position of target in a sorted list, using recursion."""
    # An empty list does not contain the target.
    if not items:
        return -1
    middle = len(items) // 2
    if items[middle] == target:
        return start + middle
    # Search only the half that can contain the target.
    if items[middle] > target:
        return binary_search(items[:middle], target, start)
    return binary_search(items[middle + 1 :], target, start + middle + 1)
''',
            """An empty list does not contain the value. Otherwise the middle item decides which half is searched by
            the next call.""",
        ),
        javascript="""
function binarySearch(items, target) {
  let low = 0;
  let high = items.length - 1;
  while (low <= high) {
    const middle = Math.floor((low + high) / 2);
    if (items[middle] === target) {
      return middle;
    }
    if (items[middle] < target) {
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
  return -1;
}
""",
    ),
    program(
        "inverts a dictionary whose values may repeat",
        """Each value of the old dictionary becomes a key. Because several keys may have the same value, the new
        values are lists of the old keys.""",
        "O(n), where n is the number of entries",
        """
assert invert({"a": 1, "b": 2, "c": 1}) == {1: ["a", "c"], 2: ["b"]}
assert invert({}) == {}
""",
        '''
def invert(mapping: dict) -> dict:
    """Map each value to the list of its keys."""
    result: dict = {}
    for key, value in mapping.items():
        # Collect all keys with the same value.
        result.setdefault(value, []).append(key)
    return result
''',
        javascript="""
function invert(mapping) {
  const result = {};
  for (const [key, value] of Object.entries(mapping)) {
    (result[value] ??= []).push(key);
  }
  return result;
}
""",
    ),
    program(
        "merges overlapping intervals",
        """The intervals are sorted by their start. An interval that starts before the last one ends extends it.
        Otherwise it begins a new interval in the result.""",
        "O(n log n), because of the sorting",
        """
assert merge_intervals([[1, 3], [2, 6], [8, 10]]) == [[1, 6], [8, 10]]
assert merge_intervals([[5, 7], [1, 5]]) == [[1, 7]]
assert merge_intervals([]) == []
""",
        '''
def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """Merge all intervals that overlap or touch."""
    merged: list[list[int]] = []
    # Sort by the start of the intervals.
    for start, end in sorted(intervals):
        # Extend the last interval if they overlap.
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
''',
        javascript="""
function mergeIntervals(intervals) {
  const merged = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = merged[merged.length - 1];
    if (last && start <= last[1]) {
      last[1] = Math.max(last[1], end);
    } else {
      merged.push([start, end]);
    }
  }
  return merged;
}
""",
    ),
    program(
        "merges two sorted lists into one sorted list",
        """Two positions point to the next item of each list. The smaller item is added to the result in each step.
        When one list is used up, the rest of the other is added.""",
        "O(n + m), where n and m are the lengths of the lists",
        """
assert merge_sorted([1, 4, 6], [2, 3, 7]) == [1, 2, 3, 4, 6, 7]
assert merge_sorted([], [5]) == [5]
assert merge_sorted([], []) == []
""",
        '''
def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        # Take the smaller of the two next items.
        if first[i] <= second[j]:
            result.append(first[i])
            i += 1
        else:
            result.append(second[j])
            j += 1
    # One of the lists may have items left.
    return result + first[i:] + second[j:]
''',
        (
            '''
def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    """Merge two sorted lists, using recursion."""
    # If one list is empty, the other is the result.
    if not first or not second:
        return first + second
    # Take the smaller first item and merge the rest.
    if first[0] <= second[0]:
        return [first[0]] + merge_sorted(first[1:], second)
    return [second[0]] + merge_sorted(first, second[1:])
''',
            """If one list is empty, the other one is returned. Otherwise the smaller first item comes first, followed
            by the merged rest.""",
        ),
        javascript="""
function mergeSorted(first, second) {
  const result = [];
  let i = 0;
  let j = 0;
  while (i < first.length && j < second.length) {
    result.push(first[i] <= second[j] ? first[i++] : second[j++]);
  }
  return [...result, ...first.slice(i), ...second.slice(j)];
}
""",
    ),
    program(
        "removes duplicates from a list while keeping order",
        """A dictionary keeps its keys in the order of insertion, and each key occurs only once. So `dict.fromkeys`
        removes the duplicates and keeps the order.""",
        "O(n), where n is the length of the list",
        """
assert unique_in_order([3, 1, 3, 2, 1]) == [3, 1, 2]
assert unique_in_order(["b", "a", "b"]) == ["b", "a"]
assert unique_in_order([]) == []
""",
        '''
def unique_in_order(items: list) -> list:
    """Return the items without duplicates, in their first order."""
    # The keys of a dictionary are unique and ordered.
    return list(dict.fromkeys(items))
''',
        (
            '''
def unique_in_order(items: list) -> list:
    """Return the items without duplicates, with a set."""
    seen = set()
    result = []
    for item in items:
        # Keep an item only the first time.
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result
''',
            "The set remembers which items have been seen. An item is added to the result only the first time.",
        ),
        javascript="""
function uniqueInOrder(items) {
  return [...new Set(items)];
}
""",
    ),
    program(
        "returns the k most frequent elements of a list",
        "A Counter counts how often each element occurs. `most_common` returns the k elements with the highest counts.",
        "O(n log k), where n is the length of the list",
        """
assert most_frequent([1, 1, 1, 2, 2, 3], 2) == [1, 2]
assert most_frequent(["x", "y", "x"], 1) == ["x"]
assert most_frequent([], 3) == []
""",
        '''
from collections import Counter


def most_frequent(items: list, k: int) -> list:
    """Return the k items that occur most often."""
    # Count the items.
    counts = Counter(items)
    # Keep the items and drop their counts.
    return [item for item, _ in counts.most_common(k)]
''',
        javascript="""
function mostFrequent(items, k) {
  const counts = new Map();
  for (const item of items) {
    counts.set(item, (counts.get(item) ?? 0) + 1);
  }
  return [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, k);
}
""",
    ),
    program(
        "rotates a list by k positions",
        """The remainder of k and the length handles rotations that are longer than the list. Then the last k items
        are put in front of the others.""",
        "O(n), where n is the length of the list",
        """
assert rotate([1, 2, 3, 4, 5], 2) == [4, 5, 1, 2, 3]
assert rotate([1, 2, 3], 4) == [3, 1, 2]
assert rotate([], 3) == []
""",
        '''
def rotate(items: list, k: int) -> list:
    """Return the list rotated to the right by k positions."""
    if not items:
        return []
    # A full rotation changes nothing.
    k %= len(items)
    # Put the last k items in front.
    return items[len(items) - k :] + items[: len(items) - k]
''',
        (
            '''
from collections import deque


def rotate(items: list, k: int) -> list:
    """Return the list rotated to the right by k positions, with a deque."""
    rotated = deque(items)
    # A deque can rotate itself.
    rotated.rotate(k)
    return list(rotated)
''',
            "The items are copied into a deque. Its method `rotate` moves them, and the result is turned into a list.",
        ),
        javascript="""
function rotate(items, k) {
  const shift = items.length === 0 ? 0 : k % items.length;
  return [...items.slice(items.length - shift), ...items.slice(0, items.length - shift)];
}
""",
    ),
    program(
        "sorts a list of dictionaries by a given key",
        "`sorted` returns a new list. The key function tells it which entry of each dictionary decides the order.",
        "O(n log n), where n is the number of dictionaries",
        """
assert sort_by_key([{"n": 3}, {"n": 1}, {"n": 2}], "n") == [{"n": 1}, {"n": 2}, {"n": 3}]
assert sort_by_key([], "n") == []
""",
        '''
def sort_by_key(records: list[dict], key: str) -> list[dict]:
    """Return the dictionaries sorted by the value of the key."""
    # Compare the records by this one value.
    return sorted(records, key=lambda record: record[key])
''',
        (
            '''
from operator import itemgetter


def sort_by_key(records: list[dict], key: str) -> list[dict]:
    """Return the dictionaries sorted by the value of the key."""
    # itemgetter reads the value of the key.
    return sorted(records, key=itemgetter(key))
''',
            "`itemgetter` builds a function that reads the key. `sorted` uses it to compare the dictionaries.",
        ),
        javascript="""
function sortByKey(records, key) {
  return [...records].sort((a, b) => (a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0));
}
""",
    ),
    program(
        "splits a list into chunks of size n",
        """The start positions are 0, n, 2n and so on. For each start a slice of n items is taken, and the last one
        may be shorter.""",
        "O(n), where n is the length of the list",
        """
assert list(chunks([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
assert list(chunks(["a", "b"], 3)) == [["a", "b"]]
assert list(chunks([], 2)) == []
""",
        '''
def chunks(items: list, size: int) -> list[list]:
    """Split a list into parts with at most size items."""
    if size < 1:
        raise ValueError("size must be at least 1")
    # Take a slice at every start position.
    return [items[i : i + size] for i in range(0, len(items), size)]
''',
        (
            '''
from collections.abc import Iterator


def chunks(items: list, size: int) -> Iterator[list]:
    """Yield parts of a list with at most size items."""
    # Step through the list and yield one slice at a time.
    for start in range(0, len(items), size):
        yield items[start : start + size]
''',
            "The loop steps through the list. At each position the generator yields the next slice.",
        ),
        (
            '''
def chunks(items: list, size: int) -> list[list]:
    """Split a list into parts, using recursion."""
    # Nothing is left to split.
    if not items:
        return []
    # Take the first part and split the rest.
    return [items[:size]] + chunks(items[size:], size)
''',
            "An empty list has no chunks. Otherwise the first chunk is followed by the chunks of the rest.",
        ),
        javascript="""
function chunks(items, size) {
  const result = [];
  for (let i = 0; i < items.length; i += size) {
    result.push(items.slice(i, i + size));
  }
  return result;
}
""",
    ),
    program(
        "transforms a list of tuples into a dictionary of lists",
        """Each tuple has a key and a value. The value is added to the list of its key, and a new list is created for
        a new key.""",
        "O(n), where n is the number of tuples",
        """
assert group_pairs([("a", 1), ("b", 2), ("a", 3)]) == {"a": [1, 3], "b": [2]}
assert group_pairs([]) == {}
""",
        '''
from collections import defaultdict


def group_pairs(pairs: list[tuple]) -> dict:
    """Collect the values of each key in a list."""
    groups = defaultdict(list)
    for key, value in pairs:
        # Add the value to the list of its key.
        groups[key].append(value)
    return dict(groups)
''',
        javascript="""
function groupPairs(pairs) {
  const groups = {};
  for (const [key, value] of pairs) {
    (groups[key] ??= []).push(value);
  }
  return groups;
}
""",
    ),
    program(
        "zips lists of different lengths with a fill value",
        "`zip_longest` pairs the items by position. Where the shorter list has ended, it uses the fill value.",
        "O(n), where n is the length of the longest list",
        """
assert zip_filled([1, 2, 3], ["a"], "-") == [(1, "a"), (2, "-"), (3, "-")]
assert zip_filled([], [], 0) == []
""",
        '''
from itertools import zip_longest
from typing import Any


def zip_filled(first: list, second: list, fill: Any) -> list[tuple]:
    """Pair the items of two lists, filling up the shorter one."""
    # zip_longest goes on until both lists have ended.
    return list(zip_longest(first, second, fillvalue=fill))
''',
        (
            '''
from typing import Any


def zip_filled(first: list, second: list, fill: Any) -> list[tuple]:
    """Pair the items of two lists, by filling up both to the same length."""
    length = max(len(first), len(second))
    # Fill up both lists.
    first = first + [fill] * (length - len(first))
    second = second + [fill] * (length - len(second))
    return list(zip(first, second))
''',
            """The shorter list is filled up with the fill value. Then both lists have the same length and can be
            zipped.""",
        ),
        javascript="""
function zipFilled(first, second, fill) {
  const length = Math.max(first.length, second.length);
  return Array.from({ length }, (_, i) => [
    i < first.length ? first[i] : fill,
    i < second.length ? second[i] : fill,
  ]);
}
""",
    ),
)
