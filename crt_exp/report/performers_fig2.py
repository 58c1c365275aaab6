"""make performers-fig2: Figure 2 of Performers, MSE of trigonometric over that of positive features,
by angle and length, and over that of the estimate 0."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from crt_exp.features import TrigRF
from crt_exp.report import palette
from crt_exp.report.writing import markdown, new_figure, write_report
from crt_exp.studies.variance import log_variances

ANGLES = torch.arange(-90, 91, dtype=torch.float64) * (math.pi / 90)  # the middle one is 0 without rounding
LENGTHS = torch.linspace(-2, 2, 161, dtype=torch.float64)
WITHOUT = {"trig": "the map that the others are measured against", "smreg": "it estimates a kernel of its own",
           **palette.APART,
           **dict.fromkeys(("gerf", "pois", "geom", "pois_coord"), "the figure is about positive features"),
           **dict.fromkeys(("pois_plus", "geom_plus"), "they depend on the axes, the figure on angle and length alone")}
MAPS = palette.maps(WITHOUT)
M = 64        # projections beside which the estimate 0 is looked at: it needs none
ZERO = "zero (control)"
LIMIT = 12.0  # nats: beyond, the colour saturates (the ratio has poles at x = y and x = -y)
LEAST = 1e-12  # |x - y|^2 or |x + y|^2 below which two vectors are equal or opposite, but for rounding


def main(size: str) -> None:
    angle, length = torch.meshgrid(ANGLES, LENGTHS, indexing="ij")
    errors = {name: of_map(name) for name in MAPS} | {ZERO: of_zero}
    ratios = {name: log_ratio(log_mse, angle, length) for name, log_mse in errors.items()}
    slices = {name: log_ratio(log_mse, ANGLES, torch.ones_like(ANGLES)) for name, log_mse in errors.items()}
    rows = [{"map": n, "angle": a.item(), "length": 1.0, "log_mse_ratio": v.item()}
            for n, s in slices.items() for a, v in zip(ANGLES, s) if v.isfinite()]
    body = (f"{where_zero_wins(ratios)}\n\nlog of MSE(trig) / MSE(map) at length 1: positive where the positive map is "
            "better.\n\n"
            + markdown(["angle", *slices], [[f"{ANGLES[i]:.2f}", *(shown(s[i].item()) for s in slices.values())]
                                            for i in range(90, 181, 15)])
            + "\nNo variance: at x = y that of trig is 0, at x = -y that of the positive maps.")
    facts = ("Softmax kernel, equal numbers of projections, closed forms; x and y of equal length; OPRF fitted to each "
             f"pair. Zero: the estimate 0, whose error is the kernel itself, beside {M} projections of trig. No data, "
             f"no sampling.{palette.left_out(WITHOUT)}")
    path = write_report("performers-fig2", "Performers Figure 2: where positive features beat trigonometric ones", body,
                        rows, figure(ratios, slices), facts)
    print(f"{body}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


LogMSE = Callable[[Tensor, Tensor], Tensor]  # of pairs (n, 2): (n,), nats


def of_map(name: str) -> LogMSE:
    phi = palette.feature_map(name)
    return lambda x, y: log_variances(phi, x, y) - math.log(M)


def of_zero(x: Tensor, y: Tensor) -> Tensor:
    return 2 * (x * y).sum(-1)


def log_ratio(log_mse: LogMSE, angle: Tensor, length: Tensor) -> Tensor:
    """log (MSE trig / MSE of another estimate), M projections: -inf where that of trig vanishes (x = y), inf where that
    of a positive map does (x = -y), and no number where both do (x = y = 0)."""
    x = torch.stack([length, torch.zeros_like(length)], -1).flatten(0, -2)
    y = torch.stack([length * angle.cos(), length * angle.sin()], -1).flatten(0, -2)
    found = log_variances(TrigRF(), x, y) - math.log(M) - log_mse(x, y)
    same, opposite = ((v.square().sum(-1) < LEAST) for v in (x - y, x + y))
    found = found.masked_fill(same, -math.inf)
    if log_mse is not of_zero:
        found = found.masked_fill(opposite, math.inf).masked_fill(same & opposite, math.nan)
    return found.view(angle.shape)


def where_zero_wins(ratios: Mapping[str, Tensor]) -> str:
    """Where both angle and length are those of the picture."""
    shares = {"trig": ratios[ZERO] > 0} | {name: ratios[ZERO] > ratios[name] for name in MAPS}
    told = ", ".join(f"{name} on {100 * share.double().mean():.0f}%" for name, share in shares.items())
    return (f"**The estimate 0, a control, has less error than {M} projections** of {told} of the angles and lengths "
            "shown, where the kernel is smaller than the errors of its estimates.")


def shown(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "trig: no variance" if value < 0 else "no variance"


def figure(ratios, slices):
    fig, axes = new_figure(1, 3, figsize=(12, 3.4))
    for ax, name in zip(axes, ("pos", "oprf")):
        shown = ratios[name].nan_to_num(nan=0.0).clamp(-LIMIT, LIMIT)
        image = ax.imshow(shown.T, origin="lower", extent=(-math.pi, math.pi, -2, 2), aspect="auto", cmap="RdBu_r",
                          vmin=-LIMIT, vmax=LIMIT)
        ax.set(title=f"log MSE(trig) / MSE({name})", xlabel="angle", ylabel="length")
        ax.grid(False)
        fig.colorbar(image, ax=ax)
    for name, values in slices.items():
        axes[2].plot(ANGLES, values, color=palette.CONTROL if name == ZERO else palette.colour(name), label=name)
    axes[2].axhline(0, color="#444444", lw=0.8, ls=":")
    axes[2].set(title="slice at length 1", xlabel="angle", ylabel="log ratio, nats", ylim=(-LIMIT, LIMIT))
    axes[2].legend()
    fig.tight_layout()
    return fig
