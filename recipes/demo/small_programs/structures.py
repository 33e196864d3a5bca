"""Programs on linked lists, trees, graphs, files and other functions."""

from .program import program

STRUCTURES = (
    program(
        "computes the depth of a binary tree",
        "An empty tree has depth zero. Otherwise the depth is one more than the depth of the deeper subtree.",
        "O(n), because every node is visited once",
        """
assert tree_depth(None) == 0
assert tree_depth(Node(1)) == 1
assert tree_depth(Node(1, Node(2, Node(4)), Node(3))) == 3
""",
        '''
class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def tree_depth(root: Node | None) -> int:
    """Return the number of levels of a binary tree."""
    # An empty tree has no levels.
    if root is None:
        return 0
    # Add one level to the deeper subtree.
    return 1 + max(tree_depth(root.left), tree_depth(root.right))
''',
        (
            '''
class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def tree_depth(root: Node | None) -> int:
    """Return the number of levels of a binary tree, with a loop."""
    level = [root] if root else []
    depth = 0
    while level:
        depth += 1
        # Collect the nodes of the next level.
        level = [child for node in level for child in (node.left, node.right) if child]
    return depth
''',
            "The list `level` holds the nodes of one level. The loop counts how many levels have at least one node.",
        ),
        javascript="""
function treeDepth(root) {
  if (!root) {
    return 0;
  }
  return 1 + Math.max(treeDepth(root.left), treeDepth(root.right));
}
""",
    ),
    program(
        "inserts a value into a binary search tree",
        """If the tree is empty, the value becomes a new node. A smaller value goes into the left subtree and a larger
        one into the right subtree.""",
        "O(h), where h is the height of the tree",
        """
root = None
for value in [5, 2, 8, 1]:
    root = insert(root, value)
assert root.value == 5
assert root.left.value == 2
assert root.right.value == 8
assert root.left.left.value == 1
""",
        '''
class Node:
    def __init__(self, value):
        self.value = value
        self.left = None
        self.right = None


def insert(root: Node | None, value: int) -> Node:
    """Insert the value and return the root of the tree."""
    # An empty place is filled with a new node.
    if root is None:
        return Node(value)
    # Smaller values go to the left, larger ones to the right.
    if value < root.value:
        root.left = insert(root.left, value)
    elif value > root.value:
        root.right = insert(root.right, value)
    return root
''',
        (
            '''
class Node:
    def __init__(self, value):
        self.value = value
        self.left = None
        self.right = None


def insert(root: Node | None, value: int) -> Node:
    """Insert the value with a loop and return the root of the tree."""
    if root is None:
        return Node(value)
    node = root
    while value != node.value:
        # Choose the side on which the value belongs.
        side = "left" if value < node.value else "right"
        if getattr(node, side) is None:
            setattr(node, side, Node(value))
        node = getattr(node, side)
    return root
''',
            """The loop walks down from the root, to the left for smaller values and to the right for larger ones. An
            empty place gets the new node.""",
        ),
        javascript="""
function insert(root, value) {
  if (!root) {
    return { value, left: null, right: null };
  }
  if (value < root.value) {
    root.left = insert(root.left, value);
  } else if (value > root.value) {
    root.right = insert(root.right, value);
  }
  return root;
}
""",
    ),
    program(
        "serialises a binary tree to a string",
        """The tree is written in preorder: first the value, then the left and the right subtree. An empty place is
        written as a hash sign, so that the tree can be rebuilt.""",
        "O(n * h), where n is the number of nodes and h is the height, because each level copies the text",
        """
assert serialise(None) == "#"
assert serialise(Node(1, Node(2), Node(3))) == "1 2 # # 3 # #"
""",
        '''
class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def serialise(root: Node | None) -> str:
    """Write a binary tree as a string in preorder."""
    # Mark an empty place.
    if root is None:
        return "#"
    # Write the value and then both subtrees.
    return f"{root.value} {serialise(root.left)} {serialise(root.right)}"
''',
        (
            '''
class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def serialise(root: Node | None) -> str:
    """Write a binary tree as a string in preorder, with a stack."""
    parts = []
    stack = [root]
    while stack:
        node = stack.pop()
        if node is None:
            parts.append("#")
        else:
            parts.append(str(node.value))
            # The left subtree must come out of the stack first.
            stack += [node.right, node.left]
    return " ".join(parts)
''',
            """The stack holds the nodes that still have to be written. The right child is pushed before the left one,
            so the left subtree is written first.""",
        ),
        javascript="""
function serialise(root) {
  if (!root) {
    return "#";
  }
  return `${root.value} ${serialise(root.left)} ${serialise(root.right)}`;
}
""",
    ),
    program(
        "traverses a binary tree level by level",
        """A queue starts with the root. Each node is taken from the front, its value is stored, and its children are
        added at the end.""",
        "O(n), because every node is visited once",
        """
tree = Node(1, Node(2, Node(4)), Node(3))
assert list(level_order(tree)) == [1, 2, 3, 4]
assert list(level_order(None)) == []
""",
        '''
from collections import deque


class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def level_order(root: Node | None) -> list:
    """Return the values of the tree level by level."""
    values = []
    queue = deque([root] if root else [])
    while queue:
        # Take the next node and store its value.
        node = queue.popleft()
        values.append(node.value)
        # Its children come later.
        queue.extend(child for child in (node.left, node.right) if child)
    return values
''',
        (
            '''
from collections.abc import Iterator


class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def level_order(root: Node | None) -> Iterator:
    """Yield the values of the tree level by level."""
    level = [root] if root else []
    while level:
        # Yield the values of this level.
        yield from (node.value for node in level)
        # Collect the children for the next one.
        level = [child for node in level for child in (node.left, node.right) if child]
''',
            """The list `level` holds all nodes of one level. Their values are yielded, and their children are the
            next level.""",
        ),
        javascript="""
function levelOrder(root) {
  const values = [];
  const queue = root ? [root] : [];
  while (queue.length > 0) {
    const node = queue.shift();
    values.push(node.value);
    queue.push(...[node.left, node.right].filter(Boolean));
  }
  return values;
}
""",
    ),
    program(
        "detects a loop in a linked list",
        """A slow pointer moves by one node and a fast pointer by two. If the list has a loop, the fast pointer
        catches up with the slow one. Otherwise it reaches the end.""",
        "O(n), with O(1) extra memory",
        """
last = Node(3)
head = Node(1, Node(2, last))
assert not has_loop(head)
last.next = head
assert has_loop(head)
assert not has_loop(None)
""",
        '''
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next


def has_loop(head: Node | None) -> bool:
    """Check whether a linked list runs in a circle."""
    slow = fast = head
    while fast and fast.next:
        # One pointer moves twice as fast as the other.
        slow = slow.next
        fast = fast.next.next
        # They can only meet in a loop.
        if slow is fast:
            return True
    return False
''',
        javascript="""
function hasLoop(head) {
  let slow = head;
  let fast = head;
  while (fast && fast.next) {
    slow = slow.next;
    fast = fast.next.next;
    if (slow === fast) {
      return true;
    }
  }
  return false;
}
""",
    ),
    program(
        "finds the middle node of a linked list",
        """Two pointers start at the head. One moves by one node and the other by two. When the fast one reaches the
        end, the slow one is in the middle.""",
        "O(n), because the list is walked through once",
        """
head = Node(1, Node(2, Node(3)))
assert middle_node(head).value == 2
assert middle_node(Node(7)).value == 7
assert middle_node(None) is None
""",
        '''
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next


def middle_node(head: Node | None) -> Node | None:
    """Return the middle node of a linked list."""
    slow = fast = head
    # The fast pointer makes two steps at a time.
    while fast and fast.next:
        slow = slow.next
        fast = fast.next.next
    return slow
''',
        javascript="""
function middleNode(head) {
  let slow = head;
  let fast = head;
  while (fast && fast.next) {
    slow = slow.next;
    fast = fast.next.next;
  }
  return slow;
}
""",
    ),
    program(
        "reverses a singly linked list",
        """It walks through the list and turns each link around. The variable `previous` always points to the part
        that is already reversed, and at the end it is the new head.""",
        "O(n), because every node is visited once",
        """
head = reverse_list(Node(1, Node(2, Node(3))))
assert head.value == 3
assert head.next.value == 2
assert head.next.next.value == 1
assert reverse_list(None) is None
""",
        '''
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next


def reverse_list(head: Node | None) -> Node | None:
    """Reverse a linked list and return the new head."""
    previous = None
    while head:
        # Turn the link around and move on.
        following = head.next
        head.next = previous
        previous, head = head, following
    return previous
''',
        (
            '''
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next


def reverse_list(head: Node | None) -> Node | None:
    """Reverse a linked list, using recursion."""
    # An empty list or a single node stays the same.
    if head is None or head.next is None:
        return head
    # Reverse the rest, then put the head at its end.
    new_head = reverse_list(head.next)
    head.next.next = head
    head.next = None
    return new_head
''',
            """A list with at most one node is already reversed. Otherwise the rest is reversed first, and the old
            head is attached at its end.""",
        ),
        javascript="""
function reverseList(head) {
  let previous = null;
  while (head) {
    const following = head.next;
    head.next = previous;
    previous = head;
    head = following;
  }
  return previous;
}
""",
    ),
    program(
        "counts the islands in a grid of zeros and ones",
        """It looks for a one that has not been visited. From there it visits all connected ones, so that they are not
        counted again. The number of such starts is the number of islands.""",
        "O(m * n) for a grid with m rows and n columns",
        """
assert count_islands([[1, 1, 0], [0, 0, 0], [0, 1, 1]]) == 2
assert count_islands([[0, 0]]) == 0
assert count_islands([]) == 0
""",
        '''
def count_islands(grid: list[list[int]]) -> int:
    """Count the connected groups of ones in a grid."""
    # Collect the positions of all ones.
    land = {(r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell}
    count = 0
    while land:
        # Start a new island and remove all of its cells.
        count += 1
        stack = [land.pop()]
        while stack:
            r, c = stack.pop()
            neighbours = {(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)} & land
            land -= neighbours
            stack.extend(neighbours)
    return count
''',
        javascript="""
function countIslands(grid) {
  const cells = grid.map((row) => [...row]);
  const sink = (r, c) => {
    if (cells[r]?.[c]) {
      cells[r][c] = 0;
      sink(r - 1, c);
      sink(r + 1, c);
      sink(r, c - 1);
      sink(r, c + 1);
    }
  };
  let count = 0;
  cells.forEach((row, r) =>
    row.forEach((_, c) => {
      if (cells[r][c]) {
        count++;
        sink(r, c);
      }
    })
  );
  return count;
}
""",
    ),
    program(
        "detects a cycle in a directed graph",
        """It makes a depth-first search. The set `path` contains the nodes on the current path, and an edge back to
        one of them closes a cycle. Finished nodes are not searched again.""",
        "O(V + E), where V is the number of nodes and E the number of edges",
        """
assert has_cycle({"a": ["b"], "b": ["c"], "c": ["a"]})
assert not has_cycle({"a": ["b", "c"], "b": ["c"], "c": []})
assert not has_cycle({})
""",
        '''
def has_cycle(graph: dict[str, list[str]]) -> bool:
    """Check whether a directed graph contains a cycle."""
    path: set[str] = set()
    done: set[str] = set()

    def visit(node: str) -> bool:
        # An edge back to the current path closes a cycle.
        if node in path:
            return True
        if node in done:
            return False
        path.add(node)
        found = any(visit(neighbour) for neighbour in graph.get(node, []))
        # The node is finished.
        path.remove(node)
        done.add(node)
        return found

    return any(visit(node) for node in graph)
''',
        javascript="""
function hasCycle(graph) {
  const path = new Set();
  const done = new Set();
  const visit = (node) => {
    if (path.has(node)) return true;
    if (done.has(node)) return false;
    path.add(node);
    const found = (graph[node] ?? []).some(visit);
    path.delete(node);
    done.add(node);
    return found;
  };
  return Object.keys(graph).some(visit);
}
""",
    ),
    program(
        "finds the shortest path in an unweighted graph",
        """A breadth-first search looks at the nodes in the order of their distance. The queue stores whole paths, so
        the first path that reaches the goal is a shortest one.""",
        "O(V + E) steps, where V is the number of nodes and E the number of edges",
        """
graph = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["e"]}
assert shortest_path(graph, "a", "e") == ["a", "b", "d", "e"]
assert shortest_path(graph, "a", "a") == ["a"]
assert shortest_path(graph, "e", "a") is None
""",
        '''
from collections import deque


def shortest_path(graph: dict[str, list[str]], start: str, goal: str) -> list[str] | None:
    """Return a shortest path from start to goal, or None."""
    queue = deque([[start]])
    visited = {start}
    while queue:
        path = queue.popleft()
        if path[-1] == goal:
            return path
        # Extend the path by every new neighbour.
        for neighbour in graph.get(path[-1], []):
            if neighbour not in visited:
                visited.add(neighbour)
                queue.append([*path, neighbour])
    # The goal cannot be reached.
    return None
''',
        javascript="""
function shortestPath(graph, start, goal) {
  const queue = [[start]];
  const visited = new Set([start]);
  while (queue.length > 0) {
    const path = queue.shift();
    const node = path[path.length - 1];
    if (node === goal) {
      return path;
    }
    for (const neighbour of graph[node] ?? []) {
      if (!visited.has(neighbour)) {
        visited.add(neighbour);
        queue.push([...path, neighbour]);
      }
    }
  }
  return null;
}
""",
    ),
    program(
        "performs a topological sort of a dependency graph",
        """Each node is visited after all nodes it depends on. The result lists every node behind its dependencies. A
        dependency that leads back to itself raises a ValueError.""",
        "O(V + E), where V is the number of nodes and E the number of dependencies",
        """
assert topological_sort({"app": ["lib", "log"], "lib": ["log"], "log": []}) == ["log", "lib", "app"]
assert topological_sort({}) == []
""",
        '''
def topological_sort(graph: dict[str, list[str]]) -> list[str]:
    """Return the nodes so that each one follows its dependencies."""
    order: list[str] = []
    active: set[str] = set()
    done: set[str] = set()

    def visit(node: str) -> None:
        if node in done:
            return
        if node in active:
            raise ValueError("the graph has a cycle")
        active.add(node)
        # Visit the dependencies first.
        for dependency in graph.get(node, []):
            visit(dependency)
        done.add(node)
        order.append(node)

    for node in graph:
        visit(node)
    return order
''',
        (
            '''
from graphlib import TopologicalSorter


def topological_sort(graph: dict[str, list[str]]) -> list[str]:
    """Return the nodes so that each one follows its dependencies."""
    # The sorter takes each node with its dependencies.
    return list(TopologicalSorter(graph).static_order())
''',
            """The standard library has a class for this. It takes a dictionary of dependencies, and `static_order`
            yields the nodes in a valid order.""",
        ),
        javascript="""
function topologicalSort(graph) {
  const order = [];
  const visit = (node) => {
    if (!order.includes(node)) {
      (graph[node] ?? []).forEach(visit);
      order.push(node);
    }
  };
  Object.keys(graph).forEach(visit);
  return order;
}
""",
    ),
    program(
        "implements a least-recently-used cache",
        """An OrderedDict keeps the entries in the order of use. Reading or writing an entry moves it to the end. When
        the cache is too large, the first entry is removed, because it was not used for the longest time.""",
        "O(1) for reading and for writing",
        """
cache = LRUCache(2)
cache.put("a", 1)
cache.put("b", 2)
assert cache.get("a") == 1
cache.put("c", 3)
assert cache.get("b") is None
assert cache.get("c") == 3
""",
        '''
from collections import OrderedDict
from typing import Any


class LRUCache:
    """A cache that forgets the entry that was not used for the longest time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: OrderedDict = OrderedDict()

    def get(self, key: Any) -> Any:
        if key not in self.entries:
            return None
        # The entry has just been used.
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key: Any, value: Any) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        # Remove the oldest entry if there are too many.
        if len(self.entries) > self.capacity:
            self.entries.popitem(last=False)
''',
        javascript="""
class LRUCache {
  constructor(capacity) {
    this.capacity = capacity;
    this.entries = new Map();
  }

  get(key) {
    if (!this.entries.has(key)) {
      return null;
    }
    const value = this.entries.get(key);
    this.put(key, value);
    return value;
  }

  put(key, value) {
    this.entries.delete(key);
    this.entries.set(key, value);
    if (this.entries.size > this.capacity) {
      this.entries.delete(this.entries.keys().next().value);
    }
  }
}
""",
    ),
    program(
        "implements a queue using two stacks",
        """New items are pushed on the first stack. When an item is taken and the second stack is empty, all items are
        moved over, which reverses their order. So the oldest item comes out first.""",
        "O(1) on average for each operation, because every item is moved only once",
        """
queue = Queue()
queue.enqueue(1)
queue.enqueue(2)
assert queue.dequeue() == 1
queue.enqueue(3)
assert queue.dequeue() == 2
assert queue.dequeue() == 3
""",
        '''
from typing import Any


class Queue:
    """A queue that is made of two stacks."""

    def __init__(self) -> None:
        self.incoming: list = []
        self.outgoing: list = []

    def enqueue(self, item: Any) -> None:
        self.incoming.append(item)

    def dequeue(self) -> Any:
        # Move all items over, which reverses their order.
        if not self.outgoing:
            while self.incoming:
                self.outgoing.append(self.incoming.pop())
        # Nothing has been stored.
        if not self.outgoing:
            raise ValueError("the queue is empty")
        return self.outgoing.pop()
''',
        javascript="""
class Queue {
  constructor() {
    this.incoming = [];
    this.outgoing = [];
  }

  enqueue(item) {
    this.incoming.push(item);
  }

  dequeue() {
    if (this.outgoing.length === 0) {
      while (this.incoming.length > 0) {
        this.outgoing.push(this.incoming.pop());
      }
    }
    return this.outgoing.pop();
  }
}
""",
    ),
    program(
        "implements a stack with push, pop and min in constant time",
        """Every entry of the stack stores the value together with the smallest value so far. So the minimum can be
        read from the top entry without searching.""",
        "O(1) for push, pop and min",
        """
stack = MinStack()
stack.push(3)
stack.push(1)
stack.push(2)
assert stack.min() == 1
assert stack.pop() == 2
assert stack.pop() == 1
assert stack.min() == 3
""",
        '''
class MinStack:
    """A stack that always knows its smallest value."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []

    def push(self, value: int) -> None:
        # Store the value with the minimum up to here.
        smallest = min(value, self.min()) if self.entries else value
        self.entries.append((value, smallest))

    def pop(self) -> int:
        return self.entries.pop()[0]

    def min(self) -> int:
        # The top entry knows the minimum.
        return self.entries[-1][1]
''',
        javascript="""
class MinStack {
  constructor() {
    this.entries = [];
  }

  push(value) {
    const smallest = this.entries.length > 0 ? Math.min(value, this.min()) : value;
    this.entries.push([value, smallest]);
  }

  pop() {
    return this.entries.pop()[0];
  }

  min() {
    return this.entries[this.entries.length - 1][1];
  }
}
""",
    ),
    program(
        "measures how long another function takes to run",
        """The decorator wraps the function. It reads the clock before and after the call and prints the difference.
        The result of the function is returned unchanged.""",
        "O(1) in addition to the time of the function itself",
        """
@timed
def double(x):
    return 2 * x


assert double(21) == 42
assert double.__name__ == "double"
""",
        '''
import functools
import time
from collections.abc import Callable


def timed(function: Callable) -> Callable:
    """Print how long each call of the function takes."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        # Read the clock before the call.
        start = time.perf_counter()
        result = function(*args, **kwargs)
        # The difference is the time of the call.
        print(f"{function.__name__} took {time.perf_counter() - start:.4f} seconds")
        return result

    return wrapper
''',
        javascript="""
function timed(fn) {
  return (...args) => {
    const start = performance.now();
    const result = fn(...args);
    console.log(`${fn.name} took ${performance.now() - start} ms`);
    return result;
  };
}
""",
    ),
    program(
        "memoises the results of another function",
        """The decorator keeps a dictionary from arguments to results. A call with new arguments runs the function and
        stores the result. Later calls with the same arguments read it from the dictionary.""",
        "O(1) for a call whose result is already stored",
        """
calls = []


@memoise
def square(x):
    calls.append(x)
    return x * x


assert square(4) == 16
assert square(4) == 16
assert calls == [4]
""",
        '''
import functools
from collections.abc import Callable


def memoise(function: Callable) -> Callable:
    """Remember the results of a function."""
    results: dict = {}

    @functools.wraps(function)
    def wrapper(*args):
        # Run the function only for new arguments.
        if args not in results:
            results[args] = function(*args)
        return results[args]

    return wrapper
''',
        (
            '''
import functools
from collections.abc import Callable


def memoise(function: Callable) -> Callable:
    """Remember the results of a function with the standard library."""
    # The cache has no limit.
    return functools.lru_cache(maxsize=None)(function)
''',
            "The standard library already has such a decorator. With `maxsize=None` it never forgets a result.",
        ),
        javascript="""
function memoise(fn) {
  const results = new Map();
  return (...args) => {
    const key = JSON.stringify(args);
    if (!results.has(key)) {
      results.set(key, fn(...args));
    }
    return results.get(key);
  };
}
""",
    ),
    program(
        "retries another function with exponential backoff",
        """It calls the function in a loop. After a failure it waits, and the waiting time doubles with each attempt.
        If the last attempt fails too, the error is passed on.""",
        "O(n) calls, where n is the number of attempts",
        """
failures = [1, 2]


def flaky():
    if failures:
        failures.pop()
        raise OSError("not yet")
    return "ok"


assert retry(flaky, 3, 0.001) == "ok"
""",
        '''
import time
from collections.abc import Callable
from typing import Any


def retry(function: Callable, attempts: int = 5, delay: float = 1.0) -> Any:
    """Call a function until it succeeds, waiting longer each time."""
    for attempt in range(attempts):
        try:
            return function()
        except Exception:
            # Give up after the last attempt.
            if attempt == attempts - 1:
                raise
            # Double the waiting time with each attempt.
            time.sleep(delay * 2**attempt)
''',
        (
            '''
import time
from collections.abc import Callable
from typing import Any


def retry(function: Callable, attempts: int = 5, delay: float = 1.0) -> Any:
    """Call a function until it succeeds, using recursion."""
    try:
        return function()
    except Exception:
        # Give up after the last attempt.
        if attempts <= 1:
            raise
    # Wait, then try again with twice the delay.
    time.sleep(delay)
    return retry(function, attempts - 1, delay * 2)
''',
            """If the call works, its result is returned. Otherwise the function waits and calls itself with one
            attempt less and twice the delay.""",
        ),
        javascript="""
async function retry(fn, attempts = 5, delay = 1000) {
  for (let attempt = 0; ; attempt++) {
    try {
      return await fn();
    } catch (error) {
      if (attempt >= attempts - 1) {
        throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, delay * 2 ** attempt));
    }
  }
}
""",
    ),
    program(
        "counts the lines of every file in a directory",
        """It goes through the entries of the directory and keeps only files. For each file it counts the lines while
        reading them one by one, so large files are no problem.""",
        "O(n), where n is the total size of the files",
        """
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "a.txt").write_text("one\\ntwo\\n")
    Path(folder, "b.txt").write_text("")
    assert count_lines(folder) == {"a.txt": 2, "b.txt": 0}
""",
        '''
from pathlib import Path


def count_lines(folder: str) -> dict[str, int]:
    """Return the number of lines of every file in a folder."""
    counts = {}
    for path in sorted(Path(folder).iterdir()):
        # Skip directories.
        if path.is_file():
            # Read the file line by line.
            with path.open(encoding="utf-8") as file:
                counts[path.name] = sum(1 for _ in file)
    return counts
''',
        javascript=r"""
const fs = require("fs");
const path = require("path");

function countLines(folder) {
  const counts = {};
  for (const entry of fs.readdirSync(folder, { withFileTypes: true })) {
    if (entry.isFile()) {
      const text = fs.readFileSync(path.join(folder, entry.name), "utf8");
      counts[entry.name] = text.split("\n").length - 1;
    }
  }
  return counts;
}
""",
    ),
    program(
        "lists all files with a given extension in a directory tree",
        """`rglob` searches the directory and all directories below it. The pattern matches every name that ends with
        the extension, and only files are kept.""",
        "O(n), where n is the number of entries in the directory tree",
        """
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "sub").mkdir()
    Path(folder, "a.txt").touch()
    Path(folder, "sub", "b.txt").touch()
    Path(folder, "c.csv").touch()
    assert [Path(name).name for name in find_files(folder, ".txt")] == ["a.txt", "b.txt"]
""",
        '''
from pathlib import Path


def find_files(folder: str, extension: str) -> list[str]:
    """Return all files below a folder that have the extension."""
    # Search all levels of the directory tree.
    paths = Path(folder).rglob(f"*{extension}")
    # Keep files only.
    return sorted(str(path) for path in paths if path.is_file())
''',
        (
            '''
import os
from collections.abc import Iterator


def find_files(folder: str, extension: str) -> Iterator[str]:
    """Yield all files below a folder that have the extension."""
    # os.walk visits every directory of the tree.
    for directory, _, names in os.walk(folder):
        for name in sorted(names):
            if name.endswith(extension):
                yield os.path.join(directory, name)
''',
            """`os.walk` visits every directory of the tree. Each file name with the right ending is yielded with its
            path.""",
        ),
    ),
    program(
        "reads a text file and returns its longest line",
        "The file is opened and read line by line. `max` with `key=len` keeps the longest line.",
        "O(n), where n is the size of the file",
        """
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "text.txt")
    path.write_text("one\\nthree three\\ntwo\\n")
    assert longest_line(str(path)) == "three three"
    path.write_text("")
    assert longest_line(str(path)) == ""
""",
        r'''
def longest_line(path: str) -> str:
    """Return the longest line of a text file."""
    with open(path, encoding="utf-8") as file:
        # Remove the line breaks, then compare the lengths.
        return max((line.rstrip("\n") for line in file), key=len, default="")
''',
        (
            r'''
def longest_line(path: str) -> str:
    """Return the longest line of a text file, with a loop."""
    longest = ""
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.rstrip("\n")
            # Keep the line if it is longer than all before.
            if len(line) > len(longest):
                longest = line
    return longest
''',
            "The file is read line by line. Whenever a line is longer than the longest one so far, it is kept.",
        ),
        javascript=r"""
const fs = require("fs");

function longestLine(path) {
  const lines = fs.readFileSync(path, "utf8").split("\n");
  return lines.reduce((longest, line) => (line.length > longest.length ? line : longest), "");
}
""",
    ),
    program(
        "renames files in a folder using a pattern",
        """The files are sorted, so that the numbers follow the names. Each file gets the pattern with its number as
        the new name and keeps its extension.""",
        "O(n log n), where n is the number of files, because they are sorted",
        """
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "x.jpg").touch()
    Path(folder, "y.jpg").touch()
    rename_files(folder, "photo_{:03d}")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["photo_001.jpg", "photo_002.jpg"]
""",
        '''
from pathlib import Path


def rename_files(folder: str, pattern: str) -> None:
    """Rename all files with a numbered pattern such as photo_{:03d}."""
    if "{" not in pattern:
        raise ValueError("the pattern must contain a place for the number")
    # Sort the files, so that the order is always the same.
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    for number, path in enumerate(files, start=1):
        # Keep the extension of each file.
        path.rename(path.with_name(pattern.format(number) + path.suffix))
''',
    ),
    program(
        "writes a list of dictionaries to a JSON file",
        "The file is opened for writing. `json.dump` writes the list, and `indent=2` makes the file easy to read.",
        "O(n), where n is the size of the data",
        """
import json
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "data.json")
    write_json([{"name": "Ann"}, {"name": "Bob"}], str(path))
    assert json.loads(path.read_text()) == [{"name": "Ann"}, {"name": "Bob"}]
""",
        '''
import json


def write_json(records: list[dict], path: str) -> None:
    """Write a list of dictionaries to a JSON file."""
    # The indentation makes the file easy to read.
    with open(path, "w", encoding="utf-8") as file:
        json.dump(records, file, indent=2, ensure_ascii=False)
''',
        javascript="""
const fs = require("fs");

function writeJson(records, path) {
  fs.writeFileSync(path, JSON.stringify(records, null, 2));
}
""",
    ),
)
