"""Lowering a large plan to HLO on a host without weights or a device: time, memory, temporaries.

    python benchmarks/lowering.py [--segment 8192] [--programs NAME ...]

Llama-3.1-8B's config.json, bfloat16, max_model_len 131072, chunks of up to 8192 tokens: prefill
512, 1024, 2048, 4096, 8192 and decode 1, 2, 4, 8, KV read in segments. Each program is lowered by a
process of its own, as `nxbucket compile` does it.

    seconds    from the program to the canonical bytes
    peak       the most resident memory of that process
    temporary  the largest result of an instruction that is no view and no update in place, counted
               as if nothing were fused: a compiler that fuses needs less
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine_line, version_line

from nxbucket.compile.plan import plan_programs
from nxbucket.toolkit.spec import load_spec

MODEL = Path(__file__).parents[1] / "tests" / "published_models" / "llama-3.1-8b"
MODEL_FILE = """\
model: {model}
target: trn2
max_model_len: 131072
max_num_batched_tokens: 8192
max_num_seqs: 8
num_gpu_blocks_override: 8193
neuron_config:
  num_batched_tokens_buckets: [512, 1024, 2048, 4096, 8192]
  num_seqs_buckets: [1, 2, 4, 8]
  kv_segment_size_buckets: [{segment}]
"""
GOALS = {"peak_mib": 2048, "temporary_mib": 512}
MIB = 1 << 20


def lower_one(model_file: Path, name: str) -> None:
    """In a process of its own: prints one JSON object."""
    import resource
    import time

    from nxbucket.compile.hlo.analysis import analyse, temporaries
    from nxbucket.compile.hlo.compiler import lower_to_hlo
    from nxbucket.compile.hlo.module import read_module

    (program,) = (p for p in plan_programs(load_spec(model_file)) if p.name == name)
    start = time.perf_counter()
    lowered = lower_to_hlo(program)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module = read_module(lowered.graph)
    largest = temporaries(module)[0]
    print(
        json.dumps(
            {
                "name": name,
                "seconds": seconds,
                "peak_mib": peak / MIB,
                "module_kib": len(lowered.graph) / 1024,
                "instructions": sum(analyse(module).opcodes.values()),
                "temporary_mib": largest.num_bytes / MIB,
                "temporary": f"{largest.instruction.name} {largest.instruction.shape}",
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--segment", type=int, default=8192)
    parser.add_argument("--programs", nargs="*")
    parser.add_argument("--lower-one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lower_one:
        lower_one(Path(args.lower_one[0]), args.lower_one[1])
        return
    print(machine_line())
    print(version_line())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.yaml"
        file.write_text(MODEL_FILE.format(model=MODEL, segment=args.segment))
        names = args.programs or [p.name for p in plan_programs(load_spec(file))]
        print(f"\nsegments of {args.segment} tokens")
        print("program         seconds  peak MiB  module KiB  instructions  temporary MiB")
        missed = []
        for name in names:
            command = [sys.executable, __file__, "--lower-one", str(file), name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            row = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{name:<15} {row['seconds']:>7.1f} {row['peak_mib']:>9.0f} "
                f"{row['module_kib']:>11.0f} {row['instructions']:>13} "
                f"{row['temporary_mib']:>14.1f}  {row['temporary']}",
                flush=True,
            )
            missed += [f"{name}: {key}" for key, most in GOALS.items() if row[key] >= most]
    print(f"goals: peak below 2048 MiB, temporary below 512 MiB: {'; '.join(missed) or 'kept'}")


if __name__ == "__main__":
    main()
