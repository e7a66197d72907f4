"""How a diagnosis reads: what is not there, what differs, and the command that mends it."""

from typing import Any

from nxbucket.compile.cache import CacheChoice
from nxbucket.compile.diagnosis import Diagnosis, ProgramDiagnosis
from nxbucket.toolkit import output


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Programs with the same differences are told of once."""
    groups: dict[tuple[str, ...], list[ProgramDiagnosis]] = {}
    for program in diagnosis.programs:
        groups.setdefault(tuple(_lines(program)), []).append(program)
    for lines, programs in groups.items():
        names = ", ".join(p.name for p in programs)
        output.print_data(f"{names}: {programs[0].outcome}")
        for line in lines[1:]:
            output.print_data(f"  {line}")
    lock = diagnosis.lock
    output.print_data(f"{lock.path.name}: {lock.detail}")
    for difference in lock.differences:
        output.print_data(f"    {difference}")
    for fault in lock.faults:
        output.print_data(f"    {fault}")
    if diagnosis.command:
        output.print_data(f"\nto mend it: {diagnosis.command}")


def _lines(program: ProgramDiagnosis) -> list[str]:
    if program.reason is not None:
        return [program.outcome, program.reason]
    if program.outcome == "hit":
        return [program.outcome]
    nearest = program.nearest
    if nearest is None:
        return [program.outcome, "the cache has no entry to compare with"]
    count = len(nearest.differences)
    noun = "input differs" if count == 1 else "inputs differ"
    return [
        program.outcome,
        f"{count} {noun} from the nearest entry's (there -> wanted):",
        *(f"  {difference}" for difference in nearest.differences),
    ]


def diagnosis_as_json(diagnosis: Diagnosis, target: str, choice: CacheChoice) -> dict[str, Any]:
    lock = diagnosis.lock
    return {
        "ok": diagnosis.ok,
        "target": target,
        "cache_dir": str(choice.root),
        "programs": [_program(p) for p in diagnosis.programs],
        "lock": {
            "path": str(lock.path),
            "state": lock.state,
            "detail": lock.detail,
            "differences": [d.as_json() for d in lock.differences],
            "faults": list(lock.faults),
        },
        "command": diagnosis.command,
    }


def _program(program: ProgramDiagnosis) -> dict[str, Any]:
    nearest = program.nearest
    return {
        "name": program.name,
        "key": program.planned.key,
        "cache": program.outcome,
        "reason": program.reason,
        "nearest": nearest
        and {
            "key": nearest.key,
            "program": nearest.program,
            "differences": [d.as_json() for d in nearest.differences],
        },
    }
