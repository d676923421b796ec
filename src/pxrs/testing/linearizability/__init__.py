"""Is a recorded history of a versioned key-value store linearizable?

The problem: several clients called `get` and `commit` at the same time, and each call took from `call` to
`ret`. The store is linearizable (R1) when every call can be given one instant inside its interval such that
the calls, performed one after the other at those instants, give the results that were recorded. Trying all
orders is exponential; this is the search of Wing and Gong as improved by Lowe: walk over the returns in order
of time, place operations only when a return forces it, and remember the (placed operations, state) pairs that
led nowhere.

The model is a mapping from key to (value, version):

- a `Get` reports exactly the state at its instant (version 0: absent);
- an `ok` commit found every expectation true, and gave each key it put a version which that key never had;
- a `conflict` found at least one expectation false, and changed nothing;
- an `unknown` commit (R5) happened at any instant after its call, even long after, or never. Its versions were
  not told; the first one observed becomes its own.

Four facts keep the search small, and none of them loses a linearization:

- A version of a key belongs to one commit. So the state is versions alone (the values are compared once, before
  the search), and a version still to be observed by somebody must not be overwritten: it never comes back.
- What changes nothing (a get, a conflict, a commit that only expects) is placed at the first instant it fits.
- An unknown commit is tried once per version it may have got: those observed with its value, or one that nobody
  ever saw. Of two ways to the same state, the one that used fewer unknown commits is at least as good.
- Groups of keys that no commit connects are independent objects, and are checked one by one.

Nothing here does I/O or reads a clock.

Start with `check`. `operations.py` has what a history consists of, `problem.py` compiles the operations of connected
keys into a search problem, `search.py` searches and explains.
"""

from __future__ import annotations

from collections.abc import Iterable

from pxrs.testing.linearizability.operations import ABSENT, Commit, Get, Operation, Outcome, dump, load
from pxrs.testing.linearizability.problem import Budget, Undecided, compile_problem, partition
from pxrs.testing.linearizability.search import Search, Verdict

__all__ = [
    "ABSENT",
    "Commit",
    "Get",
    "Operation",
    "Outcome",
    "Undecided",
    "Verdict",
    "check",
    "dump",
    "load",
]


def check(history: Iterable[Operation], *, max_steps: int = 500_000) -> Verdict:
    """Look for a linearization. The order of `history` does not matter, its times do.

    `max_steps` bounds the pairs of (placed operations, state) visited over all key groups together; past it,
    `Undecided` is raised.
    """
    budget = Budget(max_steps)
    groups = partition(history)
    for operations in groups:
        search = Search(compile_problem(operations, budget), budget)
        try:
            found = search.run()
        except Undecided:
            # An operation that fits in no order at all is an answer, however far the search came.
            if not search.problem.has_flaw:
                raise
            found = False
        if not found:
            return search.verdict()
    return Verdict(True, f"linearizable: {sum(map(len, groups))} operations in {len(groups)} key groups")
