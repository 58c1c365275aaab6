"""Times behind the choices in crt_exp/samplers, and of a fit compared with features:
`python -m crt_exp.studies.bench_samplers [threads]` prints four tables.

Medians of interleaved runs, in milliseconds: the alternatives take turns, so that load from outside hits them alike.
"""

import math
import statistics
import sys
from collections.abc import Callable

import torch

from crt_exp.features import OPRF, Statistics
from crt_exp.samplers import givens, hadamard, noise, orthogonal
from crt_exp.samplers.blocks import cholesky_qr, householder_qr, kac_walk
from crt_exp.studies.timing import turns


def medians(functions: dict[str, Callable], repeats: int = 9) -> list[float]:
    """Milliseconds of each function, after one warm-up call each."""
    return [statistics.median(t) for t in turns(functions, repeats).values()]


def table(title: str, header: list[str], rows: list[list]) -> None:
    print(f"\n{title}\n" + "".join(f"{h:>16}" for h in header))
    for row in rows:
        print("".join(f"{c:>16.2f}" if isinstance(c, float) else f"{c!s:>16}" for c in row), flush=True)


def hadamard_row(d: int, m: int) -> list:
    """Projection of 2^20 / max(m, d) vectors, at least 64."""
    projection = hadamard(m, d, torch.Generator().manual_seed(0))
    x = torch.randn(max(64, 2**20 // max(m, d)), d)
    weight = projection.rows()
    dense, free = medians({"dense": lambda: x @ weight.mT, "free": lambda: projection._transform(x)})
    work = m * d / (projection.n * -(-m // projection.n))
    return [d, m, len(x), int(work), dense, free, "transform" if projection.matrix_free else "dense"]


def haar_row(batch: tuple[int, ...], d: int) -> list:
    """Orthogonal factors of the same Gaussian matrices; drawing those is a column of its own."""
    g = torch.randn(*batch, d, d, dtype=torch.float64)

    def loop() -> torch.Tensor:
        return torch.stack([torch.linalg.qr(one)[0] for one in g.flatten(0, -3)])

    times = medians({"householder": lambda: householder_qr(g), "cholesky": lambda: cholesky_qr(g), "loop": loop,
                     "normals": lambda: torch.randn_like(g)})
    return ["x".join(map(str, batch)), d, *times]


def givens_row(d: int) -> list:
    """Projection of 256 vectors by one block: the rows, or the walk itself."""
    x, weight = torch.randn(256, d), givens(d, d).rows()
    steps = 4 * math.ceil(d * math.log(d))
    return [d, *medians({"dense": lambda: x @ weight.mT, "walk": lambda: kac_walk(x.mT.unsqueeze(0), steps, None)},
                        repeats=3)]


def fit_row(label: str, shape: tuple[int, ...], m: int) -> list:
    """OPRF's closed form and statistics, and its features of queries and keys."""
    x, y = torch.randn(2, *shape) / shape[-1] ** 0.25
    phi, noise = OPRF(), orthogonal(m, shape[-1])
    stats = Statistics.of(x, y)
    params = phi.fit(stats)
    return [label, *medians({"fit": lambda: phi.fit(stats), "statistics": lambda: Statistics.of(x, y).mean_sq_sum,
                             "features": lambda: (phi.phi_q(x, noise, params).exp(),
                                                  phi.phi_k(y, noise, params).exp())}, repeats=41)]


def main(size: str = "small", threads: int | None = None) -> None:
    torch.set_num_threads(threads or torch.get_num_threads())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    sizes = [(d, m) for d in (64, 256, 512, 768, 1024, 2048, 4096) for m in (d // 4, d, 4 * d) if m * d <= 2**24]
    table(f"Hadamard projection; the transform serves from work = m d / (stacks n) = {noise.MATRIX_FREE_FROM}",
          ["d", "m", "vectors", "work", "dense ms", "transform ms", "chosen"], [hadamard_row(d, m) for d, m in sizes])
    batches = [((12, 12, 4), 64), ((12, 1), 64), ((1,), 64), ((2000,), 4), ((8,), 256), ((2,), 512)]
    table("Orthogonal factors, float64", ["batch", "d", "householder ms", "cholesky ms", "qr loop ms", "normals ms"],
          [haar_row(batch, d) for batch, d in batches])
    fits = [("11664 x 27", (11_664, 27), 128), ("8 x 4096 x 64", (1, 8, 4096, 64), 256)]
    table("Fit of OPRF", ["x and y", "fit ms", "statistics ms", "features ms"], [fit_row(*each) for each in fits])
    table("Givens projection of 256 vectors", ["d", "dense ms", "walk ms"], [givens_row(d) for d in (16, 64, 256)])


if __name__ == "__main__":
    main(threads=int(sys.argv[1]) if sys.argv[1:] else None)
