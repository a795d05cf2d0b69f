"""`python -m training MODEL ...` trains one model; `python -m training compare MODEL ...` many.

`python -m training generate CHECKPOINT ...` writes text with one.

Values come from, last one wins: the model's row in `RUNS`, the file given by --config, the flags.
With --resume the saved run takes the place of the row, and nothing may contradict it.
What a user can put right ends as one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from extensor.errors import unknown_name
from extensor.io import CheckpointError
from extensor.quant.recipes import ALIASES, RECIPES
from extensor.quant.schemes import SCHEMES
from training.callbacks import LAST
from training.compare import CompareArgs, compare, outcome
from training.config import RunConfig, read_toml
from training.data import DATASETS, DataError
from training.generate import GenerateArgs, write
from training.loop import Interrupted, train
from training.page import ReportArgs, write_page
from training.ptq import PtqArgs, ptq
from training.rundir import CONFIG, UsageError, read_config, read_result
from training.runs import RUNS, defaults
from training.tasks import TASKS

GENERATE_HELP = (
    "Write text with a language model that `python -m training` trained, under the recipe it was "
    "trained with. The same command gives the same text.\n\n"
    "example: python -m training generate runs/gpt/checkpoint.safetensors --prompt 'ROMEO: ' "
    "--tokens 300"
)

REPORT_HELP = (
    "Write one page, report.html, about a run, finished or not: curves, each layer's error, its "
    "operands on their formats' grids, telemetry, the recipe. The page loads nothing.\n\n"
    "example: python -m training report runs/lenet-digits-mxfp4-s0"
)

__all__ = ["TrainArgs", "main", "parse_train"]

PROGRAM = "python -m training"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
DISK_WAY_OUT = (
    "the way out: another --out, or free some space and go on with --resume; what the last "
    "checkpoint holds is safe"
)


@dataclass(frozen=True, kw_only=True)
class TrainArgs(RunConfig):
    """The flags of one run."""

    model: tyro.conf.Suppress[str]
    out: Path | None = None
    """Folder for everything the run leaves; by default runs/<model>-<dataset>-<recipe>-s<seed>."""
    resume: bool = False
    """Go on from the folder's last checkpoint. On the CPU the result is bit for bit that of a run
    that was never interrupted. Flags may be left out, and may not differ."""
    telemetry: int = 0
    """Every N steps, write each layer's saturation, gradient noise and weight oscillation to
    telemetry.jsonl and TensorBoard; 0 never. A recorded step costs about twice another."""
    graph: bool = False
    """With --device cuda: repeat whole steps from a CUDA graph, without Python. Same results."""
    config: Path | None = None
    """TOML file of settings (a run's own config.toml will do); flags override it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.telemetry < 0:
            raise UsageError(f"--telemetry: wanted 0 or more steps, got {self.telemetry}")

    def run(self) -> RunConfig:
        """The run without the flags that say where it lies."""
        return RunConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(RunConfig)})

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self.out if self.out is not None else Path("runs") / self.run().label


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 (a run failed), 2 (usage), 130 (Ctrl-C)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0
    command, rest = args[0], args[1:]
    try:
        if command == "compare":
            return compare_command(rest)
        if command == "generate":
            return generate(rest)
        if command == "ptq":
            return ptq_command(rest)
        if command == "report":
            return report_command(rest)
        if command not in RUNS:
            names = [*RUNS, "compare", "generate", "ptq", "report"]
            raise UsageError(unknown_name("model or command", command, names))
        return train_command(command, rest)
    except (UsageError, DataError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:  # the folder cannot be made, the disk is full
        print(f"error: {error}; {DISK_WAY_OUT}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def make_console() -> Console:
    """Text goes out as it is: names of folders are neither markup nor wrapped."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def train_command(model: str, argv: Sequence[str]) -> int:
    """Train one model."""
    args = parse_train(model, argv)
    config, folder = args.run(), args.folder
    console = make_console()
    finished = read_result(folder)
    if args.resume and finished is not None:
        metric = TASKS[RUNS[model].task].metric
        console.print(f"{folder} is finished: {outcome(metric, finished)}")
        return 0
    try:
        train(
            config,
            folder,
            resume=args.resume,
            console=console,
            telemetry=args.telemetry,
            graph=args.graph,
        )
    except Interrupted:
        again = f"{PROGRAM} {model} --out {shlex.quote(str(folder))} --resume"
        console.print(
            f"interrupted; the finished steps are in {folder / LAST}. Go on with:\n  {again}",
        )
        return EXIT_INTERRUPTED
    return 0


def compare_command(argv: Sequence[str]) -> int:
    """Train a model with several recipes and seeds, and draw the table."""
    if not argv or argv[0] in ("-h", "--help"):
        model = next(iter(RUNS))
        base = {**defaults(model), "model": model}
        argv = ["--help"]
    else:
        model, argv = argv[0], argv[1:]
        base = _base(model, _peek(argv))
    wanted = {f.name for f in dataclasses.fields(CompareArgs)}
    args = _parse(
        CompareArgs,
        f"{PROGRAM} compare {model}",
        argv,
        {name: value for name, value in base.items() if name in wanted},
        _compare_help(),
    )
    return compare(args, make_console())


def generate(argv: Sequence[str]) -> int:
    """Write text with a trained model."""
    args = tyro.cli(
        GenerateArgs,
        prog=f"{PROGRAM} generate",
        description=GENERATE_HELP,
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    print(args.prompt + write(args))
    return 0


def ptq_command(argv: Sequence[str]) -> int:
    """Quantize a trained model under many schemes."""
    args = tyro.cli(
        PtqArgs,
        prog=f"{PROGRAM} ptq",
        description=_ptq_help(),
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    ptq(args, make_console())
    return 0


def report_command(argv: Sequence[str]) -> int:
    """Write a page about a run."""
    args = tyro.cli(
        ReportArgs,
        prog=f"{PROGRAM} report",
        description=REPORT_HELP,
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    make_console().print(str(write_page(args)))
    return 0


def parse_train(model: str, argv: Sequence[str]) -> TrainArgs:
    """Flags, the TOML file and the defaults, put together and checked.

    Raises:
        UsageError: on bad values from the file, or a resumed run that is not the one asked for.
        SystemExit: 2 on bad flags, 0 after --help.
    """
    peeked = _peek(argv)
    saved = None
    if peeked.resume and peeked.out:
        saved = read_config(Path(peeked.out))
        if saved.model != model:
            raise UsageError(
                f"--resume: {peeked.out} holds a run of {saved.model!r}, not of {model!r}; "
                f"the way out: {PROGRAM} {saved.model} --out {peeked.out} --resume"
            )
    base = _base(model, peeked, saved)
    args = _parse(TrainArgs, f"{PROGRAM} {model}", argv, base, _train_help(model))
    if args.resume and saved is None:
        saved = read_config(args.folder)
    if saved is not None:
        differ = [
            f"{name}: {old!r} there, {getattr(args, name)!r} here"
            for name, old in saved.as_dict().items()
            if getattr(args, name) != old
        ]
        if differ:
            raise UsageError(
                f"--resume: {args.folder} holds another run ({'; '.join(differ)}); the way out: "
                "leave those flags out, or train anew into another --out"
            )
    return args


def _peek(argv: Sequence[str]) -> argparse.Namespace:
    """The few flags that decide what the defaults of the others are."""
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    for flag in ("--dataset", "--config", "--out"):
        parser.add_argument(flag)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_known_args(list(argv))[0]


def _base(model: str, peeked: argparse.Namespace, saved: RunConfig | None = None) -> dict[str, Any]:
    """The values that hold where no flag says otherwise."""
    known = [field.name for field in dataclasses.fields(RunConfig)]
    try:
        from_file = read_toml(Path(peeked.config), known) if peeked.config else {}
        if from_file.get("model", model) != model:
            raise ValueError(
                f"--config {peeked.config}: is for model {from_file['model']!r}, not {model!r}"
            )
        row = defaults(model, peeked.dataset or from_file.get("dataset"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {**(saved.as_dict() if saved else row), **from_file}


def _parse(cls: Any, program: str, argv: Sequence[str], base: dict[str, Any], text: str) -> Any:
    try:
        default = cls(**base)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return tyro.cli(
        cls,
        prog=program,
        description=text,
        args=list(argv),
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _rows(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, "", *(f"  {name:<{width}}  {doc}" for name, doc in rows.items())])


def _recipe_rows() -> str:
    short = {full: f" (also: {alias})" for alias, full in ALIASES.items()}
    return _rows(
        "recipes (--recipe), which precision each GEMM operand gets:",
        {name: recipe.doc + short.get(name, "") for name, recipe in RECIPES.items()},
    )


def overview() -> str:
    """The help of the whole program."""
    parts = (
        f"usage: {PROGRAM} MODEL [flags] | {PROGRAM} compare MODEL [flags] | "
        f"{PROGRAM} generate CHECKPOINT [flags] | {PROGRAM} ptq RUN [flags] | "
        f"{PROGRAM} report RUN",
        _rows("models:", {name: run.doc for name, run in RUNS.items()}),
        _rows("data sets (--dataset):", {name: row.doc for name, row in DATASETS.items()}),
        _recipe_rows(),
        "examples:\n\n"
        f"  {PROGRAM} lenet --recipe mxfp4 --out runs/first\n"
        f"  {PROGRAM} lenet --recipe mxfp4 --dataset fashion_mnist --seed 1\n"
        f"  {PROGRAM} lenet --out runs/first --resume\n"
        f"  {PROGRAM} compare lenet --recipes fp32,mxfp8,mxfp4,nvfp4 --seeds 3\n"
        f"  {PROGRAM} gpt --out runs/gpt\n"
        f"  {PROGRAM} generate runs/gpt/checkpoint.safetensors --prompt 'ROMEO: '\n\n"
        f"  {PROGRAM} ptq runs/lenet-digits-fp32-s0 --schemes int8,mxfp4,nvfp4\n"
        f"  {PROGRAM} report runs/first\n\n"
        f"all flags: {PROGRAM} lenet --help; {PROGRAM} COMMAND --help",
    )
    return "\n\n".join(parts)


def _train_help(model: str) -> str:
    return "\n\n".join(
        (
            f"Train {RUNS[model].doc}. Weights stay float32; the recipe says in which format each "
            "operand of each matrix product is rounded. Defaults depend on the data set.",
            _recipe_rows(),
            f"example: {PROGRAM} {model} --recipe mxfp4 --seed 1 --out runs/{model}-mxfp4",
            f"The folder then holds {CONFIG}, metrics.jsonl, result.json, tensorboard/, "
            "checkpoint.safetensors (last) and, with --val-share, checkpoint-best.safetensors.",
        )
    )


def _ptq_help() -> str:
    return "\n\n".join(
        (
            "Quantize the model of a finished run, without training, under each scheme, and write "
            "ptq.json, ptq.md and ptq.png: the test metric, the bytes, and each layer's error.",
            _rows("schemes (--schemes):", {name: row.doc for name, row in SCHEMES.items()}),
            f"example: {PROGRAM} ptq runs/lenet-digits-fp32-s0 --schemes int8,fp8_block32,mxfp4",
        )
    )


def _compare_help() -> str:
    return "\n\n".join(
        (
            "Train one model with several recipes and seeds, each run a process of its own, and "
            "write compare.json, compare.md and compare.png. Finished runs are not run again, so "
            "the same command goes on where it was interrupted.",
            _recipe_rows(),
            f"example: {PROGRAM} compare lenet --recipes fp32,mxfp8,mxfp4,nvfp4 --seeds 3",
        )
    )
