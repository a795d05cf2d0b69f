"""Philox4x32-10 on Python ints, and the word each element of a block draws.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11: a round
sends (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), and the
key grows by the Weyl constants between rounds.
"""

from __future__ import annotations

from functools import lru_cache

WORD = 2**32


@lru_cache(maxsize=4096)
def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for one counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0 = (high // WORD) ^ c1 ^ k0
        c1 = high % WORD
        c2 = (low // WORD) ^ c3 ^ k1
        c3 = low % WORD
        k0 = (k0 + 0x9E3779B9) % WORD
        k1 = (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def word(stream: object, block: int, position: int, rbits: int) -> int:
    """The 32-bit word of one position of one block.

    The stream brings ``seed``, ``step``, ``tensor``, ``slot`` and ``column``.
    """
    key = (stream.seed % WORD, stream.seed // WORD)
    last = stream.tensor * 256 + stream.slot * 2 + (1 if stream.column else 0)
    if rbits == 32:
        call, place = divmod(position, 4)
        return philox((call, block, stream.step, last), key)[place]
    call, place = divmod(position, 16)
    four = philox((call, block, stream.step, last), key)
    byte = b"".join(w.to_bytes(4, "little") for w in four)[place]
    return byte * 2**24 + 2**23


def hadamard_sign(index: int, seed: int) -> int:
    """The random sign of one place of the Hadamard transform's diagonal."""
    counter = (index // 4, 0, 0, 0x48414441)
    return -1 if philox(counter, (seed % WORD, seed // WORD))[index % 4] & 1 else 1
