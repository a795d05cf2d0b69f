"""Tables of number formats: element grids, blocked formats, dialects."""

from extensor.formats.block import FORMATS, SCALES, BlockFormat, ScaleFormat, Tile
from extensor.formats.dialects import DIALECTS, Dialect
from extensor.formats.element import ELEMENTS, ElementFormat

__all__ = [
    "DIALECTS",
    "ELEMENTS",
    "FORMATS",
    "SCALES",
    "BlockFormat",
    "Dialect",
    "ElementFormat",
    "ScaleFormat",
    "Tile",
]
