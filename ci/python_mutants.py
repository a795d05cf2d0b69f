"""Small mistakes in the Python code, which the tests must notice.

    python ci/python_mutants.py --map                     which tests run which lines; once
    python ci/python_mutants.py --draw 40 --package nn    forty new mutants of extensor/nn
    python ci/python_mutants.py --sample 30               known ones again: what CI runs
    python ci/python_mutants.py --survivors --limit 60    those that no test noticed, again
    python ci/python_mutants.py --show                    killed of all, by package

Cosmic Ray (extra `mutants`) makes the mutants: an operator, a comparison, a number or a condition
is another, a loop has no rounds, a decorator is gone. Not mutated are annotations, `__all__`,
samples of the tests, and text. Nothing changes on the disk: `ci.mutant_plugin` collects a
package's tests once and judges each mutant in a fork, where its function has other code. A mutant
of what runs at import is imported in place of its file, by a process of its own. The tests that
run the mutated line judge it, the fastest first and of each function one before a second, for
`--limit` seconds. Tests of more than `SLOW` seconds are no judges.

ci/python_mutants.json keeps each mutant with the test that noticed it, below its file; a mutant
whose text has gone is left out. What stands in « » becomes `new`. `reason` says why a mutant
changes nothing that a user can see: an equivalent one, which does not count. Exit code 1 unless
all are killed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci.mutant_judges import PACKAGES, ROOT, Mutant, judge_known, judge_new, map_lines

TABLE = ROOT / "ci" / "python_mutants.json"

SWAPS = (
    "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul RShift_LShift LShift_RShift "
    "BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"
)
COMPARISONS = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE Is_IsNot IsNot_Is"
OPERATORS = (
    *(f"ReplaceBinaryOperator_{swap}" for swap in SWAPS.split()),
    *(f"ReplaceComparisonOperator_{swap}" for swap in COMPARISONS.split()),
    "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "AddNot",
    "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer", "RemoveDecorator",
    "ZeroIterationForLoop",
)  # fmt: skip


def known() -> list[Mutant]:
    """The table, each mutant at the line where its text stands today."""
    files = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    table = [unmarked(file, **row) for file, rows in files.items() for row in rows]
    for mutant in table:
        found = mutant.found()
        mutant.line = found[0] if found else mutant.line
    return table


def keep(judged: Sequence[Mutant]) -> None:
    """Write mutants into the table, a line for each; those whose text has gone leave it."""
    rows = {(m.file, m.old, m.new): m for m in (*known(), *judged)}
    there = [mutant for mutant in rows.values() if mutant.source() is not None]
    files: dict[str, list[str]] = {}
    for mutant in sorted(there, key=lambda m: (m.file, m.line, m.new)):
        files.setdefault(mutant.file, []).append(json.dumps(marked(mutant), ensure_ascii=False))
    blocks = [f"{json.dumps(file)}: [\n" + ",\n".join(rows) + "\n]" for file, rows in files.items()]
    TABLE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def marked(mutant: Mutant) -> dict[str, Any]:
    """A mutant's row: its old lines, with marks around what changes."""
    old, new = mutant.old, mutant.new
    if set("«»") & set(old):
        raise ValueError(f"{mutant.file}:{mutant.line}: no marks in mutated lines: {old!r}")
    first = alike(old, new)
    last = alike(old[first:][::-1], new[first:][::-1])
    end = len(old) - last
    row = {"line": mutant.line, "old": f"{old[:first]}«{old[first:end]}»{old[end:]}",
           "new": new[first : len(new) - last]}  # fmt: skip
    return row | {k: v for k, v in (("by", mutant.by), ("reason", mutant.reason)) if v}


def alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def unmarked(file: str, line: int, old: str, new: str, by: str = "", reason: str = "") -> Mutant:
    """The mutant of a row."""
    first, changed, last = re.split("[«»]", old)
    return Mutant(file, line, first + changed + last, first + new + last, by, reason)


# ---- mutants


class _Bare(ast.NodeTransformer):
    """A tree without annotations, and without what only tests read."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        if node.name.endswith("samples") or "Sample" in ast.unparse(node.returns or node.args):
            return None
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if ast.unparse(node.targets[0]) == "__all__" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        only_tests = ("samples", "errors", "checked", "no_vjp")
        node.keywords = [k for k in node.keywords if k.arg not in only_tests]
        name = ast.unparse(node.func)
        if name == "unary_primitive":
            node.args = node.args[:2]  # the third is the samples
        elif name in ("BadInput", "Sample") or name.endswith("samples"):
            node.args, node.keywords = [], []
        return self.generic_visit(node)


def bare(text: str) -> str:
    """What of a file counts."""
    tree = _Bare().visit(ast.parse(text))
    names = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    for node in tree.body:  # a private constant that nothing but samples reads
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.Assign) and name.startswith("_") and names[name] == 1:
            node.value = ast.Constant(0)
    return ast.dump(tree)


def draw(
    package: str, count: int, chance: random.Random, seen: set[tuple[str, ...]]
) -> list[Mutant]:
    """New mutants of a package: each place and operator is as likely as another."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operators = [get_operator(f"core/{name}")() for name in OPERATORS]
    places = []
    for path in sorted((ROOT / PACKAGES[package][0]).rglob("*.py")):
        nodes = list(ast_nodes(get_ast(path.read_text(encoding="utf-8"))))
        for operator in operators:
            total = sum(len(list(operator.mutation_positions(node))) for node in nodes)
            places += [(path, operator, number) for number in range(total)]
    chance.shuffle(places)
    drawn: list[Mutant] = []
    for path, operator, number in places:
        if len(drawn) == count:
            break
        text = path.read_text(encoding="utf-8")
        changed = mutate_code(text, operator, number)
        try:
            if changed is None or bare(changed) == bare(text):
                continue
        except SyntaxError:
            continue
        mutant = difference(str(path.relative_to(ROOT)), text, changed)
        if (mutant.file, mutant.old, mutant.new) not in seen:
            drawn.append(mutant)
    return drawn


def difference(file: str, text: str, changed: str) -> Mutant:
    """The lines that differ."""
    old, new = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    last = 0
    while old[-1 - last] == new[-1 - last]:
        last += 1
    last = min(last, len(old) - first - 1)
    lines = "".join(old[first : len(old) - last]), "".join(new[first : len(new) - last])
    return Mutant(file, first + 1, *lines)


def show(mutants: Sequence[Mutant]) -> None:
    """Killed of all, by package; equivalent ones apart."""
    counts: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for mutant in mutants:
        how = "killed" if mutant.by else "equivalent" if mutant.reason else "survived"
        counts[mutant.package][how] += 1
    for package, count in counts.items():
        total = count["killed"] + count["survived"]
        share = f"{count['killed'] / total:.0%}" if total else "-"
        print(f"{package:<9} killed {count['killed']} of {total} ({share}), "
              f"equivalent {count['equivalent']}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Draw or judge; 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--package", action="append", choices=PACKAGES, help="may be repeated")
    parser.add_argument("--map", action="store_true", help="note which tests run which lines")
    parser.add_argument("--draw", type=int, default=0, help="this many new ones of each package")
    parser.add_argument("--sample", type=int, default=0, help="this many known ones, by the day")
    parser.add_argument("--survivors", action="store_true", help="those of the table")
    parser.add_argument("--show", action="store_true", help="the table in numbers")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of tests for a mutant")
    parser.add_argument("--seed", default=str(date.today()))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args(argv)
    packages = chosen.package or list(PACKAGES)
    table = known()
    of_them = [mutant for mutant in table if mutant.package in packages]
    chance = random.Random(chosen.seed)
    requested: list[Mutant] = []
    if chosen.map:
        map_lines(packages, chosen.jobs)
    if chosen.sample:
        there = [mutant for mutant in of_them if mutant.by and mutant.source()]
        requested += chance.sample(there, min(chosen.sample, len(there)))
    if chosen.survivors:
        requested += [mutant for mutant in of_them if not mutant.by and not mutant.reason]
    seen: set[tuple[Any, ...]] = {(m.file, m.old, m.new) for m in table}
    for package in packages if chosen.draw else ():
        requested += draw(package, chosen.draw, chance, seen)
    judged: Iterator[list[Mutant]]
    if chosen.sample:
        judged = ([mutant] for mutant in judge_known(requested, chosen.jobs))
    else:
        judged = judge_new(requested, chosen.limit, chosen.jobs)
    outcomes: list[Mutant] = []
    for share in judged:
        outcomes += share
        for m in share:
            what = "killed  " if m.by else "SURVIVED"
            print(f"{what} {m.file}:{m.line} {m.new.strip()!r} {m.by}", flush=True)
        if not chosen.sample:
            keep(share)
    if chosen.show:
        show([mutant for mutant in known() if mutant.package in packages])
    survived = sum(not mutant.by for mutant in outcomes)
    print(f"{len(outcomes)} mutants, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
