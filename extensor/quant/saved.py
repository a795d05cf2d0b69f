"""Formats in which operations keep values for backward, as data: rules by module and slot."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from extensor.errors import unknown_name
from extensor.formats import FORMATS
from extensor.quant.spec import QuantSpec

__all__ = ["SAVED_SLOTS", "SavedRule", "parse_saved"]

SAVED_SLOTS = (
    "norm", "activation", "gate", "up", "q", "k", "v", "qkv", "o", "layer", "input", "output",
)  # fmt: skip
"""What is kept: the input of a norm; the input or result of an activation; the two inputs of a
gated unit; queries, keys and values (``qkv`` where they lie in one array) and the result of
attention; the input of a float layer; any other operation's input or output."""

_FLOATS = ("float32", "bfloat16")
_BLOCKED = tuple(name for name, row in FORMATS.items() if not row.outliers)


@dataclass(frozen=True)
class SavedRule:
    """How what operations keep for backward is stored, in modules and slots that match.

    A quantized layer keeps its own operand (`Recipe.saved_input`), whatever the rules say.

    Attributes:
        match: a glob on a module's path, as in "blocks.*.norm1". The modules in it match, too; "*"
            is the whole model.
        use: a spec; or a format's name, "mxfp8" and "mxfp6" for the first of their element types;
            "bfloat16", rounded to nearest; "float32": as it is.
        slot: a glob on one of `SAVED_SLOTS`.

    Raises:
        ValueError: for an unknown format, or a glob that no slot matches.

    >>> et.quant.recipe.SavedRule("*.feed_forward", "mxfp8", slot="activation").spec.format
    'mxfp8_e4m3'
    """

    match: str
    use: QuantSpec | str
    slot: str = "*"

    def __post_init__(self) -> None:
        self.spec  # noqa: B018  # an unknown format is an error here
        if not any(fnmatchcase(name, self.slot) for name in SAVED_SLOTS):
            raise ValueError(unknown_name("saved slot", self.slot, SAVED_SLOTS))

    @property
    def spec(self) -> QuantSpec | str | None:
        """A spec or "bfloat16"; None stores arrays as they are."""
        if isinstance(self.use, QuantSpec):
            return self.use
        if self.use in _FLOATS:
            return None if self.use == "float32" else self.use
        found = [n for n in _BLOCKED if n == self.use or n.startswith(f"{self.use}_e")]
        if not found:
            raise ValueError(unknown_name("saved format", self.use, (*_FLOATS, *_BLOCKED)))
        return QuantSpec(found[0])

    def matches(self, path: str) -> bool:
        """Whether the rule is for a module: its path matches, or that of one it lies in.

        Args:
            path: as in `Module.named_modules`.

        Returns:
            True or False.

        >>> et.quant.recipe.SavedRule("blocks.*.norm1", "mxfp8").matches("blocks.0.norm2")
        False
        """
        parts = path.split(".")
        around = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return any(fnmatchcase(one, self.match) for one in around)


def parse_saved(text: str) -> tuple[SavedRule, ...]:
    """Rules as text: ``[[PATH:]SLOT=]FORMAT[~]``, several with commas; the first that matches wins.

    Args:
        text: such as "mxfp8", or "norm=bfloat16,blocks.*:[qkvo]=mxfp8~,float32"; "~" rounds
            stochastically.

    Returns:
        The rules.

    Raises:
        ValueError: for an unknown format or slot, or "~" after a float format.

    >>> from extensor.quant.saved import parse_saved
    >>> [(rule.match, rule.slot) for rule in parse_saved("norm=bfloat16,blocks.*:gate=mxfp4~")]
    [('*', 'norm'), ('blocks.*', 'gate')]
    """
    rules = []
    for part in text.split(","):
        where, _, use = part.strip().rpartition("=")
        match, _, slot = where.rpartition(":")
        rule = SavedRule(match or "*", use.removesuffix("~"), slot or "*")
        if use.endswith("~"):
            if not isinstance(rule.spec, QuantSpec):
                raise ValueError(
                    f"{part.strip()!r}: expected a blocked format before '~', got {use[:-1]!r}, "
                    "which is rounded to nearest"
                )
            rule = SavedRule(rule.match, rule.spec.replace(rounding="stochastic"), rule.slot)
        rules.append(rule)
    return tuple(rules)
