"""Prints the table of docs/hlo.md: `python tests/compile/hlo/mutation_report.py [COUNT [SEED]]`.

COUNT mutants of each program, every kind in turn; all there are when it is left out (minutes).
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hlo_mutants import PROGRAMS, Bench, Judged, mutants_of, sample


def judged(count: int, seed: int) -> Iterable[Judged]:
    for name, program in PROGRAMS.items():
        bench = Bench(name, program)
        chosen = sample(mutants_of(bench.payload), count, seed)
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(bench.judge, chosen)
        print(f"{name}: {len(chosen)} mutants, {len(bench.expected)} cases", file=sys.stderr)


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else sys.maxsize
    results = list(judged(count, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    counts = Counter((j.mutant.kind, str(j.verdict)) for j in results)
    verdicts = ("cases", "lint", "equivalent", "survived")
    print("| kind | mutants | caught by cases | by lint | equivalent | survived |")
    print("|---|---|---|---|---|---|")
    kinds = sorted({j.mutant.kind for j in results})
    for kind in kinds:
        row = [counts[kind, v] for v in verdicts]
        print(f"| {kind} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    total = [sum(counts[kind, v] for kind in kinds) for v in verdicts]
    print(f"| all | {sum(total)} | " + " | ".join(map(str, total)) + " |")
    refused = len([j for j in results if j.verdict == "refused"])
    print(f"\nRefused by XLA and not counted: {refused}.\n")
    print("| equivalent because | mutants |\n|---|---|")
    for why, number in Counter(j.by for j in results if j.verdict == "equivalent").most_common():
        print(f"| {why} | {number} |")
    for j in results:
        if j.verdict == "survived":
            print(f"survived: {j.program}: {j.mutant}: {j.by}: {j.amount:.1e}")


if __name__ == "__main__":
    main()
