# SPDX-License-Identifier: Apache-2.0
"""onebasin study: measurements that combine several commands."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from . import common as c
from . import tasks as t

app = typer.Typer(help="Measure what matching and merging do to your models.", no_args_is_help=True)


@app.command()
@c.exits_with_2
@t.measures
def levels(
    a: Annotated[str, typer.Argument(metavar="A", help="The model at lambda 0, and the anchor: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model at lambda 1, matched to A.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder for levels.json, levels.md and levels.png.")],
    examples: t.Examples,
    at: Annotated[
        str, typer.Option("--levels", help=f"Levels of symmetry, out of none, {c.LEVELS}.")
    ] = "none,permutation,paper,full,invertible",
    methods: Annotated[str, typer.Option(help=f"Ways to merge, out of {c.AVERAGES}.")] = c.AVERAGES.replace(" ", ""),
    points: Annotated[int, typer.Option(help="Models on a line, both ends included.")] = 11,
    rescale: c.Rescale = "joint",
    device: c.Device = "cpu",
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure the barrier between A and B at every level of symmetry, with every way to merge."""
    from onebasin.studies.levels import FILES, Compared, study_levels, table
    from onebasin.studies.results import refuse_results

    refuse_results(output, FILES, [a, b, examples.data], overwrite)
    how = Compared(c.words(at) or [], c.words(methods) or [], points, rescale, device, examples.title)
    measured = examples.of(a, [b], device)
    with c.progress(quiet) as tell:
        results = study_levels(a, b, measured, output, how, overwrite=overwrite, tell=tell)
    if c.wants_words(results, json, quiet):
        print(table(results), end="")


@app.command()
@c.exits_with_2
def anatomy(
    a: Annotated[str, typer.Argument(metavar="A", help="The anchor of both alignments: a folder or a hub id.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model that they align to A.")],
    first: Annotated[str, typer.Argument(metavar="ALIGNMENT", help="A file of `onebasin match B A --alignment`.")],
    second: Annotated[str, typer.Argument(metavar="ALIGNMENT", help="Another, such as a learned one.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder for anatomy.json and anatomy.png.")],
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Compare two alignments of B to A: angles between the streams' maps, neurons and heads that changed partners."""
    from onebasin.studies.anatomy import study_anatomy, table

    results = study_anatomy(a, b, first, second, output, overwrite=overwrite)
    if c.wants_words(results, json, quiet):
        print(table(results), end="")


@app.command()
@c.exits_with_2
@t.measures
def simplex(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Three models, matched to one another.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder for simplex.json and simplex.png.")],
    examples: t.Examples,
    points: Annotated[int, typer.Option(help="Models on an edge, both ends included.")] = 6,
    overwrite: c.Overwrite = False,
    json: c.Json = False,
    quiet: c.Quiet = False,
) -> None:
    """Measure and draw the loss over all averages of three models."""
    from onebasin.studies.results import refuse_results
    from onebasin.studies.simplex import FILES, study_simplex

    refuse_results(output, FILES, [*models, examples.data], overwrite)
    measured = examples.of(models[0], models[1:])
    with c.progress(quiet) as tell:
        results = study_simplex(models, measured, output, points=points, overwrite=overwrite, tell=tell)
    if c.wants_words(results, json, quiet):
        ends = ", ".join(f"{loss:.4g}" for loss in results["end_losses"])
        print(f"barrier {results['barrier']:.4g} over the losses {ends}")


def _from_file(name: str, text: str) -> None:
    """Add the command of a study that a YAML file describes."""

    def run(
        config: Annotated[str, typer.Option(help="YAML file: task, models, corpora, and what to compare on them.")],
        output: Annotated[str, typer.Option("--output", "-o", help="The folder of results; studies share one report.")],
        methods: Annotated[str | None, typer.Option(help="Only these of the file's methods [default: all].")] = None,
        metric: Annotated[str | None, typer.Option(help="A metric to use instead of the file's.")] = None,
        overwrite: c.Overwrite = False,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on where a run on the same file and models was stopped.")
        ] = False,
        json: c.Json = False,
        quiet: c.Quiet = False,
    ) -> None:
        from onebasin.studies.results import markdown
        from onebasin.studies.run import Study, run_study

        study = Study.read(name, config, c.words(methods), metric)
        with c.progress(quiet) as tell:
            results = run_study(study, output, overwrite=overwrite, resume=resume, tell=tell, command=c.command_line())
        if json:
            c.print_json(asdict(results))
        elif not quiet:
            for table in results.tables:
                print(f"{table.caption}\n\n{markdown(table)}")
            print(f"{output}/report.html")

    run.__doc__ = text
    app.command(name)(c.exits_with_2(run))


# The studies of `studies.run`; a test compares.
for _name, _text in {
    "fusion-table": "Score every way to merge after every matching, and the models themselves.",
    "ablation": "Measure the effect of leaving attention, FFN or rescaling out of the matching.",
    "distance": "Measure the distance between two models after every way of matching.",
    "landscape": "Measure the loss along the lines and over the planes between models.",
    "runtime": "Time fine-tuning, matching and merging.",
    "layers": "Measure merging with a single layer matched, the last ones, or the first ones.",
}.items():
    _from_file(_name, _text)
