"""Whether all ranks were started alike, and errors that all of them must hear of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extensor.distributed.communicator import Communicator

__all__ = ["RanksDiffer", "check_same"]


class RanksDiffer(RuntimeError):  # noqa: N818 - says what it is
    """Ranks were started with different settings, or hold different values.

    >>> from extensor.distributed import RanksDiffer
    >>> str(RanksDiffer("lr: 0.1 on rank 0, 0.2 on rank 1"))
    'lr: 0.1 on rank 0, 0.2 on rank 1'
    """


def check_same(ranks: Communicator, what: str, facts: Mapping[str, Any]) -> None:
    """Refuse to go on where ranks differ, on all ranks.

    Args:
        ranks: the communicator.
        what: of what the facts are, for the message.
        facts: values by name; what compares equal counts as the same.

    Raises:
        RanksDiffer: naming each fact that differs, its values, and the ranks that have them.

    >>> from extensor.distributed import RanksDiffer, check_same, run_ranks
    >>> try:
    ...     run_ranks(3, lambda ranks: check_same(ranks, "runs", {"seed": ranks.rank // 2}))
    ... except RanksDiffer as error:
    ...     print(error)
    runs: expected the same on all ranks, got seed: 0 on ranks 0, 1; 1 on rank 2; the way out: \
start all ranks with the same command, files and versions
    """
    everyone = ranks.all_gather_object(dict(facts))
    lines = []
    for name in sorted({name for each in everyone for name in each}):
        holders: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            holders.setdefault(repr(each.get(name, "nothing")), []).append(rank)
        if len(holders) > 1:
            shown = (f"{value} on {_named(who)}" for value, who in holders.items())
            lines.append(f"{name}: {'; '.join(shown)}")
    if lines:
        raise RanksDiffer(
            f"{what}: expected the same on all ranks, got {' | '.join(lines)}; the way out: start "
            "all ranks with the same command, files and versions"
        )


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
