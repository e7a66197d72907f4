"""The difference of two locks, for a person and as JSON."""

from typing import Any

from nxbucket.compile.lock_diff import ChangedProgram, LockDiff
from nxbucket.toolkit import output


def diff_as_json(diff: LockDiff) -> dict[str, Any]:
    return {
        "same": diff.is_empty,
        "settings": [d.as_json() for d in diff.settings],
        "model_commit": list(diff.commits),
        "targets": [
            {
                "target": t.target,
                "added": list(t.added),
                "dropped": list(t.dropped),
                "changed": [
                    {
                        "name": c.name,
                        "why": [d.as_json() for d in c.why],
                        "same_graph": c.same_graph,
                        "same_bytes": c.same_bytes,
                    }
                    for c in t.changed
                ],
            }
            for t in diff.targets
        ],
    }


def print_diff(diff: LockDiff) -> None:
    if diff.is_empty:
        output.print_data("the same")
        return
    for setting in diff.settings:
        output.print_data(f"  {setting}")
    if diff.commits[0] != diff.commits[1]:
        output.print_data(f"  model commit: {diff.commits[0]} -> {diff.commits[1]}")
    for target in diff.targets:
        if target.is_empty:
            continue
        output.print_data(f"{target.target}:")
        for name in target.added:
            output.print_data(f"  + {name}")
        for name in target.dropped:
            output.print_data(f"  - {name}")
        for change in target.changed:
            output.print_data(f"  ~ {change.name}: {_why(change)}")


def _why(change: ChangedProgram) -> str:
    what = "the same bytes under another key" if change.same_bytes else "other bytes"
    if not change.why:
        return f"{what} of the same inputs: it was compiled again"
    graph = "the same graph" if change.same_graph else "another graph"
    return f"{what}, {graph}; {'; '.join(map(str, change.why))}"
