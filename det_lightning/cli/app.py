"""The commands, their options, and the one place where errors become exit codes.

Nothing here imports torch or lightning; commands that replay or train do so when they run.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from det_lightning.cli import exit_codes, printing
from det_lightning.cli.ledgers import existing_file, is_ledger, ledger_directory, run_path, writable_file
from det_lightning.cli.printing import cause, say_json

app = typer.Typer(
    name="det-lightning",
    help="Training runs as reproducible objects: compare, check and replay their ledgers.",
    epilog="Exit codes: 0 match, 1 diverge, 125 cannot be judged, 129 misuse.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# Typer brings its own copy of click; the base of its BadParameter is the error of every misuse
_UsageError = typer.BadParameter.__bases__[0]


def _ledger(metavar: str, what: str):
    return typer.Argument(metavar=metavar, help=what, callback=ledger_directory, show_default=False)


def _run(metavar: str, what: str):
    return typer.Argument(metavar=metavar, help=what, callback=run_path, show_default=False)


Run = Annotated[str, _ledger("RUN", "Directory of the run's ledger.")]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]
Entry = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="How to build the run, instead of the recorded entry."),
]
World = Annotated[int, typer.Option(min=1, metavar="W", help="World size of the replay.")]
Accumulate = Annotated[
    int | None, typer.Option(min=1, metavar="A", help="Micro-batches per step and rank in the replay.")
]


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.ensure_object(dict)["debug"] = debug


@app.command()
def demo(
    world: Annotated[
        int | None, typer.Option(min=1, max=16, metavar="N", help="Your own split: how many processes.")
    ] = None,
    micro: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Most samples of a micro-batch.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=256, metavar="N", help="Threads of each process.")] = None,
    order: Annotated[
        Literal["natural", "shuffled"], typer.Option(help="How the samples of a step are dealt to processes.")
    ] = "natural",
    impostor: Annotated[Literal["float64"] | None, typer.Option(help="Sum in float64 instead; seen to fail.")] = None,
    flip: Annotated[Literal["secret"] | None, typer.Option(help="Flip a bit at a secret place and find it.")] = None,
    export: Annotated[str | None, typer.Option(metavar="FILE", help="Write the final weights.")] = None,
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="Where the picture is saved.")] = None,
) -> int:
    """Show on this machine what the product promises."""
    from det_lightning.demo import main

    return main(
        world=world,
        micro=micro,
        threads=threads,
        order=order,
        impostor=impostor,
        flip=flip,
        export=export,
        picture=picture,
    )


@app.command()
def bisect(
    a: Annotated[str, _run("A", "Ledger, checkpoint or directory of checkpoints of the reference run.")],
    b: Annotated[str, _run("B", "The same of the candidate run.")],
    recipe_may_differ: Annotated[
        bool, typer.Option("--recipe-may-differ", help="Compare runs that were not meant to be equal.")
    ] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Run the step again on both sides and name the first operation.")
    ] = False,
    entry: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="How to build the runs; twice: that of A, then that of B."),
    ] = None,
    python: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Interpreter to replay with; twice: for A, for B.")
    ] = None,
    cwd: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Directory to replay in, such as a git worktree; twice: for A, for B."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(min=1, metavar="W", help="World size of the replays; by default that of B.")
    ] = None,
    accumulate: Accumulate = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a report for a browser.", callback=writable_file)
    ] = None,
    png: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write its pictures as one image.", callback=writable_file)
    ] = None,
    json: Json = False,
) -> int:
    """Find where run B first differs from run A."""
    from det_lightning.cli import bisect_command
    from det_lightning.cli.side_options import SideOptions

    sides = SideOptions.of(entry=entry, python=python, cwd=cwd, world=world, accumulate=accumulate)
    if not (is_ledger(a) and is_ledger(b)):
        from det_lightning.cli import checkpoint_command

        if html is not None or png is not None:
            raise typer.BadParameter("--html and --png need a ledger on both sides")
        return checkpoint_command.bisect_states(a, b, as_json=json, replay=replay, sides=sides)
    return bisect_command.bisect(
        a, b, recipe_may_differ=recipe_may_differ, as_json=json, replay=replay, sides=sides, html=html, png=png
    )


@app.command()
def diff(
    a: Annotated[str, _ledger("A", "Ledger of the reference run.")],
    b: Annotated[str, _ledger("B", "Ledger of the candidate run.")],
    all_steps: Annotated[bool, typer.Option("--all", help="Read every step of long runs, not a thousand.")] = False,
    json: Json = False,
) -> int:
    """Count how many steps and tensors of two runs differ."""
    from det_lightning.cli import diff_command

    return diff_command.diff(a, b, all_steps=all_steps, as_json=json)


@app.command()
def show(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show the record of this step.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the digest of each tensor.")] = False,
    json: Json = False,
) -> int:
    """Print what a ledger holds."""
    from det_lightning.cli import show_command

    return show_command.show(run, step=step, tensors=tensors, as_json=json)


@app.command()
def verify(
    run: Run,
    chain: Annotated[bool, typer.Option("--chain", help="Check the files only; run nothing.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Replay K single steps instead of the whole run.")
    ] = None,
    world: World = 1,
    accumulate: Accumulate = None,
    entry: Entry = None,
    json: Json = False,
) -> int:
    """Check a ledger and replay its run."""
    from det_lightning.cli import verify_command

    return verify_command.verify(
        run, chain_only=chain, steps=steps, world=world, accumulate=accumulate, entry=entry, as_json=json
    )


@app.command()
def replay(
    run: Run,
    start: Annotated[int | None, typer.Option("--from", min=0, metavar="K", help="Start after this step.")] = None,
    stop: Annotated[int | None, typer.Option("--to", min=1, metavar="N", help="Stop after this step.")] = None,
    world: World = 1,
    accumulate: Accumulate = None,
    entry: Entry = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Write the ledger of the replay here.")] = None,
) -> int:
    """Run recorded steps again and compare."""
    from det_lightning.cli import verify_command

    return verify_command.replay_steps(
        run, start=start, stop=stop, world=world, accumulate=accumulate, entry=entry, out=out
    )


golden = typer.Typer(help="Keep the bits of a short run in a file, and check them in CI.", no_args_is_help=True)
app.add_typer(golden, name="golden")


@golden.command("record")
def golden_record(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The golden file.", callback=writable_file)],
    entry: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="How to build the run; by default as the file says that is there."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=1000, metavar="N", help="Steps to keep, 5 by default.")
    ] = None,
    arguments: Annotated[str | None, typer.Option(metavar="JSON", help="Keyword arguments of the function.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, metavar="B", help="Samples of one step.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="S", help="Seed of the run, 0 by default.")] = None,
    strategy: Annotated[Literal["det", "auto"] | None, typer.Option(help="det, or auto for stock Lightning.")] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="P", help="As the Trainer takes it, 32-true by default.")
    ] = None,
) -> int:
    """Train a few steps and write their digests to FILE."""
    from det_lightning.cli import golden_command

    return golden_command.record(
        file,
        entry=entry,
        steps=steps,
        arguments=arguments,
        global_batch=global_batch,
        seed=seed,
        strategy=strategy,
        precision=precision,
    )


@golden.command("check")
def golden_check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The golden file.", callback=existing_file)],
    json: Json = False,
) -> int:
    """Train the steps of FILE again and compare."""
    from det_lightning.cli import golden_command

    return golden_command.check(file, as_json=json)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; no exception but a second interrupt leaves this function."""
    debug: dict = {}
    printing.json_told = False
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        command = typer.main.get_command(app)
        code = command.main(args=list(arguments), prog_name="det-lightning", standalone_mode=False, obj=debug)
        sys.stdout.flush()
        return code if isinstance(code, int) else exit_codes.MATCH
    except _UsageError as error:
        error.show()
        return exit_codes.MISUSE
    except (KeyboardInterrupt, typer.Abort):
        return exit_codes.INTERRUPTED
    except (Exception, SystemExit) as error:
        if _stdout_has_no_reader():
            # keep the interpreter from failing once more when it flushes at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        elif debug.get("debug"):
            traceback.print_exc()
        else:
            print(f"error: {cause(error)}", file=sys.stderr)
            print("det-lightning --debug COMMAND ... shows where it came from", file=sys.stderr)
        if "--json" in arguments and not printing.json_told:
            say_json({"verdict": "cannot be judged", "exit_code": exit_codes.CANNOT_JUDGE, "reason": cause(error)})
        return exit_codes.CANNOT_JUDGE


def _stdout_has_no_reader() -> bool:
    """Whether stdout is a pipe whose other end was closed, as by `| head`."""
    poll = select.poll()
    poll.register(sys.__stdout__.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
