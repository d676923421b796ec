"""The search for an order, and why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pxrs.testing.linearizability.operations import ABSENT, Operation, describe, returned, version_text
from pxrs.testing.linearizability.problem import Budget, Problem, Step


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check` found. When not ok: `prefix` is the longest order found, in which every return up to a moment
    is accounted for; `stuck` are the operations in flight then, of which none leads on, the one that had to
    return first in front; `explanation` says so in words."""

    ok: bool
    explanation: str
    prefix: tuple[Operation, ...] = ()
    stuck: tuple[Operation, ...] = ()


# The operations placed so far, the last one first.
_Path = tuple[Operation, "_Path | None"]


@dataclass(frozen=True, slots=True)
class _Node:
    """A point of the search: everything that returned before return number `due` is placed, and that one is not."""

    due: int
    done: int  # bits of the steps placed
    used: int  # bits of the options used
    state: tuple[int, ...]
    path: _Path | None


class Search:
    def __init__(self, problem: Problem, budget: Budget) -> None:
        self.problem = problem
        self._budget = budget
        self._bits = [1 << i for i in range(len(problem.steps))]
        # For each visited (due, steps placed, state), the least sets of options with which it was reached.
        self._visited: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        self._best = self._place_reads(0, 0, 0, (ABSENT,) * len(problem.keys), None)

    def run(self) -> bool:
        """Depth first, with an explicit stack: a history is deeper than the interpreter's."""
        if self._best.due == len(self.problem.steps):
            return True
        stack = [self._branches(self._best)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            if node.due == len(self.problem.steps):
                return True
            if self._is_dominated(node):
                continue
            self._budget.spend()
            if (node.due, node.done.bit_count()) > (self._best.due, self._best.done.bit_count()):
                self._best = node
            stack.append(self._branches(node))
        return False

    def _place_reads(self, due: int, done: int, used: int, state: tuple[int, ...], path: _Path | None) -> _Node:
        """Place every read that fits, and move on to the first return that is not accounted for."""
        steps, bits = self.problem.steps, self._bits
        while due < len(steps):
            for i in self.problem.reads[due]:
                if not done & bits[i] and steps[i].holds(state):
                    done |= bits[i]
                    path = (steps[i].operation, path)
            if not done & bits[due]:
                break
            due += 1
        return _Node(due, done, used, state, path)

    def _branches(self, node: _Node) -> Iterator[_Node]:
        """Every write that may come next. The order is a guess at what is most likely: what returned first."""
        due, done, used, state, path = node.due, node.done, node.used, node.state, node.path
        for i in self.problem.writes[due]:
            step, bit = self.problem.steps[i], self._bits[i]
            if not done & bit and step.holds(state) and not self._loses(step, done | bit, state):
                yield self._place_reads(due, done | bit, used, step.apply(state), (step.operation, path))
        deadline = returned(self.problem.steps[due].operation)
        for group in self.problem.options:
            option = next((option for option in group if not used & option.excludes), None)
            if option is None or option.step.operation.call > deadline or not option.step.holds(state):
                continue
            after = option.step.apply(state)
            if after != state and not self._loses(option.step, done, state):
                yield self._place_reads(due, done, used | option.bit, after, (option.step.operation, path))

    def _loses(self, step: Step, done: int, state: tuple[int, ...]) -> int:
        """Bits of the steps that still need a version which this one would overwrite."""
        observers = self.problem.observers
        lost = 0
        for key, _ in step.effect:
            lost |= observers.get((key, state[key]), 0)
        return lost & ~done

    def _is_dominated(self, node: _Node) -> bool:
        # Everything below `due` is placed, so the rest of the bits tells the whole set.
        known = self._visited.setdefault((node.due, node.done >> node.due, node.state), [])
        if any(used & node.used == used for used in known):
            return True
        known[:] = [used for used in known if used & node.used != node.used]
        known.append(node.used)
        return False

    # --- the explanation ---

    def verdict(self) -> Verdict:
        """Why there is no linearization, told at the node that came farthest."""
        problem, node = self.problem, self._best
        prefix: list[Operation] = []
        path = node.path
        while path is not None:
            operation, path = path
            prefix.append(operation)
        prefix.reverse()
        pending = sorted(problem.reads[node.due] + problem.writes[node.due])
        stuck = [i for i in pending if not node.done & self._bits[i]]
        since = min(step.operation.call for step in problem.steps)

        lines = [
            f"not linearizable: keys {', '.join(problem.keys)}; {len(prefix)} operations placed, "
            f"{len(problem.steps) - node.done.bit_count()} left (times in seconds after {since:.6f})"
        ]
        if prefix:
            lines.append("the longest order found ends with:")
            lines += [f"  {describe(operation, since)}" for operation in prefix[-5:]]
        state = (f"{key} {version_text(version)}" for key, version in zip(problem.keys, node.state, strict=True))
        lines.append(f"which leaves: {', '.join(state)}")
        lines.append("then none of these can come next, although the first one must before it returns:")
        for i in stuck[:8]:
            lines.append(f"  {describe(problem.steps[i].operation, since)}")
            lines.append(f"    {self._reason(i, node, since)}")
        flawed = [step for i, step in enumerate(problem.steps) if step.flaw and i not in stuck[:8]]
        if flawed:
            lines.append("and these are not possible in any order:")
        for step in flawed[:3]:
            lines += [f"  {describe(step.operation, since)}", f"    {step.flaw}"]
        left = tuple(problem.steps[i].operation for i in stuck)
        return Verdict(False, "\n".join(lines), tuple(prefix), left)

    def _reason(self, i: int, node: _Node, since: float) -> str:
        step = self.problem.steps[i]
        if step.flaw:
            return step.flaw
        if step.is_conflict and not step.holds(node.state):
            return "all its expectations hold here, but a conflict needs one that does not"
        for key, version in step.needs:
            if not step.is_conflict and node.state[key] != version:
                return f"{self.problem.keys[key]} is {version_text(node.state[key])}, not {version_text(version)}"
        lost = self._loses(step, node.done | self._bits[i], node.state)
        if lost:
            observer = self.problem.steps[(lost & -lost).bit_length() - 1].operation
            return f"it would overwrite what is still to be observed by: {describe(observer, since)}"
        return "it is possible here, but then nothing else is"
