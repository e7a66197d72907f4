"""`nxbucket plan` and `nxbucket explain`: what would be done, and why it would have to be."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import (
    GraphsOnly,
    Json,
    ModelFile,
    Report,
    examples,
    model_file,
)
from nxbucket.toolkit.errors import NxbucketError, UsageError

if TYPE_CHECKING:
    from nxbucket.compile.build import Plan
    from nxbucket.toolkit.spec import DeploySpec

app = typer.Typer(rich_markup_mode=None)

PROGRAM_NAME = re.compile(r"(prefill|decode)_\w+")


@app.command(
    epilog=examples(
        "nxbucket plan",
        "nxbucket plan model.yaml --json",
        "nxbucket plan model.yaml --report plan.html",
    )
)
def plan(
    model_yaml: ModelFile = None,
    emulate: GraphsOnly = False,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Print every program with its key, cost and state, and what serving will need.

    Nothing is compiled. FLOPs are those of one execution, attention over the padded context
    included. Bytes are those of one rank. A compile time is the recorded one of a hit, or, with ~,
    an estimate.

    Keys of a Neuron target need its compiler, or the lock that names it. Without either, the rest
    is printed.
    """
    print_plan_of(model_yaml, as_json, emulate=emulate, page=report)


def print_plan_of(
    model_yaml: Path | None, as_json: bool, *, emulate: bool, page: Path | None = None
) -> None:
    """Also what `compile --dry-run` prints."""
    with output.errors_as_json(as_json):
        from nxbucket.compile.cache import ArtifactCache, choose_cache
        from nxbucket.compile.compiler import compiler_for
        from nxbucket.toolkit.plan_report import make_plan_report, plan_as_json, print_plan
        from nxbucket.toolkit.report.report_file import check_report, write_report
        from nxbucket.toolkit.spec import load_spec

        if page is not None:
            check_report(page)
        spec = load_spec(model_file(model_yaml))
        choice = choose_cache(spec.artifacts.cache)
        compiler = compiler_for(spec, emulate=emulate)
        report = make_plan_report(spec, ArtifactCache(choice.root), choice, compiler)
        for note in spec.notes:
            output.print_note(note)
        output.print_note(f"cache {choice.root} ({choice.origin})")
        if as_json:
            output.print_json(plan_as_json(report))
        else:
            print_plan(report)
        if page is not None:
            from nxbucket.toolkit.report.plan_page import plan_page

            write_report(page, plan_page(report, notes=spec.notes))
            output.print_note(f"wrote {page}")


@app.command(
    epilog=examples("nxbucket explain", "nxbucket explain model.yaml prefill_s512 decode_b4")
)
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL_YAML] [PROGRAM]...",
            help="The model file, as elsewhere; names of programs, all of them when left out.",
            show_default=False,
        ),
    ] = None,
    emulate: GraphsOnly = False,
    as_json: Json = False,
) -> None:
    """Say why a program is not in the cache: the inputs that differ from the nearest entry's.

    Also why the lock could not be served. Ends in the one command that mends it. Exit 0 if every
    program is there and the lock names them, 1 if not.

    \b
    nxbucket explain model.yaml
    nxbucket explain model.yaml prefill_s512 --json
    """
    with output.errors_as_json(as_json):
        from nxbucket.compile.build import plan
        from nxbucket.compile.cache import ArtifactCache, choose_cache
        from nxbucket.compile.compiler import compiler_for
        from nxbucket.compile.diagnosis import diagnose
        from nxbucket.compile.targets import HLO_TARGET
        from nxbucket.toolkit.explain_report import diagnosis_as_json, print_diagnosis
        from nxbucket.toolkit.plan_report import lack_of
        from nxbucket.toolkit.spec import load_spec

        given, names = _split(words or [])
        spec = load_spec(model_file(given))
        choice = choose_cache(spec.artifacts.cache)
        cache = ArtifactCache(choice.root)
        compiler = compiler_for(spec, emulate=emulate)
        planned = (_plan_served(spec) if emulate else None) or plan(spec, cache, compiler)
        known = [p.name for p in planned.programs]
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{spec.path} has no program {name}", hint=f"it has {', '.join(known)}"
                )
        diagnosis = diagnose(spec, cache, planned, names or known)
        output.print_note(f"cache {choice.root} ({choice.origin})")
        if planned.lacks is not None:
            output.print_note(lack_of(planned.lacks, spec))
        if emulate and planned.toolchain.target != HLO_TARGET:
            output.print_note(
                f"--emulate runs the graphs in the artifacts of {planned.toolchain.target}"
            )
        if as_json:
            target = planned.toolchain.target
            output.print_json(diagnosis_as_json(diagnosis, target, choice))
        else:
            print_diagnosis(diagnosis)
        if not diagnosis.ok:
            raise typer.Exit(1)


def _plan_served(spec: "DeploySpec") -> "Plan | None":
    """The artifacts that `serve --emulate` would run; None if it would refuse.

    They may be a device's, which hold the graphs too, and made by an nxbucket that had other keys.
    """
    from nxbucket.compile.build import Plan
    from nxbucket.compile.cache import Hit
    from nxbucket.compile.outcome import PlannedProgram
    from nxbucket.compile.plan import plan_programs
    from nxbucket.compile.toolchain import Toolchain
    from nxbucket.serve.served import resolve

    try:
        _, served = resolve(spec.path, emulate=True)
        manifests = served.verified_manifests()
    except NxbucketError:
        return None
    keys = {program.name: program.key for program in served.locked.programs}
    planned = [
        PlannedProgram(p, manifests[p.name].inputs, keys[p.name], Hit(manifests[p.name]))
        for p in plan_programs(spec)
    ]
    return Plan(Toolchain(served.target, served.locked.toolchain), planned)


def _split(words: list[str]) -> tuple[Path | None, list[str]]:
    """The first word is the model file, unless it can only be a program's name."""
    if words and (not PROGRAM_NAME.fullmatch(words[0]) or Path(words[0]).exists()):
        return Path(words[0]), words[1:]
    return None, words
