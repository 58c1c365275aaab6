"""The endgame king and rook against king, solved from the rules of chess.

It yields the rows of the UCI set "Chess (King-Rook vs. King)" (krkopt.data, by Bain and van Hoff): White has king and
rook, Black a king, Black is to move, and the class is the number of White's moves to mate under best play of both
sides ("zero": mated on the board), or "draw" (stalemate, or the rook is lost).

Notation: a square is 8 * file + rank (a1 = 0, a2 = 1, h8 = 63); arrays of positions are (white king, rook, black king).
"""

import numpy as np

FILE, RANK = np.divmod(np.arange(64), 8)
FILES, RANKS = abs(FILE[:, None] - FILE), abs(RANK[:, None] - RANK)          # (64, 64) distances
NEAR = np.maximum(FILES, RANKS) <= 1                                         # includes the square itself
STEPS = (NEAR & (FILES + RANKS > 0)).astype(np.float32)                      # of a king
ROOK_STEPS = (FILES == 0) ^ (RANKS == 0)                                     # of a rook on an empty board
# [a, b, c]: a rook that moves from a to b meets c, its ends included
PASSED = ROOK_STEPS[:, :, None] & ((FILES + RANKS)[:, None] + (FILES + RANKS) == (FILES + RANKS)[:, :, None])


def positions() -> np.ndarray:
    """All positions with Black to move, one of each class of board symmetries, in the order of krkopt.data.

    Returns (28056, 7) integers: file and rank (0-7, 0 = a and 1) of white king, rook and black king, then the class:
    0 for "draw", else 1 + moves to mate. Sorted by class, then by the squares in that order. About 0.6 s.
    """
    code = canonical(solve())
    squares = np.nonzero(code >= 0)
    label = code[squares]
    rows = np.stack([part[square] for square in squares for part in (FILE, RANK)] + [label], axis=1)
    return rows[np.argsort(label, kind="stable")]


def solve() -> np.ndarray:
    """Class of every position, Black to move: (64, 64, 64) integers; -1 where the position is impossible."""
    king, rook, black = np.ix_(*[np.arange(64)] * 3)
    attacked = ROOK_STEPS & ~PASSED.transpose(2, 0, 1)       # the black king shades nothing
    legal = (king != rook) & (rook != black) & ~NEAR[:, None]
    safe = ~NEAR[:, None] & ~attacked                        # where Black may step: an unguarded rook is among them
    mobile, won = safe @ STEPS > 0, np.zeros_like(legal)
    code = np.where(legal, 0, -1)
    lost, mobile, depth = legal & attacked & ~mobile, legal & mobile, 0
    while lost.any():
        depth += 1
        code[lost] = depth
        won |= white_moves_into(lost, attacked)
        escapes = (safe & ~won) @ STEPS > 0
        lost, mobile = mobile & ~escapes, mobile & escapes
    return code


def white_moves_into(lost: np.ndarray, attacked: np.ndarray) -> np.ndarray:
    """Positions with White to move from which one move of king or rook reaches one of `lost`."""
    result = np.tensordot(STEPS, lost, 1) > 0
    for rook in range(64):
        free = attacked[:, rook, :, None] & ~PASSED[rook]    # the black king blocks the way
        result[:, rook] |= (free & lost).any(1)
    return result


def canonical(code: np.ndarray) -> np.ndarray:
    """Keep one position of each symmetry class, -1 for the others.

    The published set puts the white king into the triangle a1-d1-d4. On its diagonal, the mirror image is removed by
    the black king (on or below the diagonal a1-h8) and, where that lies on the diagonal too, by the rook.
    """
    king, rook, black = np.ix_(*[np.arange(64)] * 3)
    side = np.sign(RANK - FILE)                              # -1 below the diagonal, 0 on it
    first_off = np.where(side[king] != 0, side[king], np.where(side[black] != 0, side[black], side[rook]))
    return np.where((FILE[king] < 4) & (first_off <= 0) & (side[king] <= 0), code, -1)
