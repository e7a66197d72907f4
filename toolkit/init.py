"""`nxbucket init`: a commented model.yaml for a model, made from its config.json.

It writes the keys a person wants to see first, with lists that fit the model. The text is checked,
as by `nxbucket validate`, before it gets its name.
"""

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

from nxbucket.compile.program import kv_bytes_per_token
from nxbucket.toolkit.architecture import ModelConfig, read_architecture
from nxbucket.toolkit.errors import CacheError, UsageError
from nxbucket.toolkit.hub import is_hub_id
from nxbucket.toolkit.init_limits import Limits, choose_limits, num_weights
from nxbucket.toolkit.model_folder import find_model
from nxbucket.toolkit.spec import DeploySpec, load_spec
from nxbucket.toolkit.spec_reader import DTYPES

WIDTH = 100


def write_model_file(
    model: str,
    output: Path,
    *,
    force: bool = False,
    instance: str | None = None,
    profile: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> DeploySpec:
    """Raises UsageError if `output` is there and not `force`, or what `load_spec` does.

    `say` hears what was taken from a profile.
    """
    output = output.absolute()
    if output.suffix == ".lock":
        raise UsageError(
            f"{output} would be taken for a lock file", hint="give it the ending .yaml"
        )
    if output.exists() and not force:
        raise UsageError(
            f"{output} is there already",
            hint="nxbucket init --force writes over it; --output names another file",
        )
    if not output.parent.is_dir():
        raise UsageError(f"no folder {output.parent}", hint=f"mkdir -p {output.parent}")
    named = _name_in_file(model, output.parent)
    found = find_model(named, None, output.parent)
    config = read_architecture(found.folder)
    limits = choose_limits(
        named, found, config, output, instance=instance, profile=profile, say=say
    )
    text = model_file_text(named, config, found.commit, limits)
    staged = output.with_name(f".{os.getpid()}.{output.name}")
    try:
        staged.write_text(text)
        spec = load_spec(staged)
        staged.replace(output)
    except (OSError, UnicodeError) as err:
        raise CacheError(
            f"{output}: cannot be written: {getattr(err, 'strerror', None) or err}",
            hint="--output names a file in a folder you may write to",
        ) from err
    finally:
        staged.unlink(missing_ok=True)
    return spec.model_copy(update={"path": output})


def _name_in_file(model: str, folder: Path) -> str:
    """A folder is written relative to the file where it lies beside or below it."""
    try:
        given = Path(model).expanduser()
    except RuntimeError as err:
        raise UsageError(f"{model}: no such home folder", hint="give it without `~`") from err
    if not given.is_dir():
        return model
    path = given.absolute()
    if path.is_relative_to(folder):
        return f"./{path.relative_to(folder)}"
    return str(path) if given.is_absolute() else os.path.relpath(path, folder)


def model_file_text(model: str, config: ModelConfig, commit: str | None, limits: Limits) -> str:
    arch = config.architecture
    kv_bytes = limits.kv_blocks * limits.block_size * kv_bytes_per_token(arch, limits.dtype)
    is_hub = commit is not None and is_hub_id(model)
    where = "on the hub; `compile` pins the commit in model.lock" if is_hub else "its folder"
    programs = len(limits.prefill_buckets) + len(limits.decode_buckets)
    rows = [
        _row(f"model: {_quoted(model)}", where),
        *(["# revision: main  # a branch, a tag or a commit"] if is_hub else []),
        _row(f"target: {limits.target}", "what the programs are compiled for"),
        _row(f"dtype: {limits.dtype}", _dtype_comment(config)),
        "",
        "# The limits of the server. Every compiled shape follows from them.",
        _row(
            f"max_model_len: {limits.max_model_len}",
            f"prompt and answer of one request, in tokens; the model's own limit is "
            f"{config.max_position_embeddings}",
        ),
        _row(f"max_num_seqs: {limits.max_num_seqs}", "requests that run at the same time"),
        _row(
            f"max_num_batched_tokens: {limits.max_num_batched_tokens}",
            "prompt tokens per step; a longer prompt is read in chunks",
        ),
        _row(f"block_size: {limits.block_size}", "tokens per KV cache block"),
        *_kv_rows(limits, kv_bytes),
        _row(
            f"enable_prefix_caching: {str(limits.enable_prefix_caching).lower()}",
            "prompts with the same beginning share its blocks",
        ),
        "",
        f"# One program is compiled for each entry, {programs} in all. A step runs in the smallest "
        "one that",
        "# holds it, padded up: more entries are less padding, and more to compile.",
        "neuron_config:",
        "  # Prefill, in tokens. The last entry is min(max_num_batched_tokens, max_model_len).",
        f"  num_batched_tokens_buckets: {limits.prefill_buckets}",
        "  # Decode, in sequences of one token each. The last entry is max_num_seqs.",
        f"  num_seqs_buckets: {limits.decode_buckets}",
        *(
            f"  {key}: {json.dumps(value)}"
            for key, value in (limits.more_neuron_config or {}).items()
        ),
        *(f"{key}: {json.dumps(value)}" for key, value in (limits.more or {}).items()),
        "",
        "# Further arguments of `vllm serve`; what shapes programs is refused here.",
        "# serve:",
        "#   port: 8000",
    ]
    head = [
        "# Next: nxbucket compile, then nxbucket serve. Every key is in docs/model-file.md.",
        f"# {arch.family}, {arch.num_hidden_layers} layers, hidden size {arch.hidden_size}, "
        f"{arch.num_attention_heads} heads over {arch.num_key_value_heads} for keys and values, "
        f"about {_count(num_weights(arch))} weights.",
        *_origin(limits),
        "",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _origin(limits: Limits) -> list[str]:
    if limits.profile is None:
        return []
    published = limits.profile.published
    text = (
        f"Limits and lists start from profile {limits.profile.name}: {published.title} "
        f"({published.source})."
    )
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]


def _kv_rows(limits: Limits, kv_bytes: int) -> list[str]:
    if limits.num_gpu_blocks_override is not None:
        key = f"num_gpu_blocks_override: {limits.num_gpu_blocks_override}"
        return [_row(key, f"KV blocks, vLLM's null block among them; {_gib(kv_bytes)} here")]
    return [
        f"# num_gpu_blocks_override: {limits.kv_blocks + 1}  # KV blocks; left out: every request "
        "at max_model_len,",
        f"#                               which takes {_gib(kv_bytes)} here",
    ]


def _dtype_comment(config: ModelConfig) -> str:
    if config.dtype in DTYPES:
        return "the checkpoint's"
    named = "names none" if config.dtype is None else f"has {config.dtype}"
    return f"float32, bfloat16 or float16; config.json {named}"


def _row(line: str, comment: str) -> str:
    return f"{line}  # {comment}"


def _quoted(model: str) -> str:
    plain = all(c.isalnum() or c in "./_-" for c in model)
    return model if plain else '"' + model.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _count(number: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return str(number)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes >> 20} MiB"
