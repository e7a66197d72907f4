"""model.lock: which artifacts a model file stands for. Small, sorted JSON, made for git.

Serving always goes through it, so a server needs no compiler and computes no key.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any, get_args

from nxbucket.compile.cache import Corrupt, Hit, Lookup
from nxbucket.compile.canonical import digest_of
from nxbucket.compile.explain import Difference, compile_command, differences
from nxbucket.compile.key import key_inputs
from nxbucket.compile.manifest import Blob, Manifest, blobs_from_json, is_digest
from nxbucket.compile.program import Bucket, BucketProgram, Phase
from nxbucket.compile.toolchain import Toolchain
from nxbucket.toolkit.architecture import Architecture, Rope
from nxbucket.toolkit.errors import CacheError, LockError
from nxbucket.toolkit.spec import DeploySpec
from nxbucket.toolkit.whole_file import write_whole

FORMAT = 2
MAX_LOCK_BYTES = 16 << 20

PROGRAM_KEYS = (
    "target",
    "dtype",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
    "neuron_config",
    "compiler",
)
"""The keys of a model file that decide programs. The others may change without a new lock."""

BUCKET_LISTS = (
    "num_batched_tokens_buckets",
    "num_seqs_buckets",
    "decode_context_length_buckets",
    "kv_segment_size_buckets",
)


@dataclass(frozen=True)
class LockedProgram:
    name: str
    phase: Phase
    size: int
    context_len: int | None
    key: str
    graph_key: str
    blobs: tuple[Blob, ...]

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.phase, self.size, self.context_len)


@dataclass(frozen=True)
class LockedTarget:
    """What one target's programs are, resolved: `num_kv_blocks` includes the null block.

    `decode_context_length_buckets` is without max_model_len, whose programs have no `context_len`.
    """

    num_batched_tokens_buckets: tuple[int, ...]
    num_seqs_buckets: tuple[int, ...]
    decode_context_length_buckets: tuple[int, ...]
    kv_segment_size_buckets: tuple[int, ...]
    num_kv_blocks: int
    toolchain: Mapping[str, str]
    programs: tuple[LockedProgram, ...]


@dataclass(frozen=True)
class Lock:
    """`spec`: the model file, every default filled in. `architecture`: what config.json said."""

    spec: Mapping[str, Any]
    architecture: Mapping[str, Any]
    model_commit: str | None
    targets: Mapping[str, LockedTarget]

    @property
    def spec_digest(self) -> str:
        return spec_digest(self.spec)

    @property
    def programs(self) -> list[tuple[str, LockedProgram]]:
        """Of every target, each with its target's name."""
        return [(name, p) for name, target in self.targets.items() for p in target.programs]


def lock_path(model_file: Path) -> Path:
    """model.yaml -> model.lock, beside it."""
    return model_file.with_suffix(".lock")


def model_file_of(lock_file: Path) -> Path:
    """model.lock -> model.yaml, or model.yml where that is what there is."""
    short = lock_file.with_suffix(".yml")
    long = lock_file.with_suffix(".yaml")
    return short if short.exists() and not long.exists() else long


def spec_digest(resolved: Mapping[str, Any]) -> str:
    return digest_of({key: resolved.get(key) for key in PROGRAM_KEYS})


def locked_program(program: BucketProgram, key: str, manifest: Manifest) -> LockedProgram:
    return LockedProgram(
        program.name,
        program.phase,
        program.size,
        program.context_len,
        key,
        manifest.graph_key,
        manifest.blobs,
    )


def make_lock(
    spec: DeploySpec,
    target: str,
    toolchain: Mapping[str, str],
    programs: list[LockedProgram],
    previous: Lock | None,
) -> Lock:
    """The lock after a complete compile for `target`.

    What `previous` holds for other targets is kept if the model file still means the same to them.
    """
    resolved = _portable(spec)
    architecture = spec.architecture.as_json()
    keep = (
        previous is not None
        and previous.spec_digest == spec_digest(resolved)
        and previous.architecture == architecture
    )
    others = dict(previous.targets) if previous is not None and keep else {}
    neuron = spec.neuron_config
    others[target] = LockedTarget(
        neuron.num_batched_tokens_buckets,
        neuron.num_seqs_buckets,
        neuron.decode_context_length_buckets or (),
        neuron.kv_segment_size_buckets or (),
        spec.num_kv_blocks,
        dict(toolchain),
        tuple(programs),
    )
    return Lock(resolved, architecture, spec.model_commit, others)


def locked_commit(
    lock: Lock, path: Path, model: str, revision: str | None, *, emulate: bool = False
) -> str:
    """The commit a hub id was at when it was compiled: what a server serves, whatever came since.

    Raises LockError if `lock` was made for another model.
    """
    locked = (lock.spec.get("model"), lock.spec.get("revision"))
    if lock.model_commit is not None and locked == (model, revision):
        return lock.model_commit
    was = "a folder" if lock.model_commit is None else _model_at(*locked)
    raise LockError(
        f"{path} was made for {was}, and the model file says {_model_at(model, revision)}",
        hint=compile_command(model_file_of(path), emulate=emulate),
    )


def _model_at(model: Any, revision: Any) -> str:
    return str(model) if revision is None else f"{model} at {revision}"


def check_locked_model(lock: Lock, path: Path, spec: DeploySpec) -> None:
    """Raises LockError if the model file names a hub id that is not the lock's."""
    if spec.model_commit is not None:
        locked_commit(lock, path, spec.model, spec.revision)


def lock_differences(lock: Lock, spec: DeploySpec) -> list[Difference]:
    """Values of the model file and of config.json that are not those `lock` was made from."""
    mine = _portable(spec)
    there, wanted = ({k: made_from.get(k) for k in PROGRAM_KEYS} for made_from in (lock.spec, mine))
    return [
        *differences(there, wanted),
        *differences(lock.architecture, spec.architecture.as_json(), "config.json"),
    ]


def check_lock(lock: Lock, path: Path, spec: DeploySpec, *, emulate: bool = False) -> None:
    """Raises LockError, naming the values that changed, if `lock` was made from something else."""
    changed = lock_differences(lock, spec)
    if changed:
        raise LockError(
            f"{path} was made from another {spec.path.name}; changed since: "
            f"{', '.join(map(str, changed))}",
            hint=compile_command(spec.path, emulate=emulate),
        )
    for name, target in lock.targets.items():
        if edited := _edited_sizes(target, spec):
            raise LockError(
                f"{path}: {', '.join(edited)} of {name} are not {spec.path.name}'s: the lock was "
                "edited",
                hint=compile_command(spec.path, emulate=emulate),
            )


def _edited_sizes(target: LockedTarget, spec: DeploySpec) -> list[str]:
    """What a target says of its sizes beside the spec that it was locked with."""
    lists = [
        name
        for name in BUCKET_LISTS
        if getattr(target, name) != (getattr(spec.neuron_config, name) or ())
    ]
    return lists + ["num_kv_blocks"] * (target.num_kv_blocks != spec.num_kv_blocks)


def program_of(lock: Lock, target: LockedTarget, locked: LockedProgram) -> BucketProgram:
    """The program `locked` has to be, from the rest of the lock."""
    spec = lock.spec
    block_size = spec["block_size"]
    segments = target.kv_segment_size_buckets
    return BucketProgram(
        phase=locked.phase,
        size=locked.size,
        architecture=Architecture.from_json(dict(lock.architecture)),
        dtype=spec["dtype"],
        block_size=block_size,
        max_blocks=ceil((locked.context_len or spec["max_model_len"]) / block_size),
        num_kv_blocks=target.num_kv_blocks,
        context_len=locked.context_len,
        kv_segment_size=segments[0] if segments else None,
    )


def fault_of(lock: Lock, target_name: str, program: LockedProgram, found: Lookup) -> str | None:
    """What is wrong with what the cache has for `program`; None if it is what the lock names.

    The entry must also be of the program, architecture, target and toolchain that the lock speaks
    of: a lock pieced together from two others would serve another model's graph, and well.
    """
    target = lock.targets[target_name]
    wanted = program_of(lock, target, program)
    if program.name != wanted.name:
        return f"{wanted.name} has another name in the lock"
    if isinstance(found, Hit):
        if found.manifest.blobs != program.blobs:
            return f"{program.name} has other bytes than the lock names"
        inputs = key_inputs(wanted, Toolchain(target_name, target.toolchain))
        # What a newer nxbucket, or one beside another torch, calls the same program may be an
        # artifact of an older one.
        odd = [
            str(difference)
            for difference in differences(found.manifest.inputs, inputs)
            if difference.name.partition(".")[0] not in ("format", "program_version", "lowering")
        ]
        if odd:
            return f"{program.name} is another program than the lock describes: {', '.join(odd)}"
        if found.manifest.signature != wanted.signature:
            return f"{program.name} has inputs and outputs that this nxbucket would not give it"
        return None
    if isinstance(found, Corrupt):
        return f"{program.name} is corrupt ({found.reason})"
    return f"{program.name} is missing"


def read_lock(path: Path, *, emulate: bool = False) -> Lock:
    """Raises LockError, with the command that writes one, if there is none or it is malformed.

    `emulate`: that command is to name the flag, because the reader's does.
    """
    rewrite = compile_command(model_file_of(path), emulate=emulate)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise LockError(f"{path}: is not a file", hint=f"remove it, then {rewrite}")
    try:
        with path.open("rb") as f:
            payload = f.read(MAX_LOCK_BYTES + 1)
    except FileNotFoundError as err:
        raise LockError(
            f"{path}: no lock file, so nothing says what to serve", hint=rewrite
        ) from err
    except OSError as err:
        raise LockError(f"{path}: {err.strerror or err}", hint=rewrite) from err
    try:
        if len(payload) > MAX_LOCK_BYTES:
            raise CacheError(f"larger than {MAX_LOCK_BYTES} bytes")
        return _lock_from_json(json.loads(payload))
    except (CacheError, ValueError, RecursionError) as err:
        raise LockError(f"{path}: not a lock file of ours: {err}", hint=rewrite) from err


def write_lock(lock: Lock, path: Path) -> bool:
    """Write atomically; False if the file already says exactly this."""
    payload = json.dumps(_lock_as_json(lock), indent=1, sort_keys=True).encode() + b"\n"
    try:
        if path.is_file() and path.read_bytes() == payload:
            return False
    except OSError:
        pass
    try:
        write_whole(path, payload)
    except OSError as err:
        raise LockError(
            f"{path}: cannot write the lock file: {err.strerror or err}",
            hint="keep the model file in a writable folder",
        ) from err
    return True


def changed_programs(old: Lock | None, new: Lock, target: str) -> list[str]:
    """Names of `target`'s programs whose bytes differ between two locks of the same target."""
    if old is None or target not in old.targets:
        return []
    before = {p.name: p.blobs for p in old.targets[target].programs}
    return [
        p.name
        for p in new.targets[target].programs
        if p.name in before and before[p.name] != p.blobs
    ]


def _portable(spec: DeploySpec) -> dict[str, Any]:
    """The effective model file without what belongs to this host (where its cache is)."""
    return {key: value for key, value in spec.resolved().items() if key != "artifacts"}


def _lock_as_json(lock: Lock) -> dict[str, Any]:
    return {"format": FORMAT, "spec_digest": lock.spec_digest, **asdict(lock)}


def _lock_from_json(raw: Any) -> Lock:
    _check(isinstance(raw, dict), "an object is wanted")
    known = _is_size(raw.get("format")) and raw["format"] == FORMAT
    _check(known, f"format {raw.get('format')!r}; this one reads {FORMAT}")
    wanted = {"format", "spec_digest", *(f.name for f in fields(Lock))}
    _check(set(raw) == wanted, f"missing or unknown fields: {sorted(set(raw) ^ wanted)}")
    spec = raw["spec"]
    _check(isinstance(spec, dict), "`spec` is malformed")
    _check(set(PROGRAM_KEYS) <= set(spec), f"`spec` lacks {sorted(set(PROGRAM_KEYS) - set(spec))}")
    for name in ("block_size", "max_model_len"):
        _check(_is_size(spec[name]), f"`{name}` of `spec`")
    _check(isinstance(spec["dtype"], str), "`dtype` of `spec`")
    _fields(raw["architecture"], Architecture)
    _fields(raw["architecture"]["rope"], Rope)
    Architecture.from_json(raw["architecture"])
    commit = raw["model_commit"]
    _check(commit is None or (isinstance(commit, str) and _is_commit(commit)), "`model_commit`")
    _check(isinstance(raw["targets"], dict), "`targets` is malformed")
    _check(all(name.isprintable() for name in raw["targets"]), "`targets` is malformed")
    targets = {name: _target(value) for name, value in raw["targets"].items()}
    lock = Lock(raw["spec"], raw["architecture"], raw["model_commit"], targets)
    _check(lock.spec_digest == raw["spec_digest"], "`spec` was edited: its digest differs")
    return lock


def _target(raw: Any) -> LockedTarget:
    _fields(raw, LockedTarget)
    for name in BUCKET_LISTS:
        sizes = raw[name]
        _check(isinstance(sizes, list) and all(_is_size(n) for n in sizes), f"`{name}`")
    _check(_is_size(raw["num_kv_blocks"]), "`num_kv_blocks`")
    toolchain = raw["toolchain"]
    _check(isinstance(toolchain, dict), "`toolchain`")
    _check(all(isinstance(v, str) for v in toolchain.values()), "`toolchain`")
    _check(isinstance(raw["programs"], list), "`programs`")
    programs = tuple(_program(p) for p in raw["programs"])
    # 0 stands for max_model_len, because None does not sort.
    bound = sorted((p.phase, p.size, p.context_len or 0) for p in programs)
    contexts = [0, *raw["decode_context_length_buckets"]]
    listed = [("prefill", n, 0) for n in raw["num_batched_tokens_buckets"]]
    listed += [("decode", n, context) for n in raw["num_seqs_buckets"] for context in contexts]
    _check(bound == sorted(listed), "`programs` and the bucket lists disagree")
    lists = {name: tuple(raw[name]) for name in BUCKET_LISTS}
    return LockedTarget(**{**raw, **lists, "programs": programs})


def _program(raw: Any) -> LockedProgram:
    _fields(raw, LockedProgram)
    _check(isinstance(raw["name"], str) and raw["name"].isprintable(), "`name` of a program")
    _check(raw["phase"] in get_args(Phase), "`phase` of a program")
    _check(_is_size(raw["size"]), "`size` of a program")
    context = raw["context_len"]
    _check(context is None or _is_size(context), "`context_len` of a program")
    _check(is_digest(raw["key"]) and is_digest(raw["graph_key"]), "keys of a program")
    return LockedProgram(**{**raw, "blobs": blobs_from_json(raw["blobs"])})


def _fields(raw: Any, cls: type) -> None:
    wanted = {f.name for f in fields(cls)}
    _check(
        isinstance(raw, dict) and set(raw) == wanted,
        f"{cls.__name__}: exactly the fields {', '.join(sorted(wanted))} are wanted",
    )


def _is_commit(text: str) -> bool:
    return len(text) == 40 and set(text) <= set("0123456789abcdef")


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _check(good: bool, reason: str) -> None:
    if not good:
        raise CacheError(reason)
