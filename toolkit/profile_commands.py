"""`nxbucket profiles`: published configurations, and whether they are what they say."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, examples

if TYPE_CHECKING:
    from nxbucket.toolkit.profile_check import Report
    from nxbucket.toolkit.profiles import Profile

app = typer.Typer(
    help="Published configurations to start from.", no_args_is_help=True, rich_markup_mode=None
)


@app.command(
    "ls",
    epilog=examples(
        "nxbucket profiles ls",
        "nxbucket profiles ls --model '*llama-3.3-70b*' --instance trn2.48xlarge",
        "nxbucket profiles ls --json | jq -r '.profiles[] | select(.plans) | .name'",
    ),
)
def profiles_ls(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Only those for this model: a hub id, a repository's name, or a pattern with *.",
            show_default=False,
        ),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance",
            metavar="INSTANCE",
            help="Only those for this instance type, or target, and those that name none.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the profiles: the best match first with --model, else by name."""
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.profiles import all_profiles, match, matching_instance

        target = None
        if instance is not None:
            from nxbucket.compile.neuron.instances import target_of

            target = target_of(instance)
        found = all_profiles()
        if model is not None:
            found = match(model, instance, target, found)
        elif instance is not None:
            found = matching_instance(found, instance, target)
        if as_json:
            output.print_json({"ok": True, "profiles": [_as_json(profile) for profile in found]})
            return
        if not found:
            output.print_note("no profile matches; `nxbucket profiles ls` has them all")
        head = ("name", "model", "instance", "TP", "prefill buckets", "decode buckets", "today")
        output.print_table([head, *map(_row, found)])


@app.command(
    "show",
    epilog=examples(
        "nxbucket profiles show llama-3.3-70b-fp8-trn2",
        "nxbucket profiles show tinyllama-1.1b-one-block --json | jq .config",
    ),
)
def profiles_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A profile, or a file of one.")],
    as_json: Json = False,
) -> None:
    """Print a profile: its file as it is, or as one JSON object."""
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.profiles import load_profile

        profile = load_profile(name)
        if as_json:
            output.print_json({"ok": True, "file": str(profile.file), **_as_json(profile)})
        else:
            output.print_data(profile.file.read_text(encoding="utf-8").rstrip("\n"))


@app.command(
    "check",
    epilog=examples(
        "nxbucket profiles check",
        "nxbucket profiles check ./my.yaml",
        "nxbucket profiles check --online --json | jq '.profiles[] | select(.findings != [])'",
    ),
)
def profiles_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME_OR_FILE]...",
            help="Profiles, or files of them; all of `nxbucket profiles ls` when left out.",
            show_default=False,
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Ask the hub for config.json of the models; without it only what the hub's cache "
            "on this host has is read.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check profiles: keys, bucket rules, instances, and what they say is refused today.

    Where config.json of a model cannot be read, everything is checked that needs none, and the
    output says so. Exit 1 if there is any finding.
    """
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.profile_check import Checker
        from nxbucket.toolkit.profiles import profile_file, profile_names

        chosen = names or profile_names()
        files = {name: profile_file(name, Path()) for name in chosen}
        checker = Checker(online=online)
        reports = [checker.check(name, file) for name, file in files.items()]
        ok = not any(report.findings for report in reports)
        if as_json:
            output.print_json({"ok": ok, "profiles": [report.as_json() for report in reports]})
        else:
            _print_reports(reports, online=online)
        if not ok:
            raise typer.Exit(1)


def _print_reports(reports: "list[Report]", *, online: bool) -> None:
    rows = [("name", "today", "config.json", "check")]
    for report in reports:
        today = f"refused: {', '.join(report.today)}" if report.today else "plans"
        read = "read" if report.unread is None else "not read"
        verdict = f"{len(report.findings)} findings" if report.findings else "ok"
        if report.unread is not None and not report.today:
            today = "not known"
        rows.append((report.name, today, read, verdict))
    output.print_table(rows)
    for report in reports:
        for finding in report.findings:
            output.print_warning(f"{finding.place}: {finding.code}: {finding.message}")
            output.print_hint(finding.hint)
    unread = [report for report in reports if report.unread is not None]
    reasons = dict.fromkeys(str(report.unread) for report in unread)
    if unread and online:
        for reason in reasons:
            output.print_note(reason)
    number = sum(len(report.findings) for report in reports)
    note = f"{len(reports)} profiles, {number} findings"
    if unread:
        note += (
            f"; config.json of {len(unread)} could not be read, so that what it decides is not "
            "checked there"
        )
        note += "" if online else ": --online asks the hub"
    output.print_note(note)


def _row(profile: "Profile") -> tuple[str, ...]:
    published = profile.published
    lists = profile.neuron_config
    return (
        profile.name,
        published.models[0] if published.models else "-",
        ", ".join(published.instances) or profile.target or "-",
        str(profile.config.get("tensor_parallel_size", 1)),
        _sizes(lists.get("num_batched_tokens_buckets")),
        _sizes(lists.get("num_seqs_buckets")),
        _today(profile),
    )


def _sizes(sizes: Any) -> str:
    return ",".join(map(str, sizes)) if isinstance(sizes, list) else "default"


def _today(profile: "Profile") -> str:
    codes = profile.refused_codes
    return f"refused: {', '.join(codes)}" if codes else "plans"


def _as_json(profile: "Profile") -> dict[str, Any]:
    return {**profile.as_json(), "plans": not profile.refused_codes}
