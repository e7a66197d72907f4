"""The bucket lists of least cost, exactly: dynamic programming in whole numbers.

A step of `size` runs in the smallest bucket that holds it, so a list splits the sizes into runs,
one for each bucket, and costs the sum over its buckets of (steps in the run) x (cost of the
bucket). That is the problem of choosing k break points in one dimension: `G[k][i]`, the least cost
of all sizes above candidate i with k more buckets, is the minimum over the next bucket j of
`cost[j] * (W[j] - W[i]) + G[k-1][j]`, W being the number of steps up to a candidate. Each j is a
line in W[i]; as costs never fall with size, slopes and queries are both sorted, and the lower
envelope of the lines answers in O(1) each: O(candidates x k) in all (the "convex hull trick";
Aggarwal et al., "Geometric applications of a matrix-searching algorithm", 1987, has the theory).

Budgets that are not a count (compile time, device memory) make it a shortest path with resource
constraints (Irnich and Desaulniers, 2005): A* over labels (cost, what is used up), pruned by
dominance, with G, at prices on the budgets (Lagrange), as the bound of what is still to come.

Both are exact, ties included: of lists that cost the same, the one with fewer buckets is taken.
Costs are integers (tokens, nanoseconds), so nothing is rounded on the way.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

INFINITY = 1 << 200
"""Above any cost: sizes, steps and costs have at most 60 bits each."""
PRICE_UNIT = 1 << 32
PRICE_ROUNDS = 3
PRICE_BISECTIONS = 20


@dataclass(frozen=True)
class Axis:
    """One bucket list to choose.

    `candidates` ascend, and the last one is in every list. `costs[i]` is that of one step in
    candidate i and never falls with i; `used[i]` is what its program takes of each budget.
    """

    candidates: tuple[int, ...]
    costs: tuple[int, ...]
    steps: tuple[int, ...]
    """Steps whose size is above the candidate before, and not above this one."""
    max_programs: int
    used: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.candidates) == len(self.costs) == len(self.steps) > 0
        assert all(a < b for a, b in pairwise(self.candidates))
        assert all(a <= b for a, b in pairwise(self.costs)), "costs must not fall with size"
        assert self.max_programs > 0


@dataclass(frozen=True)
class Choice:
    """A list, and what all steps cost in it."""

    buckets: tuple[int, ...]
    cost: int


def steps_by_candidate(sizes: Mapping[int, int], candidates: Sequence[int]) -> tuple[int, ...]:
    """How many steps go to each candidate if all of them are buckets; the last holds them all."""
    steps = [0] * len(candidates)
    for size, count in sizes.items():
        steps[bisect_left(candidates, size)] += count
    return tuple(steps)


class _CostToGo:
    """`G` of the module's docstring for one axis, and the choices that lead to it.

    Costs are multiplied by `scale`, and each bucket costs its `fixed` on top: 1 makes ties go to
    the shorter list, if `scale` is above the number of buckets; more is a price on budgets.
    """

    def __init__(self, axis: Axis, scale: int, fixed: Sequence[int]) -> None:
        self.axis = axis
        n = len(axis.candidates)
        self._costs = [cost * scale for cost in axis.costs]
        self._fixed = fixed
        # Steps up to candidate i, at i + 1: entry 0 is the start, before all candidates.
        self._before = [0, *accumulate(axis.steps)]
        # cost[k][i]: at most k more buckets, after the candidate i - 1 (0: none so far).
        self.cost = [[INFINITY] * n + [0]]
        self._next = [[0] * (n + 1)]
        for _ in range(axis.max_programs):
            self._add_layer()

    def _add_layer(self) -> None:
        below, n = self.cost[-1], len(self.axis.candidates)
        layer, chosen = [INFINITY] * n + [0], [0] * (n + 1)
        lines: deque[tuple[int, int, int]] = deque()
        """(slope, intercept, j), slopes ascending: the lower envelope, best at the front."""
        for i in range(n - 1, -1, -1):
            j = i + 1
            if below[j] < INFINITY:
                cost = self._costs[i]
                through = cost * self._before[j] + below[j] + self._fixed[i]
                _append(lines, (-cost, through, j))
            at = self._before[i]
            while len(lines) > 1 and _value(lines[1], at) <= _value(lines[0], at):
                lines.popleft()
            if lines:
                layer[i], chosen[i] = _value(lines[0], at), lines[0][2]
            if below[i] <= layer[i]:
                layer[i], chosen[i] = below[i], self._next[-1][i]
        self.cost.append(layer)
        self._next.append(chosen)

    def buckets(self, max_programs: int) -> tuple[int, ...]:
        """The cheapest list of at most `max_programs`."""
        k, at, buckets = max_programs, 0, []
        while at < len(self.axis.candidates):
            at = self._next[k][at]
            buckets.append(self.axis.candidates[at - 1])
            k -= 1
        return tuple(buckets)


def _value(line: tuple[int, int, int], at: int) -> int:
    return line[0] * at + line[1]


def _append(lines: deque[tuple[int, int, int]], line: tuple[int, int, int]) -> None:
    """Add the line of the largest slope so far, and drop those that it leaves no place."""
    while lines and lines[-1][0] == line[0] and lines[-1][1] >= line[1]:
        lines.pop()
    if lines and lines[-1][0] == line[0]:
        return
    while len(lines) > 1:
        (s0, c0, _), (s1, c1, _), (s2, c2, _) = lines[-2], lines[-1], line
        # The middle one is below both others nowhere.
        if (c2 - c1) * (s1 - s0) <= (c1 - c0) * (s2 - s1):
            lines.pop()
        else:
            break
    lines.append(line)


def best_lists(axis: Axis) -> list[Choice]:
    """The cheapest list of at most 1, 2, … `axis.max_programs` buckets."""
    to_go = _CostToGo(axis, axis.max_programs + 1, [1] * len(axis.candidates))
    lists = [to_go.buckets(k) for k in range(1, axis.max_programs + 1)]
    return [Choice(buckets, cost_of(axis, buckets)) for buckets in lists]


@dataclass(frozen=True, slots=True)
class _Label:
    """A list begun: up to candidate `at` - 1 of axis `axis`, with `count` buckets in it."""

    axis: int
    at: int
    count: int
    cost: int
    used: tuple[int, ...]
    parent: "_Label | None"


def best_within(axes: Sequence[Axis], budgets: Sequence[int]) -> list[Choice] | None:
    """The cheapest lists, one per axis, whose programs together keep all budgets.

    None if not even the last candidates alone keep them. Costs of the axes are added: they must be
    in one unit.
    """
    return _Search(axes, tuple(budgets)).run()


class _Bound:
    """What is still to come costs at least this, with a price on each unit of a budget.

    Lagrange's relaxation: whoever keeps the budgets pays no more than `price x what is left` for
    the programs to come. Prices are in 1/PRICE_UNIT, and rounded to the side that keeps the bound
    true.
    """

    def __init__(self, axes: Sequence[Axis], scale: int, prices: tuple[int, ...]) -> None:
        self._axes = axes
        self._scale = scale
        self._prices = prices
        self._to_go = [
            _CostToGo(axis, scale, [1 + _dot(prices, used) // PRICE_UNIT for used in axis.used])
            for axis in axes
        ]
        self._whole = [to_go.cost[to_go.axis.max_programs][0] for to_go in self._to_go]
        self._later = [*accumulate(reversed(self._whole), initial=0)][::-1]

    def __call__(self, label: _Label, left: tuple[int, ...]) -> int:
        """`left`: of each budget."""
        to_come = self._later[label.axis]
        if label.axis < len(self._to_go):
            to_go = self._to_go[label.axis]
            more = to_go.axis.max_programs - label.count
            to_come += to_go.cost[more][label.at] - self._whole[label.axis]
        return to_come + -_dot(self._prices, left) // PRICE_UNIT

    def cheapest(self) -> tuple[tuple[int, ...], int]:
        """What the lists that are cheapest at these prices use, and what they cost without them."""
        total: tuple[int, ...] = (0,) * len(self._prices)
        cost = 0
        for axis, to_go in zip(self._axes, self._to_go, strict=True):
            row = dict(zip(axis.candidates, axis.used, strict=True))
            buckets = to_go.buckets(axis.max_programs)
            for bucket in buckets:
                total = _sum(total, row[bucket])
            cost += cost_of(axis, buckets) * self._scale + len(buckets)
        return total, cost


def _priced(axes: Sequence[Axis], scale: int, budgets: tuple[int, ...]) -> tuple[_Bound, int]:
    """A tight bound, and the cost of lists that keep the budgets: nothing dearer is the answer.

    The bound is tight at prices where the cheapest lists about use up the budgets: found for one
    budget after the other, by bisection. Any prices are right; good ones save time.
    """
    prices = [0] * len(budgets)
    least = INFINITY

    def bound() -> tuple[_Bound, tuple[int, ...]]:
        nonlocal least
        made = _Bound(axes, scale, tuple(prices))
        used, cost = made.cheapest()
        if _keeps(used, budgets):
            least = min(least, cost)
        return made, used

    made, used = bound()
    highest = scale * sum(cost_of(axis, axis.candidates[-1:]) for axis in axes) * PRICE_UNIT
    for _ in range(PRICE_ROUNDS):
        for d, budget in enumerate(budgets):
            low, high = 0, highest // max(budget, 1) + 1
            prices[d] = low
            made, used = bound()
            if used[d] <= budget:
                continue
            for _ in range(PRICE_BISECTIONS):
                prices[d] = (low + high) // 2
                made, used = bound()
                if used[d] > budget:
                    low = prices[d]
                else:
                    high = prices[d]
    return made, least


def _within_budgets(axis: Axis, axes: Sequence[Axis], budgets: tuple[int, ...]) -> Axis:
    """With no more programs than the budgets hold of the smallest: G is a tighter bound then."""
    most = axis.max_programs
    for d, budget in enumerate(budgets):
        left = budget - sum(other.used[-1][d] for other in axes)
        smallest_first = accumulate(sorted(used[d] for used in axis.used[:-1]))
        most = min(most, 1 + sum(total <= left for total in smallest_first))
    return replace(axis, max_programs=most)


class _Search:
    def __init__(self, axes: Sequence[Axis], budgets: tuple[int, ...]) -> None:
        self._axes = axes = [_within_budgets(axis, axes, budgets) for axis in axes]
        self._budgets = budgets
        # One more program is worth less than any saving: ties go to the shorter list.
        self._scale = sum(axis.max_programs for axis in axes) + 1
        free = _Bound(axes, self._scale, (0,) * len(budgets))
        priced, self._most = _priced(axes, self._scale, budgets)
        self._bounds = (free, priced)
        self._open: list[tuple[int, int, int, _Label]] = []
        self._kept: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._num_pushed = 0
        self._steps_before = [[0, *accumulate(axis.steps)] for axis in axes]
        # What the axes from this one on take at least: their last programs.
        self._least_used = [(0,) * len(budgets)]
        for axis in reversed(axes):
            self._least_used.append(_sum(self._least_used[-1], axis.used[-1]))
        self._least_used.reverse()

    def run(self) -> list[Choice] | None:
        self._push(_Label(0, 0, 0, 0, (0,) * len(self._budgets), None))
        while self._open:
            label = heapq.heappop(self._open)[-1]
            if label.axis == len(self._axes):
                return self._choices(label)
            if self._is_dominated(label):
                continue
            for extended in self._extensions(label):
                self._push(extended)
        return None

    def _extensions(self, label: _Label) -> Iterator[_Label]:
        axis, before = self._axes[label.axis], self._steps_before[label.axis]
        last = len(axis.candidates)
        only_last = label.count + 1 == axis.max_programs
        for j in range(last - 1 if only_last else label.at, last):
            steps = before[j + 1] - before[label.at]
            cost = label.cost + axis.costs[j] * steps * self._scale + 1
            used = _sum(label.used, axis.used[j])
            if j + 1 == last:
                yield _Label(label.axis + 1, 0, 0, cost, used, label)
            else:
                yield _Label(label.axis, j + 1, label.count + 1, cost, used, label)

    def _push(self, label: _Label) -> None:
        least = _sum(label.used, self._least_used[label.axis])
        if not _keeps(least, self._budgets):
            return
        left = tuple(b - u for b, u in zip(self._budgets, label.used, strict=True))
        estimate = label.cost + max(bound(label, left) for bound in self._bounds)
        if estimate > self._most:
            return
        # Ties by the order of making, which is the same on every run.
        self._num_pushed += 1
        heapq.heappush(self._open, (estimate, -label.axis, self._num_pushed, label))

    def _is_dominated(self, label: _Label) -> bool:
        mine = (label.cost, label.count, *label.used)
        kept = self._kept.setdefault((label.axis, label.at), [])
        if any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in kept):
            return True
        kept.append(mine)
        return False

    def _choices(self, label: _Label) -> list[Choice]:
        lists: list[list[int]] = [[] for _ in self._axes]
        here: _Label | None = label
        while here is not None and here.parent is not None:
            axis = self._axes[here.parent.axis]
            closes = here.axis != here.parent.axis
            bucket = axis.candidates[-1 if closes else here.at - 1]
            lists[here.parent.axis].append(bucket)
            here = here.parent
        return [
            Choice(tuple(reversed(buckets)), cost_of(axis, reversed(buckets)))
            for axis, buckets in zip(self._axes, lists, strict=True)
        ]


def cost_of(axis: Axis, buckets: Iterable[int]) -> int:
    """What all steps cost in `buckets`, which are candidates, the last one among them."""
    chosen = list(buckets)
    cost_at = dict(zip(axis.candidates, axis.costs, strict=True))
    return sum(
        count * cost_at[chosen[bisect_left(chosen, candidate)]]
        for candidate, count in zip(axis.candidates, axis.steps, strict=True)
    )


def _keeps(used: tuple[int, ...], budgets: tuple[int, ...]) -> bool:
    return all(u <= budget for u, budget in zip(used, budgets, strict=True))


def _dot(prices: tuple[int, ...], amounts: tuple[int, ...]) -> int:
    return sum(p * a for p, a in zip(prices, amounts, strict=True))


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
