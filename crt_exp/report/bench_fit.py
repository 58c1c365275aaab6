"""Fitting beside featurising: OPRF's statistics and closed form as a share of its features' time, interleaved."""

import statistics
import time

import torch

from crt_exp.features import OPRF, Statistics
from crt_exp.report.writing import markdown
from crt_exp.samplers import orthogonal

SHAPES = {"nursery one-hot, 11664 x 27, m = 128": ((11_664, 27), 128),
          "attention, 8 heads, 4096 x 64, m = 256": ((1, 8, 4096, 64), 256)}
ROUNDS = 41


def main(size: str) -> None:
    rows = []
    for label, (shape, m) in SHAPES.items():
        x, y = torch.randn(2, *shape) / shape[-1] ** 0.25
        phi, noise = OPRF(), orthogonal(m, shape[-1])
        stats = Statistics.of(x, y)
        steps = {"fit": lambda p=phi, s=stats: p.fit(s),
                 "statistics": lambda p=phi, x=x, y=y: Statistics.of(x, y).mean_sq_sum}
        params = phi.fit(stats)
        steps["features"] = lambda p=phi, x=x, y=y, n=noise, q=params: (p.phi_q(x, n, q).exp(), p.phi_k(y, n, q).exp())
        seconds = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        median = {name: statistics.median(s) for name, s in seconds.items()}
        rows.append([label, *(f"{1000 * median[n]:.3f}" for n in steps), f"{median['fit'] / median['features']:.2%}",
                     f"{(median['fit'] + median['statistics']) / median['features']:.2%}"])
    columns = ["setting", "fit, ms", "statistics, ms", "features, ms", "fit / features",
               "fit and statistics / features"]
    print(markdown(columns, rows))
