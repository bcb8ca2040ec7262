"""The command line: parse, one call, exit code. The work is in `eth_cli.commands`.

Exit codes: 0 done, 2 bad usage or input, 3 infeasible, 4 launch or run failed; 1 is a defect of
this program. Results go to stdout; stderr is for people. No traceback is shown unless asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from eth_cli import __version__, stdout
from eth_cli.buckets import BUCKET_BYTES
from eth_cli.catalogue import DTYPES
from eth_cli.commands import arguments
from eth_cli.commands.options import (
    choice,
    count,
    duration,
    flag,
    fraction,
    number,
    path,
    path_argument,
    size,
    words,
)
from eth_cli.env import EnvVars, is_debug, start_no_blas_threads
from eth_cli.errors import ConfigError, EthError, Fault, InfeasibleError

STRATEGIES = ("hpp", "uneven-layers", "even")
OBJECTIVES = ("step-time", "cost")
RULES = (
    "bound",
    "capacity",
    "dominated",
    "recompute",
    "memory",
    "like-pipelines",
    "like-nodes",
    "price",
)
"""Of `eth_cli.search.pruning`, which is loaded only where one is named."""
GRAD_SYNCS = ("block", "layer", "whole")
REDUCE_DTYPES = ("fp32", "bf16")
BACKENDS = ("local", "ssh", "slurm", "kubernetes")

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""


class CtrlC:
    """Python's own answer to Ctrl-C, which also remembers it.

    In the middle of an import the exception may come out as any other one.
    """

    def __init__(self) -> None:
        self.is_pressed = False

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt."""
        self.is_pressed = True
        raise KeyboardInterrupt


CTRL_C = CtrlC()
"""Signal handler of the process, where `eth_cli.__main__` starts it."""

app = typer.Typer(
    name="eth",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=f"Environment: {EnvVars.DEBUG}=1 shows the traceback of an error, "
    f"{EnvVars.NO_COLOR}=1 turns colours off. "
    "Exit codes: 0 done, 2 bad usage or input, 3 infeasible, 4 launch or run failed.",
)


SPACE, EFFORT = "Which plans", "How long to search"
AGAIN, QUESTIONS = "Planning again", "Questions about the plan"
"""Sections of the help of `eth plan`."""
DATA = "What is trained on"
"""A section of the help of `eth run`."""


CLUSTER = path("--cluster", "C.yaml", "Cluster file: nodes, devices, network.")
PROFILE = path("--profile", "profile.json", "What blocks cost.")
PLAN_OUTPUT = path("--output", "plan.json", "Where to write it.", "-o")
ClusterOption = Annotated[Path, CLUSTER]
OptionalClusterOption = Annotated[
    Path | None, path("--cluster", "C.yaml", "Cluster file, for a plan without its own.")
]
MODEL_HELP = "Preset name, Hugging Face config.json or its folder, or a YAML of the same fields."
BucketSizeOption = Annotated[
    int, size("--bucket-size", "SIZE", "Most gradients in a bucket, per owner, in fp32.")
]
JsonOption = Annotated[bool, flag("--json", "Print the result as JSON to stdout.")]


def _show_version(value: bool) -> None:
    if value:
        stdout.write(f"eth {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Plan and run training of large models over clusters of mixed GPUs."""


@app.command()
def profile(
    cluster: ClusterOption,
    model: Annotated[str, words("--model", "MODEL", MODEL_HELP)],
    seq_len: Annotated[int, count("--seq-len", "N", "Tokens in a sample.")],
    output: Annotated[Path, path("--output", "profile.json", "Where to write it.", "-o")],
    micro_batch_sizes: Annotated[
        str, words("--micro-batch-sizes", "1,2,4", "Samples in a micro-batch.")
    ] = "1,2,4",
    dtype: Annotated[str, choice("--dtype", DTYPES, "Number format to train in.")] = "fp32",
    analytic: Annotated[
        bool, flag("--analytic", "Estimate from data-sheet figures; needs no hardware.")
    ] = False,
) -> None:
    """Measure what each block of a model costs on each device type, and each kind of link."""
    from eth_cli.commands.profile import run_profile

    run_profile(
        cluster_path=cluster,
        model_source=model,
        seq_len=seq_len,
        dtype=dtype,
        micro_batch_sizes=arguments.whole_numbers("--micro-batch-sizes")(micro_batch_sizes),
        analytic=analytic,
        output=output,
    )


@app.command()
def plan(
    cluster: Annotated[Path | None, CLUSTER] = None,
    global_batch_size: Annotated[
        int | None, count("--global-batch-size", "B", "Samples in one optimizer step.")
    ] = None,
    output: Annotated[Path | None, PLAN_OUTPUT] = None,
    profile: Annotated[Path | None, PROFILE] = None,
    model: Annotated[
        str | None,
        words("--model", "MODEL", f"Instead of a profile: estimate one. {MODEL_HELP}"),
    ] = None,
    seq_len: Annotated[
        int | None, count("--seq-len", "N", "With --model: tokens in a sample.")
    ] = None,
    dtype: Annotated[
        str | None, choice("--dtype", DTYPES, "With --model: number format (fp32).")
    ] = None,
    micro_batch_size: Annotated[
        int | None, count("--micro-batch-size", "b", "Samples in a micro-batch; else chosen.")
    ] = None,
    strategy: Annotated[
        str, choice("--strategy", STRATEGIES, "hpp, or one of the two baselines.")
    ] = "hpp",
    compare: Annotated[bool, flag("--compare", "Print all three strategies side by side.")] = False,
    max_pipelines: Annotated[
        int | None, count("--max-pipelines", "N", "At most so many pipelines.", SPACE)
    ] = None,
    tensor_parallel: Annotated[
        str | None,
        words(
            "--tensor-parallel",
            "1,2",
            "Only these tensor-parallel widths; else all that the profile has.",
            SPACE,
        ),
    ] = None,
    no_recompute: Annotated[
        bool, flag("--no-recompute", "No stage recomputes activations.", SPACE)
    ] = False,
    exclude: Annotated[
        list[str] | None,
        words(
            "--exclude",
            "DEVICE|NODE|TYPE",
            "Leave it out of the plan: a0:2, a0 or V100-16. Repeatable.",
            SPACE,
        ),
    ] = None,
    objective: Annotated[
        str, choice("--objective", OBJECTIVES, "What the plan has least of (step-time).", SPACE)
    ] = "step-time",
    max_step_time: Annotated[
        float | None,
        duration("--max-step-time", "2.5s", "With cost: no step may take longer.", SPACE),
    ] = None,
    pin: Annotated[
        list[str] | None,
        words(
            "--pin",
            "'p0: cuts 4,9'",
            "What pipeline 0 has to have: cuts, devices or micro-batches. Repeatable.",
            SPACE,
        ),
    ] = None,
    old_plan: Annotated[
        Path | None, path("--from", "plan.json", "Start from this plan.", panel=AGAIN)
    ] = None,
    lost: Annotated[
        list[str] | None,
        words("--lost", "DEVICE|NODE", "With --from: it is gone: a0:2 or a0. Repeatable.", AGAIN),
    ] = None,
    max_gap: Annotated[
        float | None,
        fraction(
            "--max-gap",
            "5%",
            "Stop once the plan is proved this near to the best possible.",
            EFFORT,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        duration("--time-limit", "10s", "Stop then, with the best plan so far.", EFFORT),
    ] = None,
    no_prune: Annotated[
        list[str] | None,
        words(
            "--no-prune",
            "RULE",
            "Switch a rule of the search off, to see what it saves: " + ", ".join(RULES) + ". "
            "Repeatable.",
            EFFORT,
        ),
    ] = None,
    explain: Annotated[
        bool,
        flag(
            "--explain",
            "Say what limits the step, what memory decides and what would help.",
            QUESTIONS,
        ),
    ] = False,
    what_if: Annotated[
        list[str] | None,
        words(
            "--what-if",
            "+4xL4",
            "Say what the step time becomes with more devices, or -2xT4 less. Repeatable.",
            QUESTIONS,
        ),
    ] = None,
    frontier: Annotated[
        bool, flag("--frontier", "Show step time against the number of devices.", QUESTIONS)
    ] = False,
    frontier_svg: Annotated[
        Path | None,
        path("--frontier-svg", "FILE", "Draw the frontier as SVG.", panel=QUESTIONS),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the pipelines, cuts and shares that train the model fastest on the cluster."""
    start_no_blas_threads()
    from eth_cli.commands.controls import Controls
    from eth_cli.commands.plan import run_plan_command

    run_plan_command(
        cluster_path=cluster,
        profile_path=profile,
        model_source=model,
        seq_len=seq_len,
        dtype=dtype,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        strategy=strategy,
        compare=compare,
        as_json=as_json,
        output=output,
        controls=Controls(
            max_pipelines=max_pipelines,
            tensor_parallel=None
            if tensor_parallel is None
            else arguments.whole_numbers("--tensor-parallel")(tensor_parallel),
            recompute=not no_recompute,
            exclude=tuple(exclude or ()),
            objective=objective,
            max_step_time_s=max_step_time,
            max_gap=max_gap,
            time_limit_s=time_limit,
            no_prune=tuple(no_prune or ()),
            explain=explain,
            old_plan=old_plan,
            lost=tuple(lost or ()),
            pins=tuple(pin or ()),
            what_if=tuple(arguments.changes("--what-if")(text) for text in what_if or ()),
            frontier=frontier,
            frontier_svg=frontier_svg,
        ),
    )


@app.command()
def simulate(
    plan: Annotated[Path, path_argument("plan.json", "A plan, found or hand-made.")],
    cluster: ClusterOption,
    profile: Annotated[Path, PROFILE],
    no_overlap: Annotated[
        bool, flag("--no-overlap", "Start gradient sync only after the whole backward.")
    ] = False,
    bucket_size: BucketSizeOption = BUCKET_BYTES,
    trace: Annotated[
        Path | None, path("--trace", "trace.json", "Write a Chrome trace (Perfetto).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the step time and memory of a plan as given."""
    start_no_blas_threads()
    from eth_cli.commands.simulate import run_simulate

    run_simulate(
        plan_path=plan,
        cluster_path=cluster,
        profile_path=profile,
        overlap=not no_overlap,
        bucket_bytes=bucket_size,
        trace=trace,
        as_json=as_json,
    )


@app.command()
def run(
    plan: Annotated[Path, path_argument("plan.json", "The plan to train with.")],
    steps: Annotated[
        int, count("--steps", "K", "Optimizer steps in all, those before a --resume included.")
    ],
    out: Annotated[Path, path("--out", "RUN_DIR", "Folder of the run.")],
    data: Annotated[
        list[str] | None,
        words("--data", "PATH[=WEIGHT]", "Train on this; else on built-in text. Repeatable.", DATA),
    ] = None,
    tokenizer: Annotated[
        str | None,
        words("--tokenizer", "FILE|bytes", "tokenizer.json; else text is used by bytes.", DATA),
    ] = None,
    text_field: Annotated[
        str, words("--text-field", "NAME", "Where a JSONL record holds its text.", DATA)
    ] = "text",
    ignore_borders: Annotated[
        bool, flag("--ignore-borders", "No document's first token is a label.", DATA)
    ] = False,
    data_cache: Annotated[
        Path | None, path("--data-cache", "DIR", "Folder of the token cache.", panel=DATA)
    ] = None,
    cluster: OptionalClusterOption = None,
    profile: Annotated[
        Path | None, path("--profile", "profile.json", "Profile, for a plan without pacing.")
    ] = None,
    model: Annotated[
        str | None, words("--model", "MODEL", "Model, for a plan without its own.")
    ] = None,
    resume: Annotated[
        bool, flag("--resume", "Go on from the newest checkpoint of RUN_DIR.")
    ] = False,
    seed: Annotated[
        int, count("--seed", "S", "Of initial weights and sample order.", least=0, most=2**63 - 1)
    ] = 0,
    learning_rate: Annotated[float, number("--lr", "X", "Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, count("--warmup", "N", "Steps of linear warm-up.", least=0)] = 0,
    clip: Annotated[float, number("--clip", "X", "Largest global gradient norm.")] = 1.0,
    checkpoint_every: Annotated[
        int,
        count(
            "--checkpoint-every", "N", "Steps between checkpoints; 0: only the last one.", least=0
        ),
    ] = 0,
    keep: Annotated[
        int | None, count("--keep", "N", "Checkpoints that stay, the newest ones; else all.")
    ] = None,
    grad_sync: Annotated[
        str, choice("--grad-sync", GRAD_SYNCS, "When gradients are summed, and how many at once.")
    ] = "block",
    bucket_size: BucketSizeOption = BUCKET_BYTES,
    reduce_dtype: Annotated[
        str, choice("--reduce-dtype", REDUCE_DTYPES, "What gradients are summed in.")
    ] = "fp32",
    shard_optimizer: Annotated[
        bool, flag("--shard-optimizer", "Split optimizer state over those that share blocks.")
    ] = False,
    loss_chunk: Annotated[
        int,
        count("--loss-chunk", "N", "Tokens whose logits exist at a time; 0: all.", least=0),
    ] = 0,
    rehearse: Annotated[
        bool, flag("--rehearse", "Run the plan on this machine with stand-ins (not yet).")
    ] = False,
    backend: Annotated[
        str, choice("--backend", BACKENDS, "Where to launch; only local today.")
    ] = "local",
    dry_run: Annotated[
        bool, flag("--dry-run", "Print what would be started, and start nothing.")
    ] = False,
) -> None:
    """Train by a plan: one worker for each device."""
    from eth_cli.commands.data import data_options
    from eth_cli.commands.run import run_training

    run_training(
        plan_path=plan,
        cluster_path=cluster,
        profile_path=profile,
        model_source=model,
        out=out,
        data=data_options(
            data,
            tokenizer=tokenizer,
            text_field=text_field,
            ignore_borders=ignore_borders,
            cache=data_cache,
        ),
        steps=steps,
        seed=seed,
        learning_rate=learning_rate,
        warmup_steps=warmup,
        clip=clip,
        checkpoint_every=checkpoint_every,
        keep=keep,
        grad_sync=grad_sync,
        bucket_bytes=bucket_size,
        reduce_dtype=reduce_dtype,
        shard_optimizer=shard_optimizer,
        loss_chunk=loss_chunk,
        resume=resume,
        rehearse=rehearse,
        backend=backend,
        dry_run=dry_run,
    )


@app.command()
def report(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "Folder of a run.")],
    against: Annotated[
        Path | None, path("--against", "RUN_DIR", "Another run to compare with.")
    ] = None,
    trace: Annotated[
        Path | None,
        path("--trace", "trace.json", "Write predicted over measured as Chrome trace."),
    ] = None,
    html: Annotated[
        Path | None, path("--html", "FILE", "Write the report as one page for a browser.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show predicted against measured step time of a run, term by term."""
    from eth_cli.commands.report import run_report

    run_report(run_dir=run_dir, against=against, trace=trace, html=html, as_json=as_json)


checkpoint = typer.Typer(help="Show or verify the checkpoints of a run.", no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command("list")
def checkpoint_list(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "Folder of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Show the checkpoints of a run: of which step, how large, complete or damaged."""
    from eth_cli.commands.checkpoint import run_list

    run_list(run_dir=run_dir, as_json=as_json)


@checkpoint.command("verify")
def checkpoint_verify(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "Folder of a run.")],
    step: Annotated[
        int | None, count("--step", "N", "Only the one after this step.", least=0)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read all bytes of checkpoints and hold them against what was written."""
    from eth_cli.commands.checkpoint import run_verify

    run_verify(run_dir=run_dir, step=step, as_json=as_json)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code. `eth_cli.__main__` is where a process starts."""
    sys.exit(_run(list(sys.argv[1:] if argv is None else argv) or ["--help"]))


def _run(argv: list[str]) -> int:
    from eth_cli.render.console import print_error, print_faults

    try:
        code = _invoke(argv)
    except stdout.ReaderGoneError as error:
        return error.exit_code
    except ConfigError as error:
        if is_debug():
            raise
        print_faults(error.faults)
        return error.exit_code
    except EthError as error:
        if is_debug():
            raise
        hint = error.suggestion if isinstance(error, InfeasibleError) else ""
        print_error(str(error), hint="" if hint in str(error) else hint)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        if CTRL_C.is_pressed:
            print_error("interrupted")
            return INTERRUPTED
        if is_debug():
            raise
        # The command-line library's own usage errors; it does not export their class.
        if hasattr(error, "format_message"):
            if not error.format_message():  # a group without a command has shown its help
                return 0
            print_faults([Fault(file="eth", field="", message=error.format_message())])
            return 2
        if isinstance(error, OSError):
            print_error(f"the system refused: {error}")
            return 1
        print_error(
            f"defect in eth: {type(error).__name__}: {error}; "
            f"{EnvVars.DEBUG}=1 shows where, please report it"
        )
        return 1
    if code == INTERRUPTED:  # The command-line library has turned Ctrl-C into an exit code.
        print_error("interrupted")
    return code


def _invoke(argv: list[str]) -> int:
    """Parse and do. The command-line library itself prints help to stdout, which may fail too."""
    try:
        result = typer.main.get_command(app).main(argv, prog_name="eth", standalone_mode=False)
    except SystemExit:  # The library's way to say so.
        raise stdout.ReaderGoneError("nobody reads stdout") from None
    except OSError:
        stdout.flush()
        raise
    stdout.flush()
    return result if isinstance(result, int) else 0
