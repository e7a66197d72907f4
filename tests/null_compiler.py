"""A compiler for tests: milliseconds, no torch, deterministic, and as naughty as a test asks for.

Also the small programs and model files it is fed with.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fakes import model_folder
from nxbucket.compile.canonical import canonical_json
from nxbucket.compile.compiler import CompilerSpec, Lowered
from nxbucket.compile.manifest import BlobRole
from nxbucket.compile.program import BucketProgram
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.architecture import Architecture, Rope

ENVIRONMENT = "NULL_COMPILER"
"""A NullOptions as JSON: how a test reaches the compilers in other processes."""


@dataclass(frozen=True)
class NullOptions:
    """`fail`, `hang`, `spawn` and `kill` hold program names; `events` is a folder for the record.

    `kill`: how often a program's compile kills itself before it goes through. `exit_0`: ends early,
    without an error. `spawn`: starts a child and writes its pid down. `salt`: "random" makes the
    bytes differ from run to run, as those of real compilers do. `hold_mib`: memory that a child of
    the program's compile holds, for longer than it takes to be seen.
    """

    target: str = "cpu-null"
    version: str = "1"
    events: str | None = None
    sleep_s: float = 0.0
    salt: str = ""
    one_graph: bool = False
    fail: tuple[str, ...] = ()
    hang: tuple[str, ...] = ()
    spawn: tuple[str, ...] = ()
    exit_0: tuple[str, ...] = ()
    kill: Mapping[str, int] | None = None
    hold_mib: Mapping[str, int] | None = None

    def environ(self) -> dict[str, str]:
        return {ENVIRONMENT: json.dumps(asdict(self))}


class NullCompiler:
    def __init__(self, march: str | None = None, **options: Any) -> None:
        merged = {**json.loads(os.environ.get(ENVIRONMENT, "{}")), **options}
        assert set(merged) <= {f.name for f in fields(NullOptions)}
        self.options = NullOptions(**merged)

    def toolchain(self) -> Toolchain:
        return Toolchain(self.options.target, {"compiler": "null", "version": self.options.version})

    def lower(self, program: BucketProgram) -> Lowered:
        self._note("lower", program.name)
        graph: dict[str, Any] = {"size": 0} if self.options.one_graph else asdict(program)
        return Lowered(canonical_json(graph), program)

    def compile(self, lowered: Lowered, work_dir: Path) -> dict[BlobRole, Path]:
        name, options = lowered.payload.name, self.options
        self._note("compile", name)
        time.sleep(options.sleep_s)
        if name in options.fail:
            print(f"null compiler: internal error in {name}", flush=True)
            raise RuntimeError(f"cannot compile {name}")
        if mib := (options.hold_mib or {}).get(name):
            code = f"import time; held = b'x' * ({mib} << 20); time.sleep(3)"
            subprocess.run([sys.executable, "-c", code], check=True)
        if name in options.exit_0:
            sys.exit(0)
        if name in options.spawn:
            child = subprocess.Popen(["sleep", "600"])
            self._note("child", name, child.pid)
        if self._compiles(name) <= (options.kill or {}).get(name, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if name in options.hang:
            time.sleep(600)
        salt = os.urandom(8).hex() if options.salt == "random" else options.salt
        binary = work_dir / "program.bin"
        binary.write_bytes(b"null " + salt.encode() + lowered.graph)
        return {"program": binary}

    def _note(self, event: str, name: str, pid: int | None = None) -> None:
        if self.options.events is not None:
            line = f"{event} {name} {pid or os.getpid()}\n"
            with (Path(self.options.events) / "events").open("a") as f:
                f.write(line)

    def _compiles(self, name: str) -> int:
        if self.options.events is None:
            return 1
        return recorded(Path(self.options.events), "compile").count(name)


def recorded(events: Path, event: str) -> list[str]:
    """Names of the programs `event` happened to, in order."""
    return [name for kind, name, _ in _lines(events) if kind == event]


def recorded_pids(events: Path) -> set[int]:
    return {int(pid) for _, _, pid in _lines(events)}


def _lines(events: Path) -> list[list[str]]:
    try:
        return [line.split() for line in (events / "events").read_text().splitlines()]
    except FileNotFoundError:
        return []


def null_spec(**options: Any) -> CompilerSpec:
    return CompilerSpec("null_compiler:NullCompiler", options)


NULL_TOOLCHAIN = NullCompiler().toolchain()

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    rope=Rope("default", 10000.0),
)
LLAMA3_ROPE = Rope("llama3", 500000.0, 8.0, 1.0, 4.0, 64)
YARN_ROPE = Rope(
    "yarn",
    10000.0,
    4.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=1.1,
)


def a_program(
    phase: Literal["prefill", "decode"] = "prefill",
    size: int = 16,
    architecture: Architecture = ARCHITECTURE,
    **changes: Any,
) -> BucketProgram:
    shape = {"dtype": "float32", "block_size": 32, "max_blocks": 4, "num_kv_blocks": 9, **changes}
    return BucketProgram(phase=phase, size=size, architecture=architecture, **shape)


def model_file(
    folder: Path,
    prefill: tuple[int, ...] = (32, 64, 128),
    decode: tuple[int, ...] = (1, 2),
    extra: str = "",
    **config: Any,
) -> Path:
    """model.yaml with these lists, beside a tiny one-layer Llama, its cache in ./cache."""
    model_folder(folder / "llama", **{"num_hidden_layers": 1, **config})
    file = folder / "model.yaml"
    file.write_text(
        f"model: llama\nmax_model_len: 128\nmax_num_batched_tokens: {prefill[-1]}\n"
        f"max_num_seqs: {decode[-1]}\nneuron_config:\n"
        f"  num_batched_tokens_buckets: {list(prefill)}\n  num_seqs_buckets: {list(decode)}\n"
        f"artifacts: {{cache: cache}}\n{extra}"
    )
    return file
