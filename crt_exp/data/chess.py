"""The endgame king and rook against king, solved from the rules of chess.

It yields the rows of the UCI set "Chess (King-Rook vs. King)" (krkopt.data, by Bain and van Hoff): White has king and
rook, Black a king, Black is to move, and the class is the number of White's moves to mate under best play of both
sides ("zero": mated on the board), or "draw" (stalemate, or the rook is lost).

A square is 8 * file + rank (a1 = 0, a2 = 1, h8 = 63). A set of squares of the black king is one 64-bit word, so that
all 64^3 positions are 64 x 64 words indexed by (white king, rook), and one step of the retrograde analysis (first the
mates, then the positions that White can turn into those, then the ones where Black cannot avoid these, and so on) is
a few operations on words.
"""

from collections.abc import Iterator

import numpy as np

CLASSES = ("draw", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
           "twelve", "thirteen", "fourteen", "fifteen", "sixteen")

SQUARE = np.arange(64)
FILE, RANK = np.divmod(SQUARE, 8)
BIT = np.left_shift(np.uint64(1), SQUARE.astype(np.uint64))
RANK_1, RANK_8 = np.bitwise_or.reduce(BIT[RANK == 0]), np.bitwise_or.reduce(BIT[RANK == 7])
KING_STEPS = tuple((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
ROOK_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1))


def positions() -> np.ndarray:
    """All positions with Black to move, one of each class of board symmetries, in the order of krkopt.data.

    Returns (28056, 7) integers: file and rank (0-7, 0 = a and 1) of white king, rook and black king, then the index
    into `CLASSES`. Sorted by class, then by the squares in that order. About 0.1 s.
    """
    code = canonical(solve())
    king, rook, black = np.nonzero(code >= 0)
    label = code[king, rook, black]
    rows = np.stack([FILE[king], RANK[king], FILE[rook], RANK[rook], FILE[black], RANK[black], label], axis=1)
    return rows[np.argsort(label, kind="stable")]


def solve() -> np.ndarray:
    """Class of every position, Black to move: (64, 64, 64) indices into `CLASSES` by white king, rook, black king.

    -1 where the position is impossible: two pieces on one square, or the kings side by side.
    """
    king, rook = np.ix_(SQUARE, SQUARE)
    near_king = around(BIT)[king]
    free = np.where(king == rook, np.uint64(0), ~(near_king | BIT[king] | BIT[rook]))
    attacked = rook_attacks()
    safe = ~(near_king | BIT[king] | attacked)               # where Black may step; an unguarded rook is among them
    code = np.where(members(free), 0, -1)
    lost, won, depth = free & attacked & ~around(safe), np.zeros_like(free), 0
    mobile = free & around(safe)                             # not mobile and not attacked: stalemate
    while lost.any():
        depth += 1
        code[members(lost)] = depth
        won |= free & moves_into(lost)                       # White to move reaches a lost position of Black
        lost, mobile = mobile & ~around(safe & ~won), mobile & around(safe & ~won)
    return code


def canonical(code: np.ndarray) -> np.ndarray:
    """Keep one position of each symmetry class, -1 for the others.

    The published set puts the white king into the triangle a1-d1-d4. On its diagonal, the mirror image is removed by
    the black king (on or below the diagonal a1-h8) and, where that lies on the diagonal too, by the rook.
    """
    king, rook, black = np.ix_(SQUARE, SQUARE, SQUARE)
    side = np.sign(RANK - FILE)                              # -1 below the diagonal, 0 on it
    first_off = np.where(side[king] != 0, side[king], np.where(side[black] != 0, side[black], side[rook]))
    return np.where((FILE[king] < 4) & (first_off <= 0) & (side[king] <= 0), code, -1)


def members(words: np.ndarray) -> np.ndarray:
    """Unpack sets of squares (...,) into booleans (..., 64)."""
    return (words[..., None] & BIT) != 0


def around(words: np.ndarray) -> np.ndarray:
    """Squares from which a king steps into the set; a square of the set itself only if it has a neighbour in it."""
    sides = ((words << np.uint64(1)) & ~RANK_1) | ((words >> np.uint64(1)) & ~RANK_8)
    block = words | sides
    return sides | (block << np.uint64(8)) | (block >> np.uint64(8))


def shifted(file_step: int, rank_step: int) -> tuple[np.ndarray, np.ndarray]:
    """The square reached from each square by a step, and whether it is on the board: two arrays (64,)."""
    file, rank = FILE + file_step, RANK + rank_step
    inside = (file >= 0) & (file < 8) & (rank >= 0) & (rank < 8)
    return np.where(inside, 8 * file + rank, 0), inside


def rook_slides() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Every slide of a rook with only the white king in its way, as (target, open, path).

    target (64,): the square reached from each rook square; open (64, 64) by (white king, rook): whether it is on the
    board and the king does not stand in between or on it; path (64,): the squares passed, the target included.
    """
    for file_step, rank_step in ROOK_STEPS:
        open_, path = np.ones((64, 64), bool), np.zeros(64, np.uint64)
        for length in range(1, 8):
            target, inside = shifted(length * file_step, length * rank_step)
            open_ = open_ & inside & (target != SQUARE[:, None])
            path = path | BIT[target]
            yield target, open_, path


def rook_attacks() -> np.ndarray:
    """Squares that the rook attacks, by (white king, rook): (64, 64) words.

    The black king does not shade the squares behind it: it stays in check when it retreats along the line.
    """
    attacked = np.zeros((64, 64), np.uint64)
    for target, open_, _ in rook_slides():
        attacked |= np.where(open_, BIT[target], np.uint64(0))
    return attacked


def moves_into(lost: np.ndarray) -> np.ndarray:
    """Positions, White to move, from which one move of king or rook reaches a position of `lost`: (64, 64) words."""
    result = np.zeros_like(lost)
    for step in KING_STEPS:
        target, inside = shifted(*step)
        result |= np.where(inside[:, None], lost[target], np.uint64(0))
    for target, open_, path in rook_slides():
        result |= np.where(open_, lost[:, target] & ~path, np.uint64(0))   # the black king blocks the way
    return result
