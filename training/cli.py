"""The commands that train: `extensor train MODEL`, `compare`, `observe`, `ptq`, `report`.

In a checkout, `python -m training MODEL` does what `extensor train MODEL` does, and
`python -m training compare` what `extensor compare` does.

Values come from, last one wins: the model's row in `RUNS`, the file given by --config, the flags.
With --resume the saved run takes the place of the row, and nothing may contradict it.
An error that the user can correct is one line on standard error, and exit code 2.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from extensor.cli import main as extensor_main
from extensor.distributed import CollectiveTimeout, RanksDiffer, connect
from extensor.errors import unknown_name
from extensor.extras import missing
from extensor.io import CheckpointError
from extensor.launcher import refuse_ranks
from extensor.quant.recipes import ALIASES, RECIPES
from extensor.quant.schemes import SCHEMES

from .callbacks import Interval
from .choices import OPTIMIZERS, SCHEDULES, describe
from .compare import compare
from .comparison import CompareArgs, CompareFlags
from .config import RunConfig
from .data import DATASETS, DataError
from .finetune import FinetuneArgs, finetune
from .flags import parse, parse_settings, resolve
from .loop import Interrupted
from .memory_limit import parse_bytes
from .ptq import PtqArgs, ptq
from .ranks import end_all, rank_console, say
from .recipe_text import files_named, read_again
from .rundir import CONFIG, UsageError, checkpoint_in, difference, read_config, read_result
from .runs import RUNS
from .settings import Settings
from .side_by_side import side_by_side
from .tasks import TASKS
from .train import train

__all__ = ["TrainFlags", "main", "parse_train"]

PROGRAM = "extensor"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
DISK_WAY_OUT = (
    "the way out: another --out, or free some space and go on with --resume from the last "
    "checkpoint, which is whole if there is one"
)


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The flags of one run that are not its settings."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for everything the run leaves; by default runs/<model>-<dataset>-<recipe>-s<seed>."""
    resume: bool = False
    """Go on from the folder's last checkpoint. On the CPU the result is bit for bit that of a run
    that was never interrupted. Settings may be left out, and may not differ."""
    telemetry: Annotated[Interval, tyro.conf.arg(metavar="N|auto")] = 0
    """Every N steps, write each layer's block scales, saturation, quantization and gradient noise
    and weight oscillation to telemetry.jsonl and TensorBoard; 0 never; auto as often as takes 2% of
    the training. A record takes as long as 2 to 12 steps; the file says what they took."""
    memory: bool = False
    """Print what the run will hold before the first step, and that step's peak after it: weights,
    gradients, states, what each layer keeps for backward. memory.json has the timeline."""
    memory_limit: Annotated[str, tyro.conf.arg(metavar="SIZE")] = ""
    """Such as 8GB: arrays of a step take no more. Before the first step it is measured what each
    numbered part of the model, such as blocks.0, keeps, packs or runs again at least time. Same
    results. The pool of a GPU holds some more; leave room for it."""
    graph: bool = False
    """With --device cuda: capture a step in a CUDA graph and replay it, without Python. Same
    results. On several ranks the sums of gradients are in the graph, too."""
    save_steps: int = 0
    """Every N steps, write the last checkpoint, too; 0 at the end of epochs alone. Where ranks keep
    parts of their own (--shard, error feedback), a rank that dies loses what came after it."""
    until_epoch: int = 0
    """Stop after epoch N as an interrupted run does, to go on with --resume; 0 is to the end."""
    rank_timeout: float = 600.0
    """Seconds that a rank waits for the others before it gives up and says which are missing."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """TOML file of settings (a run's own config.toml will do); flags override it."""

    def __post_init__(self) -> None:
        if not self.rank_timeout > 0:
            raise UsageError(f"--rank-timeout: expected seconds above 0, got {self.rank_timeout}")
        if self.save_steps < 0:
            raise UsageError(f"--save-steps: expected 0 or more steps, got {self.save_steps}")
        if self.until_epoch < 0:
            raise UsageError(f"--until-epoch: expected 0 or more epochs, got {self.until_epoch}")
        if self.telemetry != "auto" and self.telemetry < 0:
            raise UsageError(f"--telemetry: expected 0 or more steps, got {self.telemetry}")
        _ = self.memory_limit_bytes

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit as a number; None without one."""
        if not self.memory_limit:
            return None
        try:
            return parse_bytes(self.memory_limit)
        except ValueError as error:
            raise UsageError(f"--memory-limit: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m training ...`: a command, or the model to train. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run(words[0], words[1:]) if words and words[0] in COMMANDS else run("train", words)


def run(name: str, argv: Sequence[str]) -> int:
    """Run a command; returns the exit code: 0, 1 (a run failed), 2 (usage), 130 (Ctrl-C)."""
    try:
        if name not in ON_RANKS and (message := refuse_ranks(name)) is not None:
            raise UsageError(message)
        return COMMANDS[name](argv)
    except (UsageError, DataError, CheckpointError, RanksDiffer) as error:
        say(f"error: {error}")
        return EXIT_USAGE
    except CollectiveTimeout as error:
        say(f"error: {error}")
        return EXIT_FAILED
    except MemoryError as error:
        reason = str(error)
        if not reason or "bad_alloc" in reason:  # Python says nothing, as where data are read
            reason = f"{'a kernel' if reason else 'Python'} got none from the system"
        say(f"error: out of memory: {reason}")
        return EXIT_FAILED
    except OSError as error:  # the folder cannot be made, the disk is full
        say(f"error: {error}; {DISK_WAY_OUT}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED


def make_console() -> Console:
    """A console that prints text as it is: names of folders are neither markup nor wrapped."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def train_command(argv: Sequence[str]) -> int:
    """Train one model."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    model = _model(argv[0])
    if argv[-1] == "--dataset":
        print(_dataset_rows(RUNS[model].kind))
        return 0
    flags, config, folder = parse_train(model, argv[1:])
    _need("train", "tensorboardX")
    try:
        ranks = connect()
    except ImportError as error:
        raise UsageError(str(error)) from error
    ranks.timeout = flags.rank_timeout
    console = rank_console(make_console(), ranks)
    finished = read_result(folder) if flags.resume else None
    if finished is not None:
        console.print(f"{folder} is finished: {TASKS[RUNS[model].task].metric.outcome(finished)}")
        return 0
    again = f"{PROGRAM} train {model} --out {shlex.quote(str(folder))} --resume"
    last = checkpoint_in(folder, config)
    lost = f"the last checkpoint is in {last}. Go on with:\n  {again}"
    with end_all(ranks, lost=lost):
        try:
            train(
                config,
                folder,
                resume=flags.resume,
                console=console,
                telemetry=flags.telemetry,
                memory=flags.memory,
                memory_limit=flags.memory_limit_bytes,
                graph=flags.graph,
                ranks=ranks,
                save_steps=flags.save_steps,
                until_epoch=flags.until_epoch,
            )
        except Interrupted:
            console.print(f"interrupted; the finished steps are in {last}. Go on with:\n  {again}")
            return EXIT_INTERRUPTED
    return 0


def parse_train(model: str, argv: Sequence[str]) -> tuple[TrainFlags, RunConfig, Path]:
    """The command's own flags, the run, and its folder.

    Raises:
        UsageError: on bad values, or a resumed run that is not the one asked for.
        SystemExit: 2 on flags that do not exist or values of another type, 0 after --help.
    """
    text = (f"{PROGRAM} train {model}", _train_help(model))
    flags, given = parse_settings(TrainFlags, RunConfig, model, argv, text)
    values, explicit = resolve(model, given, flags.config)
    if not flags.resume:
        config = _made(RunConfig, values)
        return flags, config, flags.out or Path("runs") / config.label
    folder = flags.out or Path("runs") / _made(RunConfig, values).label
    saved = read_config(folder)
    if saved.model != model:
        raise UsageError(
            f"--resume: {folder} holds a run of {saved.model!r}, not of {model!r}; the way out: "
            f"{PROGRAM} train {saved.model} --out {folder} --resume"
        )
    if named := files_named(given.get("recipe", ""), given.get("operands", "")):
        try:
            explicit["recipe_text"] = read_again(saved.recipe_text, named)
        except ValueError as error:
            raise UsageError(
                f"--resume: {error}; the way out: leave --recipe and --operands out, the run has "
                "kept its recipes"
            ) from error
    differ = [
        difference(name, getattr(saved, name), value)
        for name, value in explicit.items()
        if value != getattr(saved, name)
    ]
    if differ:
        raise UsageError(
            f"--resume: {folder} holds another run ({'; '.join(differ)}); the way out: leave those "
            "flags out, or train anew into another --out"
        )
    return flags, saved, folder


def _model(name: str) -> str:
    """The name of a model.

    Raises:
        UsageError: for any other word.
    """
    if name not in RUNS:
        raise UsageError(f"{unknown_name('model', name, RUNS)}; {PROGRAM} train --help says more")
    return name


def _need(command: str, *packages: str) -> None:
    """Stop before the work if a package that the command needs at its end is not installed.

    Raises:
        UsageError: naming the package and how to install it.
    """
    for package in packages:
        if (message := missing(f"{PROGRAM} {command}", package)) is not None:
            raise UsageError(message)


def _made(cls: type[Any], values: dict[str, Any]) -> Any:
    """Make a record of settings.

    Raises:
        UsageError: on values that it refuses.
    """
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def compare_command(argv: Sequence[str]) -> int:
    """Train a model with several recipes and seeds, and draw the table; or show finished runs."""
    if argv and argv[0] not in RUNS and (os.sep in argv[0] or Path(argv[0]).is_dir()):
        return _compare_folders(argv)
    named = bool(argv) and argv[0] not in ("-h", "--help")
    model, rest = (_model(argv[0]), argv[1:]) if named else (next(iter(RUNS)), ["--help"])
    if rest[-1:] == ["--dataset"]:
        print(_dataset_rows(RUNS[model].kind))
        return 0
    text = (f"{PROGRAM} compare {model if named else 'MODEL'}", _compare_help(model))
    flags, given = parse_settings(CompareFlags, Settings, model, rest, text)
    values, _ = resolve(model, given, None)
    own = {name: getattr(flags, name) for name in CompareFlags.__dataclass_fields__}
    args: CompareArgs = _made(CompareArgs, {**values, **own})
    _need("compare", "matplotlib", "tensorboardX")
    return compare(args, make_console())


def _compare_folders(argv: Sequence[str]) -> int:
    """A table of finished runs side by side."""
    flags = [word for word in argv if word.startswith("-")]
    if flags or len(argv) < 2:
        raise UsageError(
            f"compare: expected a model, or two or more folders of runs and no flags, got "
            f"{shlex.join(argv)}"
        )
    make_console().print(str(side_by_side([Path(word) for word in argv])))
    return 0


def generate_command(argv: Sequence[str]) -> int:
    """Write text with a trained model: the command of the library."""
    return extensor_main(["generate", *argv])


def finetune_command(argv: Sequence[str]) -> int:
    """Tune a pretrained language model on a text."""
    text = (
        "Tune a pretrained language model on a text: adapters (LoRA or DoRA) on its frozen "
        "weights, packed as they are. Perplexity on the last tenth of the text is measured before, "
        "after, and after the adapters were merged into the weights and rounded again. Writes "
        "adapters.safetensors, finetune.json and the merged model.\n\n"
        f"example: {PROGRAM} finetune SmolLM2-135M-Instruct.gguf shakespeare.txt --scheme "
        "mxfp4_weights --out runs/tuned"
    )
    args = parse(FinetuneArgs, f"{PROGRAM} finetune", argv, text)
    finetune(args, make_console())
    return 0


def ptq_command(argv: Sequence[str]) -> int:
    """Quantize a trained model under many schemes."""
    text = "\n\n".join(
        (
            "Quantize the model of a finished run, without training, under each scheme, and write "
            "ptq.json, ptq.md and ptq.png: the test metric, the bytes, and each layer's error.",
            _rows("schemes (--schemes):", {name: row.doc for name, row in SCHEMES.items()}),
            f"example: {PROGRAM} ptq runs/lenet-digits-fp32-s0 --schemes int8,fp8_block32,mxfp4",
        )
    )
    args = parse(PtqArgs, f"{PROGRAM} ptq", argv, text)
    _need("ptq", "matplotlib")
    ptq(args, make_console())
    return 0


def report_command(argv: Sequence[str]) -> int:
    """Write a page about a run."""
    text = (
        "Write one page, report.html, about a run, finished or not: curves, each layer's error, "
        "its operands on their formats' grids, telemetry, the recipe. The page loads nothing. "
        f"`{PROGRAM} compare RUN RUN` sets runs side by side.\n\n"
        f"example: {PROGRAM} report runs/lenet-digits-mxfp4-s0"
    )
    _need("report", "jinja2")
    from .page import ReportArgs, write_page

    args = parse(ReportArgs, f"{PROGRAM} report", argv, text)
    make_console().print(str(write_page(args)))
    return 0


def observe_command(argv: Sequence[str]) -> int:
    """Run an experiment on recipes from its queue."""
    _need("observe", "jinja2", "tensorboardX")
    from .observe.command import ObserveArgs, observe
    from .observe.experiments import EXPERIMENTS

    text = "\n\n".join(
        (
            "Train a model with many recipes and seeds, from a queue, within a limit of time, and "
            "gather the runs into one page: gaps with standard errors, rates, joules, memory, each "
            "layer's health. The learning rate is found for the first recipe alone. The same "
            "command goes on where it stopped.",
            _rows("experiments:", {name: row.doc for name, row in EXPERIMENTS.items()}),
            f"example: {PROGRAM} observe small --minutes 20",
        )
    )
    return observe(parse(ObserveArgs, f"{PROGRAM} observe", argv, text), make_console())


def plan_command(argv: Sequence[str]) -> int:
    """Compute what a step on many GPUs would take."""
    from .plan.command import PlanArgs, plan

    text = (
        "Compute what a step of a large decoder would take on many GPUs: memory, bytes and time of "
        "every way to divide it that fits, the fastest first, and what FP4 gathering and MX "
        "gradients gain. Rates are measured ones; docs/scaling.md has the model and its error.\n\n"
        f"example: {PROGRAM} plan --model llama-70b --gpus 1024 --link ib400"
    )
    plan(parse(PlanArgs, f"{PROGRAM} plan", argv, text), make_console())
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train_command,
    "compare": compare_command,
    "finetune": finetune_command,
    "generate": generate_command,
    "observe": observe_command,
    "plan": plan_command,
    "ptq": ptq_command,
    "report": report_command,
}
"""By the name that `extensor` and `python -m training` take."""
ON_RANKS = ("train",)
"""Commands that several ranks run together; the others are refused there."""


def _rows(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {doc}" for name, doc in rows.items())])


def _recipe_rows() -> str:
    short = {full: f" (also: {alias})" for alias, full in ALIASES.items()}
    return _rows(
        "recipes (--recipe), which precision each GEMM operand gets:",
        {name: recipe.doc + short.get(name, "") for name, recipe in RECIPES.items()},
    )


def _dataset_rows(kind: str | None = None) -> str:
    fit = {name: row.doc for name, row in DATASETS.items() if kind in (None, row.kind)}
    return _rows("data sets (--dataset):", fit)


def _option_rows() -> str:
    """Every optimizer and schedule, with its options."""
    return "\n\n".join(
        _rows(
            f"{kind}s (--{kind}), and [options] (--{kind}-options NAME=VALUE,...):",
            {name: describe(cls, kind) for name, cls in table.items()},
        )
        for kind, table in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES))
    )


def overview() -> str:
    """The help of `train` without a model: what can be trained, on what, how."""
    parts = (
        f"usage: {PROGRAM} train MODEL [flags]",
        _rows("models:", {name: run.doc for name, run in RUNS.items()}),
        _dataset_rows(),
        _recipe_rows(),
        "examples:\n\n"
        f"  {PROGRAM} train lenet --recipe mxfp4 --out runs/first\n"
        f"  {PROGRAM} train lenet --recipe mxfp4 --dataset fashion_mnist --seed 1\n"
        f"  {PROGRAM} train lenet --optimizer muon --schedule wsd --schedule-options decay=3ep\n"
        f"  {PROGRAM} train lenet --out runs/first --resume\n"
        f"  {PROGRAM} compare lenet --recipes fp32,mxfp8,mxfp4,nvfp4 --seeds 3\n"
        f"  {PROGRAM} train gpt --out runs/gpt\n"
        f"  {PROGRAM} generate runs/gpt/checkpoint.safetensors --prompt 'ROMEO: '\n"
        f"  {PROGRAM} ptq runs/lenet-digits-fp32-s0 --schemes int8,mxfp4,nvfp4\n"
        f"  {PROGRAM} report runs/first",
        f"all flags: {PROGRAM} train lenet --help; a --dataset without a name lists the model's",
    )
    return "\n\n".join(parts)


def _train_help(model: str) -> str:
    return "\n\n".join(
        (
            f"Train {model}, {RUNS[model].doc}. Weights stay float32; the recipe says in which "
            "format each operand of each matrix product is rounded. Defaults depend on the data "
            "set.",
            _dataset_rows(RUNS[model].kind),
            _recipe_rows(),
            _option_rows(),
            f"example: {PROGRAM} train {model} --recipe mxfp4 --seed 1 --out runs/{model}-mxfp4",
            f"The folder then holds {CONFIG}, metrics.jsonl, result.json, tensorboard/, "
            "checkpoint.safetensors (last) and, with --val-share, checkpoint-best.safetensors.",
        )
    )


def _compare_help(model: str) -> str:
    return "\n\n".join(
        (
            "Train one model with several recipes and seeds, each run a process of its own, and "
            "write compare.json, compare.md and compare.png. Finished runs are not run again, so "
            "the same command goes on where it was interrupted. With folders of finished runs in "
            "place of a model it trains nothing, and prints the settings in which they differ and "
            "their results.",
            f"Models: {', '.join(RUNS)}. The defaults below are those of {model}.",
            _dataset_rows(),
            _recipe_rows(),
            _option_rows(),
            f"examples:\n\n  {PROGRAM} compare lenet --recipes fp32,mxfp8,mxfp4,nvfp4 --seeds 3\n"
            f"  {PROGRAM} compare runs/first runs/second",
        )
    )
