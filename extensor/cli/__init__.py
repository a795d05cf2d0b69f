"""The command line, ``extensor COMMAND ...``.

A mistake that the user can correct is one line on standard error, and exit code 2. The commands
that train are `extensor.training.cli`, imported when one of them is called.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from extensor.cli.sheet import CommandError, system_problem
from extensor.errors import unknown_name
from extensor.launcher import launched_rank, refuse_ranks

__all__ = ["main"]

COMMANDS = {
    "generate": "language",
    "chat": "language",
    "perplexity": "perplexity",
    "formats": "formats",
    "recipe": "recipe",
    "quantize": "quantize",
    "convert": "convert",
    "advise": "advise",
    "inspect": "files",
    "doctor": "doctor",
    "tune": "tune",
}
"""Own commands, and the modules that hold a function of each name: imported when it is called, so
that a command takes the memory of what it needs."""

ON_RANKS = ("doctor", "formats", "recipe")
"""Own commands that may run on several ranks: they write no file."""

TRAINING = {
    "train": "Train a model under a recipe, such as MXFP4 weights, activations and gradients.",
    "compare": "Train a model with several recipes and seeds; or show finished runs side by side.",
    "report": "Write a page about a run: curves, each layer's error, its values on their grids.",
    "finetune": "Tune a pretrained language model on a text: LoRA or DoRA on packed weights.",
    "observe": "Train with many recipes and seeds from a queue, and gather one page.",
    "plan": "Compute what a step would take on many GPUs, and which way to divide the model.",
    "ptq": "Quantize the model of a finished run under many schemes, without training.",
}
"""Commands of `extensor.training.cli`."""

EXAMPLES = """\
extensor train lenet --recipe mxfp4 --out runs/first     # handwritten digits; no download
extensor report runs/first                               # a page about it
extensor recipe mxfp4 > mine.toml                        # change it, then: --recipe mine.toml
extensor compare lenet --recipes fp32,mxfp8,mxfp4 --seeds 3
extensor advise model.safetensors                        # which format fits which tensor
extensor quantize model.safetensors small.safetensors --format mxfp4
extensor inspect small.safetensors
extensor convert model.gguf model-nvfp4 --layout modelopt-nvfp4
extensor generate SmolLM2-135M-Instruct.gguf "The capital of France is"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for a wrong argument or file, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, rest = words[0], words[1:]
    if name in ("-V", "--version", "version"):
        print(f"extensor {importlib.import_module('extensor').__version__}")
        return 0
    try:
        if name in TRAINING:
            done: int = importlib.import_module("extensor.training.cli").run(name, rest)
            return done
        if name not in COMMANDS:
            raise CommandError(_unknown(name))
        if name not in ON_RANKS and (message := refuse_ranks(name)) is not None:
            if launched_rank():  # rank 0 speaks for all: an exit makes the launcher end the others
                time.sleep(1.0)
                return 2
            raise CommandError(message)
        options = (tyro.conf.FlagCreatePairsOff,)
        tyro.cli(_function(name), prog=f"extensor {name}", args=rest, config=options)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {CommandError(system_problem(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; no half-written file is left", file=sys.stderr)
        return 130
    return 0


def _function(name: str) -> Callable[..., Any]:
    """What runs an own command."""
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"extensor.cli.{COMMANDS[name]}"), name
    )
    return found


def _unknown(name: str) -> str:
    """Message for a first word that is no command: a flag, a model, or a mistyped command."""
    if name.startswith("-"):
        return unknown_name("flag", name, ["--help", "--version"])
    models = importlib.import_module("extensor.training.runs").RUNS
    if name.casefold() in models:
        return f"{name} is a model, not a command; did you mean `extensor train {name.casefold()}`?"
    return unknown_name("command", name, [*TRAINING, *COMMANDS])


def overview() -> str:
    """The help of the whole program."""
    own = {name: (_function(name).__doc__ or "").partition("\n")[0] for name in COMMANDS}
    lines = ["usage: extensor COMMAND [arguments]; extensor COMMAND --help explains one", ""]
    for title, rows in (
        ("train, and look at runs:", TRAINING),
        ("models, files and formats:", own),
    ):
        lines += [title, "", *(f"  {name:<12}{text}" for name, text in rows.items()), ""]
    lines += ["examples:", *(f"  {line}" for line in EXAMPLES.splitlines()), ""]
    return "\n".join([*lines, "extensor --version prints the version."])
