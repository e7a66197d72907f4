"""What `nxbucket inspect` says of an HLO file. Reads bytes only: no jax, no torch."""

from pathlib import Path
from typing import Any

from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.hlo.analysis import analyse
from nxbucket.compile.hlo.lint import lint
from nxbucket.compile.hlo.module import MAX_BYTES, Module, read_module
from nxbucket.toolkit import output
from nxbucket.toolkit.errors import HloError
from nxbucket.toolkit.plan_report import human, human_bytes


def describe_hlo(path: Path) -> dict[str, Any]:
    """As JSON can hold it. Raises HloError if the file is no HloModuleProto."""
    if path.stat().st_size > MAX_BYTES:
        raise HloError(f"{path} is larger than any module: {path.stat().st_size} bytes")
    payload = path.read_bytes()
    try:
        module = read_module(payload)
        analysis = analyse(module)
    except HloError as err:
        raise HloError(f"{path}: {err.message}", hint=err.hint) from err
    findings = lint(module)
    return {
        "ok": not any(f.severity == "error" for f in findings),
        "file": str(path),
        "kind": "hlo",
        "sha256": sha256_hex(payload),
        "bytes": len(payload),
        "name": module.name,
        "computations": len(module.computations),
        "instructions": sum(analysis.opcodes.values()),
        "ids": list(module.id_range),
        "opcodes": analysis.opcodes,
        "dtypes": analysis.dtypes,
        "flops": analysis.flops,
        "loops": [{"name": x.instruction.name, "rounds": x.rounds} for x in analysis.loops],
        "parameter_bytes": analysis.parameter_bytes,
        "output_bytes": analysis.output_bytes,
        "aliased_bytes": analysis.aliased_bytes,
        "constant_bytes": analysis.constant_bytes,
        "parameters": [{"name": p.name, "shape": str(p.shape)} for p in module.parameters],
        "outputs": [str(shape) for shape in module.outputs],
        "aliases": [
            {"output": a.output, "parameter": _parameter_name(module, a.parameter), "must": a.must}
            for a in module.aliases
        ],
        "largest_temporaries": [
            {
                "name": t.instruction.name,
                "shape": str(t.instruction.shape),
                "bytes": t.num_bytes,
                "alike": t.count,
            }
            for t in analysis.temporaries
        ],
        "findings": [
            {
                "severity": f.severity,
                "rule": f.rule,
                "message": f.message,
                "instruction": f.instruction,
            }
            for f in findings
        ],
    }


def print_hlo(described: dict[str, Any]) -> None:
    d = described
    low, high = d["ids"]
    loops = [str(x["rounds"]) if x["rounds"] is not None else "?" for x in d["loops"]]
    aliased = len(d["aliases"])
    rows = [
        ("module", f"{d['name']}, {d['bytes']} bytes, sha256 {d['sha256']}"),
        (
            "instructions",
            f"{d['instructions']} in {d['computations']} computations; ids {low} to {high}",
        ),
        ("FLOPs", f"{d['flops']} ({human(d['flops'])}), of matrix products"),
        ("loops", f"{len(loops)}, of {', '.join(loops)} rounds" if loops else "none"),
        ("parameters", f"{len(d['parameters'])}, {_exact(d['parameter_bytes'])}"),
        (
            "outputs",
            f"{len(d['outputs'])}, {_exact(d['output_bytes'])}; {aliased} of them "
            f"({_exact(d['aliased_bytes'])}) in a parameter's place",
        ),
        ("constants", _exact(d["constant_bytes"])),
        ("opcodes", _counts(d["opcodes"])),
        ("dtypes", _counts(d["dtypes"])),
    ]
    output.print_table(rows)
    output.print_data("")
    table = [("largest values", "shape", "bytes", "alike")]
    for t in d["largest_temporaries"]:
        table.append((t["name"], t["shape"], str(t["bytes"]), str(t["alike"])))
    output.print_table(table)
    if d["aliases"]:
        output.print_data("")
        alias_rows = [("output", "shape", "in the place of")]
        for a in d["aliases"]:
            number = a["output"]
            shape = d["outputs"][number] if 0 <= number < len(d["outputs"]) else "-"
            alias_rows.append((str(number), shape, a["parameter"]))
        output.print_table(alias_rows)
    output.print_data("")
    errors = sum(f["severity"] == "error" for f in d["findings"])
    for f in d["findings"]:
        where = f"{f['instruction']}: " if f["instruction"] else ""
        output.print_data(f"{f['severity']}: {where}{f['message']} [{f['rule']}]")
    output.print_data(f"lint: {errors} errors, {len(d['findings']) - errors} warnings")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _parameter_name(module: Module, number: int) -> str:
    there = 0 <= number < len(module.parameters)
    return module.parameters[number].name if there else f"parameter {number}"


def _exact(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({human_bytes(num_bytes)})"
