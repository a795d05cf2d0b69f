"""Records of benchmarks: a run of some parts keeps what the day's earlier runs measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ci.bench import contest


def written(folder: Path, rows: list[dict[str, Any]], ran: str) -> dict[str, Any]:
    args = argparse.Namespace(load=0.0, max_load=1.0, output=folder)
    contest.write("test", rows, merge="part", args=args, ran=ran)
    (path,) = folder.iterdir()
    return dict(json.loads(path.read_text()))


def test_a_run_of_one_part_replaces_that_part_alone(tmp_path: Path) -> None:
    def row(part: str, name: str, ms: float) -> dict[str, Any]:
        return {"part": part, "name": name, "ms": ms}

    first = [row("linear", "a", 1.0), row("linear", "b", 2.0), row("models", "a", 3.0)]
    assert written(tmp_path, first, "all")["rows"] == first
    again = [row("linear", "a", 1.5), row("linear", "c", 4.0)]
    record = written(tmp_path, again, "--only linear")
    assert record["rows"] == [*again, first[2]]
    assert record["about"]["command"] == "--only linear"
    assert record["about"]["earlier_commands"] == ["all"]
    assert written(tmp_path, again, "all")["about"]["earlier_commands"] == ["--only linear"]


def test_a_busy_machine_writes_nothing(tmp_path: Path) -> None:
    args = argparse.Namespace(load=2.0, max_load=0.5, output=tmp_path)
    contest.write("test", [{"part": 1}], args=args)
    assert not list(tmp_path.iterdir())
