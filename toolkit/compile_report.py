"""What `nxbucket compile` says when it is done."""

from typing import Any

from nxbucket.compile.build import BuildReport
from nxbucket.compile.cache import CacheChoice
from nxbucket.compile.explain import compile_command
from nxbucket.compile.targets import HLO_TARGET
from nxbucket.toolkit import output
from nxbucket.toolkit.errors import CompileError
from nxbucket.toolkit.spec import DeploySpec


def print_report(
    report: BuildReport, spec: DeploySpec, choice: CacheChoice, wall_s: float, as_json: bool
) -> None:
    if as_json:
        output.print_json(report_json(report, spec, choice, wall_s))
        return
    rows = [("program", "status", "seconds", "bytes", "key")]
    for o in report.outcomes:
        size = str(o.manifest.size_bytes) if o.manifest else "-"
        rows.append((o.name, o.status, f"{o.wall_s:.1f}", size, o.planned.key))
    output.print_table(rows)
    for o in report.failed:
        if o.status == "skipped":
            continue
        if o.status == "unpushed":
            output.print_warning(f"{o.name}: {o.what_failed}")
        else:
            output.print_warning(f"{o.name}: {o.what_failed}; its log, {o.log_path}, ends:")
            output.print_indented(o.log_tail)
        if o.hlo_path is not None:
            output.print_note(f"{o.name}: the HLO it was given is {o.hlo_path}")
        if o.hint is not None:
            output.print_hint(f"{o.name}: {o.hint}")
    if report.failed:
        again = compile_command(spec.path, emulate=report.toolchain.target == HLO_TARGET)
        unpushed = any(o.status == "unpushed" for o in report.failed)
        what = "did not compile, or were not pushed" if unpushed else "did not compile"
        output.print_error(
            CompileError(
                f"{len(report.failed)} of {len(report.outcomes)} programs {what}; "
                f"{report.lock_file} is as it was",
                hint=f"mend that; `{again} --push` looks after only these"
                if unpushed
                else f"mend what the logs say; `{again}` builds only these",
            )
        )
        return
    for name in report.changed:
        output.print_note(f"{name}: its bytes are new, and the lock names them now")
    before, now = report.previous_commit, spec.model_commit
    if before is not None and now is not None and before != now:
        output.print_note(
            f"{spec.model}: {before[:12]} -> {now[:12]}; the lock names the new commit"
        )
    if report.others:
        output.print_note(
            f"{len(report.others)} programs of other shards are not in this cache, so "
            f"{report.lock_file} is as it was; when all are pushed: nxbucket lock {spec.path}"
        )
        return
    state = "written" if report.lock_written else "unchanged"
    output.print_note(f"{report.lock_file} {state}; {len(rows) - 1} programs in {wall_s:.1f} s")


def report_json(
    report: BuildReport, spec: DeploySpec, choice: CacheChoice, wall_s: float
) -> dict[str, Any]:
    return {
        "ok": not report.failed,
        "target": report.toolchain.target,
        "toolchain": dict(report.toolchain.versions),
        "cache_dir": str(choice.root),
        "lock": str(report.lock_file),
        "lock_written": report.lock_written,
        "model_commit": spec.model_commit,
        "previous_commit": report.previous_commit,
        "changed": report.changed,
        "others": list(report.others),
        "wall_s": round(wall_s, 3),
        "programs": [
            {
                "name": o.name,
                "status": o.status,
                "key": o.planned.key,
                "graph_key": o.manifest.graph_key if o.manifest else None,
                "digest": o.manifest.blobs[0].digest if o.manifest else None,
                "size_bytes": o.manifest.size_bytes if o.manifest else None,
                "wall_s": round(o.wall_s, 3),
                "detail": o.detail,
                "hint": o.hint,
                "log": str(o.log_path) if o.log_path else None,
                "hlo": str(o.hlo_path) if o.hlo_path else None,
                "log_tail": o.log_tail if o.status == "failed" else None,
            }
            for o in report.outcomes
        ],
    }
