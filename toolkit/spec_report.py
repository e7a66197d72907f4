"""The effective configuration, as `nxbucket validate` shows it."""

from collections.abc import Iterator
from typing import Any

from nxbucket.toolkit import output
from nxbucket.toolkit.spec import DeploySpec


def print_spec(spec: DeploySpec) -> None:
    rows = [("key", "value", "from")]
    rows += [(key, shown, origin) for key, shown, origin in _rows(spec)]
    output.print_table(rows)
    for note in spec.notes:
        output.print_note(note)


def spec_as_json(spec: DeploySpec) -> dict[str, Any]:
    return {
        "ok": True,
        "file": str(spec.path),
        "config": spec.resolved(),
        "model_commit": spec.model_commit,
        "defaulted": sorted(spec.defaulted),
        "profile": spec.profile,
        "from_profile": sorted(spec.from_profile),
        "effective": {
            "max_num_batched_tokens": spec.effective_max_num_batched_tokens,
            "max_blocks_per_seq": spec.max_blocks_per_seq,
            "num_kv_blocks": spec.num_kv_blocks,
        },
        "notes": list(spec.notes),
    }


def _rows(spec: DeploySpec) -> Iterator[tuple[str, str, str]]:
    config = spec.resolved()
    if spec.profile is not None:
        yield "profile", spec.profile, "file"
    for key, value in config.items():
        if isinstance(value, dict) and key != "serve":
            for name, nested in value.items():
                yield f"{key}.{name}", _shown(nested), _origin(spec, f"{key}.{name}")
        elif key == "serve":
            for name, argument in value.items():
                yield f"serve.{name}", _shown(argument), "file"
        else:
            yield key, _shown(value), _origin(spec, key)
        if key == "revision" and spec.model_commit is not None:
            yield "  commit", spec.model_commit, "hub"
        if key == "max_num_batched_tokens":
            effective = spec.effective_max_num_batched_tokens
            if effective != spec.max_num_batched_tokens:
                yield "  effective", str(effective), "min(max_num_batched_tokens, max_model_len)"


def _origin(spec: DeploySpec, key: str) -> str:
    if key == "dtype" and key in spec.defaulted:
        return "checkpoint"
    if key in spec.from_profile:
        return f"profile {spec.profile}"
    return "default" if key in spec.defaulted else "file"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)
