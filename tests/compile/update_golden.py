"""The golden digests: a sample of programs, lowered for cpu and to HLO, and hashed.

    python tests/compile/update_golden.py            write golden_graphs.json
    python tests/compile/update_golden.py --print    print what would be written
    python tests/compile/update_golden.py --print --backwards NAME ...    some, in the other order

Run the first after bumping PROGRAM_VERSION or LOWERING_VERSION, and commit the file with the change
of the graph.
"""

import argparse
import importlib.metadata
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from null_compiler import ARCHITECTURE, LLAMA3_ROPE, YARN_ROPE, a_program

from nxbucket.compile.canonical import sha256_hex
from nxbucket.compile.hlo.compiler import LOWERING_VERSION
from nxbucket.compile.program import PROGRAM_VERSION, BucketProgram
from nxbucket.toolkit.architecture import Rope

GOLDEN = Path(__file__).with_name("golden_graphs.json")

ARCHITECTURES = {
    "plain": ARCHITECTURE,
    "llama3": replace(ARCHITECTURE, rope=LLAMA3_ROPE),
    "tied": replace(ARCHITECTURE, tie_word_embeddings=True),
    "bias": replace(ARCHITECTURE, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mha": replace(ARCHITECTURE, num_key_value_heads=4),
    "two_layers": replace(ARCHITECTURE, num_hidden_layers=2),
    "qwen2": replace(ARCHITECTURE, family="qwen2", qkv_bias=True),
    "qwen3": replace(ARCHITECTURE, family="qwen3", qk_norm=True),
    "window": replace(
        ARCHITECTURE,
        family="mistral",
        num_hidden_layers=2,
        sliding_window=24,
        windowed_layers=(1,),
    ),
    "linear": replace(ARCHITECTURE, rope=Rope("linear", 10000.0, 4.0)),
    "yarn": replace(ARCHITECTURE, rope=YARN_ROPE),
    "longrope": replace(
        ARCHITECTURE,
        rope=Rope("longrope", 10000.0, attention_factor=1.1, short_factor=(1.0, 1.5, 2.0, 3.0)),
    ),
}


def sample() -> dict[str, BucketProgram]:
    programs = {}
    for name, architecture in ARCHITECTURES.items():
        programs[f"prefill-{name}"] = a_program("prefill", 16, architecture)
        programs[f"decode-{name}"] = a_program("decode", 4, architecture)
    programs["decode-one"] = a_program("decode", 1)
    programs["prefill-bfloat16"] = a_program("prefill", 16, dtype="bfloat16")
    programs["decode-bfloat16"] = a_program("decode", 4, dtype="bfloat16")
    segments: dict[str, Any] = {"block_size": 4, "max_blocks": 7, "kv_segment_size": 8}
    programs["prefill-segments"] = a_program("prefill", 16, **segments)
    programs["decode-segments"] = a_program("decode", 4, **segments)
    programs["decode-segments-bfloat16"] = a_program("decode", 4, dtype="bfloat16", **segments)
    programs["decode-context"] = a_program("decode", 4, max_blocks=2, context_len=64)
    return programs


def graph_digest(program: BucketProgram) -> str:
    from nxbucket.compile.cpu import CpuCompiler

    return sha256_hex(CpuCompiler("x86-64-v3").lower(program).graph)


def hlo_digest(program: BucketProgram) -> str:
    from nxbucket.compile.hlo.compiler import lower_to_hlo

    return sha256_hex(lower_to_hlo(program).graph)


def digests(names: list[str]) -> dict[str, Any]:
    import torch

    programs = sample()
    return {
        "program_version": PROGRAM_VERSION,
        "torch": torch.__version__,
        "graphs": {name: graph_digest(programs[name]) for name in names},
        "lowering_version": LOWERING_VERSION,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "hlo": {name: hlo_digest(programs[name]) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden graph digests.")
    parser.add_argument("--print", action="store_true", help="print, and write nothing")
    parser.add_argument("--backwards", action="store_true", help="lower in the other order")
    parser.add_argument("names", nargs="*", help="lower these only (with --print)")
    args = parser.parse_args()
    names = args.names or list(sample())
    found = digests(names[::-1] if args.backwards else names)
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if args.print:
        sys.stdout.write(text)
    else:
        GOLDEN.write_text(text)


if __name__ == "__main__":
    main()
