"""A compressed suffix tree of bounded depth with occurrence counts, as SuffixDecoding needs it (Oliaro et al. 2024,
arXiv:2411.04975, section 3): which tokens followed a context, and how often.

Every suffix of a text is entered up to ``depth`` tokens deep. A suffix that has become unique is a leaf, whose edge
runs on through the text by itself, so a new token only moves the suffixes that still repeat something earlier (at most
``depth`` *cursors*). Suffixes leave in the order in which they came. An edge is spelled by its most recent occurrence,
so what stays after the oldest suffix has left never points into forgotten text, and the counts are those of a tree that
the forgotten suffix was never in. A node branches or ends a suffix, so there are at most about two nodes a suffix.
Knows tokens only: no requests, no models.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Node:
    """The lower end of an edge that is spelled ``text[start : start + length]``.

    ``count`` suffixes have entered the edge; ``last`` is when one last did. A leaf's ``length`` is what the depth
    leaves it, though its text may still end earlier; ``children`` is ``None`` at leaves.
    """

    __slots__ = ("children", "count", "last", "length", "parent", "start", "text")

    def __init__(self, text: list[int], start: int, length: int, parent: Node | None, last: int, count: int = 1):
        self.text = text
        self.start = start
        self.length = length
        self.parent = self if parent is None else parent  # the root is its own
        self.last = last
        self.count = count
        self.children: dict[int, Node] | None = None


@dataclass(slots=True)
class _Cursor:
    """A suffix of the open text, from ``start``, that is not unique yet: its end is ``offset`` tokens into an edge."""

    node: Node
    offset: int
    start: int


class Point(NamedTuple):
    """A place in the tree, ``offset`` tokens into the edge of ``node``, and how many suffixes reach it."""

    node: Node
    offset: int
    occurrences: int


Ends = dict[tuple[Node, int], int]
"""How many suffixes of the open text end at (node, offset): their continuation is not known yet."""


class SuffixTree:
    """Counts of everything up to ``depth`` tokens long in one growing text, or in the latest of many finished ones.

    Args:
        depth: longest context and continuation together, tokens.
        capacity: suffixes (one a token) held at most; at least ``depth``.
    """

    def __init__(self, depth: int, capacity: int) -> None:
        if capacity < depth:
            raise ValueError(f"capacity {capacity} is below the depth {depth}")
        self.depth = depth
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.text: list[int] = []  # the open one
        self.size = 0  # suffixes held
        self.nodes = 0  # without the root
        self.root = Node([], 0, 0, None, 0)
        self._clock = 0
        self._cursors: list[_Cursor] = []  # longest first
        self._leaves: deque[Node] = deque(maxlen=self.depth)  # the youngest ones: their edges may still grow
        self._finished: deque[list[int]] = deque()

    # -- growing -------------------------------------------------------------------------------------------

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the open text; beyond the capacity its oldest suffixes leave one by one."""
        for token in tokens:
            self._append(token)
            if self.size > self.capacity:
                self._forget(self.text, len(self.text) - self.size)

    def add(self, tokens: Sequence[int]) -> None:
        """Enter a text that will not grow; the oldest texts leave, each as a whole, to make room for it.

        Raises:
            ValueError: while another text is open (``extend``).
        """
        if self.text:
            raise ValueError("the tree holds an open text; finished ones belong into a tree of their own")
        tokens = tokens[-self.capacity :]
        while self.size + len(tokens) > self.capacity:
            oldest = self._finished.popleft()
            for start in range(len(oldest)):
                self._forget(oldest, start)
        for token in tokens:
            self._append(token)
        self._finish()

    def _append(self, token: int) -> None:
        position = len(self.text)
        self.text.append(token)
        self._clock += 1
        self.size += 1
        self._cursors.append(_Cursor(self.root, 0, position))
        kept = [cursor for cursor in self._cursors if self._advance(cursor, token, position)]
        if kept and position + 1 - kept[0].start == self.depth:
            del kept[0]
        self._cursors = kept

    def _advance(self, cursor: _Cursor, token: int, position: int) -> bool:
        """Move one cursor over ``token``, which lies at ``position`` of the open text; false when it became a leaf."""
        node, offset = cursor.node, cursor.offset
        if offset == node.length:
            child = None if node.children is None else node.children.get(token)
            if child is None:
                return self._settle(cursor, node, token, position)
            child.count += 1
            child.last = self._clock
            cursor.node, cursor.offset = child, 1
            if child.length == 1:
                child.text, child.start = self.text, position
        elif node.text[node.start + offset] == token:
            cursor.offset = offset + 1
            if offset + 1 == node.length:
                node.text, node.start = self.text, position - offset
        else:
            return self._settle(cursor, self._split(node, offset, position), token, position)
        return True

    def _settle(self, cursor: _Cursor, above: Node, token: int, position: int) -> bool:
        """Make the cursor's suffix a leaf below ``above``."""
        cursor.node = self.root  # no longer on an edge, in case another cursor splits it now
        leaf = Node(self.text, position, self.depth - (position - cursor.start), above, self._clock)
        if above.children is None:
            above.children = {}
        above.children[token] = leaf
        self._leaves.append(leaf)
        self.nodes += 1
        return False

    def _split(self, node: Node, offset: int, end: int) -> Node:
        """A node ``offset`` tokens into the edge of ``node``, spelled by the open text's tokens before ``end``."""
        here = [cursor for cursor in self._cursors if cursor.node is node]
        above = sum(cursor.offset <= offset for cursor in here)
        if above == node.count:  # what lay below was forgotten
            node.text, node.start, node.length, node.children = self.text, end - offset, offset, None
            return node
        upper = Node(self.text, end - offset, offset, node.parent, self._clock, node.count)
        upper.children = {node.text[node.start + offset]: node}
        assert node.parent.children is not None
        node.parent.children[node.text[node.start]] = upper
        node.parent = upper
        node.start += offset
        node.length -= offset
        node.count -= above
        for cursor in here:
            if cursor.offset <= offset:
                cursor.node = upper
            else:
                cursor.offset -= offset
        self.nodes += 1
        return upper

    def _finish(self) -> None:
        """Close the open text: leaves stop where it stops, and the suffixes that repeat something end at nodes."""
        end = len(self.text)
        for leaf in self._leaves:
            if leaf.text is self.text:
                leaf.length = min(leaf.length, end - leaf.start)
        for cursor in self._cursors:
            if cursor.offset < cursor.node.length:
                self._split(cursor.node, cursor.offset, end)
        self._finished.append(self.text)
        self.text = []
        self._cursors.clear()
        self._leaves.clear()

    # -- forgetting ----------------------------------------------------------------------------------------

    def _forget(self, text: list[int], start: int) -> None:
        """Take the oldest suffix out, which begins at ``start`` of ``text``."""
        self.size -= 1
        node, index, end = self.root, start, min(start + self.depth, len(text))
        path: list[Node] = []
        while index < end:
            assert node.children is not None
            child = node.children[text[index]]
            child.count -= 1
            if child.count == 0:
                del node.children[text[index]]
                if not node.children:
                    node.children = None
                self.nodes -= _chain_length(child)
                break
            path.append(child)
            index += child.length
            node = child
        for node in reversed(path):
            self._merge(node)

    def _merge(self, node: Node) -> None:
        """Join ``node`` with its only child when nothing ends between them."""
        if node.children is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.count != node.count:
            return
        assert node.parent.children is not None
        node.parent.children[node.text[node.start]] = child
        child.parent = node.parent
        child.start -= node.length
        child.length += node.length
        for cursor in self._cursors:
            if cursor.node is child:
                cursor.offset += node.length
        self.nodes -= 1

    # -- reading -------------------------------------------------------------------------------------------

    def ends(self) -> Ends:
        """Where the open text's repeated suffixes end; what ``follow`` needs to know."""
        return Counter((cursor.node, cursor.offset) for cursor in self._cursors)

    def matches(self) -> Iterator[tuple[int, Point]]:
        """(length, point) of every suffix of the open text that repeats something earlier, longest first."""
        offsets: dict[Node, list[int]] = {}
        for cursor in self._cursors:
            insort(offsets.setdefault(cursor.node, []), cursor.offset)
        for cursor in self._cursors:
            before = bisect_left(offsets[cursor.node], cursor.offset)
            yield len(self.text) - cursor.start, Point(cursor.node, cursor.offset, cursor.node.count - before)

    def find(self, context: list[int]) -> Point | None:
        """Where ``context`` ends in a tree of finished texts, or ``None`` when it does not occur in them."""
        node, offset, index = self.root, 0, 0
        while index < len(context):
            child = None if node.children is None else node.children.get(context[index])
            if child is None:
                return None
            offset = min(child.length, len(context) - index)
            if child.text[child.start : child.start + offset] != context[index : index + offset]:
                return None
            index += offset
            node = child
        return Point(node, offset, node.count)


def _chain_length(node: Node) -> int:
    """Nodes from ``node`` down, in a part of the tree that only the forgotten suffix went through."""
    length = 1
    while node.children:
        (node,) = node.children.values()
        length += 1
    return length


def follow(point: Point, ends: Ends) -> list[tuple[int, Point]]:
    """(token, point after it) for everything that followed, most frequent first, then most recent."""
    node, offset = point.node, point.offset
    if offset < node.length:
        count = point.occurrences - ends.get((node, offset), 0)
        index = node.start + offset
        return [(node.text[index], Point(node, offset + 1, count))] if count > 0 and index < len(node.text) else []
    if node.children is None:
        return []
    ranked = sorted(node.children.items(), key=lambda item: _rank(item[1]), reverse=True)
    return [(token, Point(child, 1, child.count)) for token, child in ranked]


def expected_length(point: Point, ends: Ends, most: int, least: float) -> float:
    """Sum of the path probabilities of the chain of the most frequent tokens after ``point``.

    Args:
        point: where to begin; path probabilities are relative to its ``occurrences``.
        ends: see ``SuffixTree.ends``.
        most: tokens at most.
        least: the chain stops before a path probability below this.
    """
    node, offset, reaching = point
    enough, total = least * reaching, 0
    for _ in range(most):
        if offset == node.length:
            if node.children is None:
                break
            # The first of equals by time, as in ``follow``.
            node, offset = max(node.children.values(), key=_rank), 1
            reaching = node.count
        else:
            reaching -= ends.get((node, offset), 0)
            if node.start + offset == len(node.text):
                break
            offset += 1
        if reaching < enough or reaching == 0:
            break
        total += reaching
    return total / point.occurrences


def _rank(node: Node) -> tuple[int, int]:
    return node.count, node.last
