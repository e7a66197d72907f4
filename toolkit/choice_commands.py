"""`nxbucket advise` and `simulate`: which buckets, and what a server would do with them."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, ModelFile, Report, examples, model_file
from nxbucket.toolkit.errors import UsageError

app = typer.Typer(rich_markup_mode=None)

TraceOption = typer.Option(
    "--trace",
    metavar="FILE",
    help="Requests, as CSV (arrival_s, prompt_tokens, output_tokens), JSON lines or vLLM's log; or "
    "the name of a shipped trace, e.g. azure_conv_2023.",
    show_default=False,
)
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        help="Prompt tokens per step at most; the model file's when left out.",
        show_default=False,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        help="Sequences per step at most; the model file's when left out, 8 without one.",
        show_default=False,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Prompts of that length are refused; the model file's when left out.",
        show_default=False,
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="costs.json: step times, compile times and memory by bucket (`nxbucket calibrate`).",
        show_default=False,
    ),
]
Roofline = Annotated[
    str | None,
    typer.Option(
        "--roofline",
        metavar="TARGET",
        help="Step times from the published peak of trn1, inf2, trn2 or trn3: the least they can "
        "be. Needs a model file.",
        show_default=False,
    ),
]
Grid = Annotated[
    int | None,
    typer.Option(
        "--grid",
        help="Prefill buckets are multiples of it, but for the last; 128 when left out, or less if "
        "the buckets there are now are on a finer one.",
        show_default=False,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", help="Only the first so many of the trace.", show_default=False),
]


Servers = Annotated[
    int,
    typer.Option(
        "--servers",
        help="How many servers the trace's requests are spread over: one gets every so many'th.",
    ),
]


@app.command(
    epilog=examples(
        "nxbucket advise --trace azure_conv_2023 --max-num-batched-tokens 8192 --max-programs 7",
        "nxbucket advise model.yaml --trace requests.csv --write",
        "nxbucket advise model.yaml --metrics http://host:8000 --report advice.html",
        "nxbucket advise model.yaml --trace requests.csv --costs costs.json "
        "--max-compile-minutes 90",
    )
)
def advise(
    model_yaml: ModelFile = None,
    trace: Annotated[str | None, TraceOption] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="URL",
            help="A running server's metrics, or a file of them.",
            show_default=False,
        ),
    ] = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    max_programs: Annotated[
        int | None,
        typer.Option(
            "--max-programs",
            help="Entries of each list at most; as many as it has now (or powers of two have) when "
            "left out, and for decode not more than those.",
            show_default=False,
        ),
    ] = None,
    max_decode_programs: Annotated[
        int | None,
        typer.Option(
            "--max-decode-programs",
            help="Of the decode list; it may be more than it has now.",
            show_default=False,
        ),
    ] = None,
    max_compile_minutes: Annotated[
        float | None,
        typer.Option(
            "--max-compile-minutes",
            help="To compile both lists, one program at a time.",
            show_default=False,
        ),
    ] = None,
    max_program_memory: Annotated[
        str | None,
        typer.Option(
            "--max-program-memory",
            metavar="SIZE",
            help="Device memory that the programs of both lists take, e.g. 2GiB.",
            show_default=False,
        ),
    ] = None,
    grid: Grid = None,
    costs: CostsFile = None,
    roofline: Roofline = None,
    minimize: Annotated[
        Literal["tokens", "time"] | None,
        typer.Option(
            "--minimize",
            help="What the lists make least: time, where step times are given, else tokens.",
            show_default=False,
        ),
    ] = None,
    requests: Requests = None,
    servers: Servers = 1,
    write: Annotated[
        bool,
        typer.Option("--write", help="Put the lists into the model file; its comments stay."),
    ] = False,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Find the bucket lists of least padding, or least time, for the requests of a trace or server.

    They are the best there are for the budget, not a guess: docs/choosing-buckets.md says how. The
    output is YAML, ready to paste; what the lists waste, by how many programs there are, and on
    requests they were not chosen for, is in its comments.
    """
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.choice.advise_report import advice_as_json, advice_text, facts
        from nxbucket.toolkit.choice.advise_run import AdviseOptions, make_advice
        from nxbucket.toolkit.choice.inputs import LimitOptions
        from nxbucket.toolkit.quantities import bytes_of
        from nxbucket.toolkit.report.report_file import check_report, write_report

        limits = LimitOptions(max_num_batched_tokens, max_num_seqs, max_model_len)
        if write and limits.given():
            option = limits.given()[0]
            raise UsageError(
                f"--write, and --{option.replace('_', '-')} is not the model file's",
                hint=f"set {option} in the model file first, and leave the option out",
            )
        memory, wrote = max_program_memory, False
        options = AdviseOptions(
            model_yaml=model_yaml,
            trace=trace,
            metrics=metrics,
            requests=requests,
            limits=limits,
            max_programs=max_programs,
            max_decode_programs=max_decode_programs,
            max_compile_minutes=max_compile_minutes,
            max_program_bytes=None if memory is None else bytes_of(memory, "--max-program-memory"),
            grid=grid,
            costs=costs,
            roofline=roofline,
            minimize=minimize,
            servers=servers,
            api_key=os.environ.get("VLLM_API_KEY"),
        )
        if report is not None:
            check_report(report)
        found, spec = make_advice(options)
        if report is not None:
            from nxbucket.toolkit.report.advise_page import advise_report

            title = f"Buckets for {found.source}"
            head = list(facts(found).items())
            page = advise_report(
                found.prefill, found.decode, found.holdouts, head, title, found.notes
            )
            write_report(report, page)
        if write:
            from nxbucket.toolkit.yaml_edit import write_bucket_lists

            assert spec is not None
            before = spec.path.read_bytes()
            write_bucket_lists(spec.path, found.lists)
            wrote = spec.path.read_bytes() != before
        if as_json:
            output.print_json(advice_as_json(found))
        else:
            output.print_data(advice_text(found))
        for note in found.notes:
            output.print_note(note)
        if report is not None:
            output.print_note(f"wrote {report}")
        if write and spec is not None and not wrote:
            output.print_note(f"{spec.path} has these lists already")
        elif write and spec is not None:
            given = "" if model_yaml is None else shlex.quote(str(model_yaml))
            output.print_note(
                f"wrote the lists into {spec.path}; next: nxbucket compile {given}".rstrip()
            )


@app.command(
    epilog=examples(
        "nxbucket simulate --trace azure_code_2023 --max-num-batched-tokens 8192 "
        "--prefill-buckets 2048,8192 --prefill-buckets 384,1152,1920,2816,4096,6272,8192",
        "nxbucket simulate model.yaml other.yaml --trace requests.csv --costs costs.json",
        "nxbucket simulate model.yaml --trace requests.csv --max-consecutive-prefills 0 "
        "--max-consecutive-prefills 8 --report simulated.html",
    )
)
def simulate(
    trace: Annotated[str, TraceOption],
    model_yaml: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MODEL_YAML]...",
            help="Model files to compare; model.yaml in the current directory when left out.",
            show_default=False,
        ),
    ] = None,
    prefill_buckets: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill-buckets",
            metavar="LIST",
            help="A list to try, e.g. 128,512,2048; several are compared.",
            show_default=False,
        ),
    ] = None,
    decode_buckets: Annotated[
        list[str] | None,
        typer.Option(
            "--decode-buckets",
            metavar="LIST",
            help="A list to try, e.g. 1,4,8; several are compared.",
            show_default=False,
        ),
    ] = None,
    max_consecutive_prefills: Annotated[
        list[int] | None,
        typer.Option(
            "--max-consecutive-prefills",
            help="Prefill steps before decodes get one, 0 for no limit; several are compared.",
            show_default=False,
        ),
    ] = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    costs: CostsFile = None,
    roofline: Roofline = None,
    requests: Requests = None,
    servers: Servers = 1,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Replay a trace through the scheduler's own policy, with no accelerator and no clock.

    Decisions are those of a server, step by step; how long a step takes is from --costs or
    --roofline, or assumed. The same input gives the same output.
    """
    with output.errors_as_json(as_json):
        from nxbucket.toolkit.choice.inputs import LimitOptions
        from nxbucket.toolkit.choice.simulate_report import simulation_as_json, simulations_table
        from nxbucket.toolkit.choice.simulate_run import SimulateOptions, run_simulations
        from nxbucket.toolkit.report.report_file import check_report, write_report

        if report is not None:
            check_report(report)
        done = run_simulations(
            SimulateOptions(
                trace=trace,
                model_files=tuple(model_file(file) for file in model_yaml or ()),
                limits=LimitOptions(max_num_batched_tokens, max_num_seqs, max_model_len),
                prefill_lists=prefill_buckets or (),
                decode_lists=decode_buckets or (),
                max_consecutive_prefills=max_consecutive_prefills or (),
                costs=costs,
                roofline=roofline,
                requests=requests,
                servers=servers,
            )
        )
        sources = list(dict.fromkeys(times.source for times in done.times))
        if report is not None:
            from nxbucket.toolkit.report.simulate_page import simulate_report

            head = [
                ("trace", f"{len(done.trace):,} requests of {done.trace.name}"),
                *(("step times", source) for source in sources),
            ]
            title = f"{done.trace.name}, replayed"
            write_report(report, simulate_report(done.simulations, head, title, done.notes))
        if as_json:
            output.print_json(
                {
                    "ok": True,
                    "trace": done.trace.name,
                    "step_times": sources,
                    "scenarios": [simulation_as_json(s) for s in done.simulations],
                    "notes": done.notes,
                }
            )
        else:
            output.print_table(simulations_table(done.simulations))
        for note in done.notes:
            output.print_note(note)
        for source in sources:
            output.print_note(f"step times {source}")
        if report is not None:
            output.print_note(f"wrote {report}")
