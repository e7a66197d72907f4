"""`nxbucket verify-hlo`: what a Neuron compiler would be given, run on this host and compared."""

from pathlib import Path
from typing import Annotated

import typer

from nxbucket.toolkit import output
from nxbucket.toolkit.arguments import Json, ModelFile, examples, model_file
from nxbucket.toolkit.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@app.command(
    "verify-hlo",
    epilog=examples(
        "nxbucket verify-hlo",
        "nxbucket verify-hlo model.yaml --program prefill_s512 --layers 2",
        "nxbucket verify-hlo model.yaml --json | jq '.programs[] | {name, max_difference}'",
    ),
)
def verify_hlo(
    model_yaml: ModelFile = None,
    program: Annotated[
        list[str] | None,
        typer.Option("--program", metavar="NAME", help="Only this one. May be given again."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of weights and inputs.", min=0, max=(1 << 32) - 1)
    ] = 0,
    layers: Annotated[
        int | None,
        typer.Option("--layers", help="Verify the first so many layers only.", min=1),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run each program's HLO on this host against eager torch; no Neuron compiler is needed.

    Weights are random: none are fetched. In float32 no logit and no written key or value may be
    off by more than 1e-4 (1e-2 in the few cases whose attention scores are made large, a column of
    their own), and the rest of the KV cache must stay as it was, to the last bit. A plan
    of 16 bits is verified in float32 and then in its own dtype, where its error may be 1.5 times
    eager torch's. Exit 1 if a program fails.
    """
    with output.errors_as_json(as_json):
        _verify(model_file(model_yaml), program or [], seed, layers, as_json)


def _verify(file: Path, names: list[str], seed: int, layers: int | None, as_json: bool) -> None:
    from nxbucket.compile.hlo.compiler import importing, lowering_versions
    from nxbucket.compile.hlo.scope import first_layers
    from nxbucket.compile.plan import plan_programs
    from nxbucket.toolkit.hlo_report import check_memory
    from nxbucket.toolkit.spec import load_spec

    spec = load_spec(file)
    planned = plan_programs(spec)
    known = [p.name for p in planned]
    for name in names:
        if name not in known:
            raise UsageError(
                f"{spec.path} has no program {name}", hint=f"it has {', '.join(known)}"
            )
    programs = [p for p in planned if not names or p.name in names]
    of_layers = spec.architecture.num_hidden_layers
    if layers is not None:
        if layers > of_layers:
            raise UsageError(
                f"--layers {layers}: the model of {spec.path} has {of_layers} layers",
                hint=f"give 1 to {of_layers}, or leave --layers out to verify all",
            )
        programs = [first_layers(p, layers) for p in programs]
    lowering_versions()  # Raises if there is no jax.
    check_memory(programs, str(file))
    for note in spec.notes:
        output.print_note(note)

    with importing():
        from nxbucket.compile.hlo.verify import Weights, verify_program
    from nxbucket.toolkit.hlo_report import Counter, print_results, results_as_json

    weights = Weights(programs[0], seed)
    results = []
    with Counter(len(programs)) as counter:
        for p in programs:
            counter.start(p.name)
            results.append(verify_program(p, weights, seed, counter.progress))
            counter.finish(results[-1])
    if as_json:
        output.print_json(results_as_json(spec, results, seed, of_layers))
    else:
        print_results(results, of_layers)
    if not all(r.ok for r in results):
        raise typer.Exit(1)
