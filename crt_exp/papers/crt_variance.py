"""CRT Figures 1 and 2: log variance of one projection, by the closed forms."""

from crt_exp.report import Claim, Page, Rows, line_plot, mean_table, sweep
from crt_exp.report.plots import panels

MAPS = ["trig", "gerf", "pois", "geom", "pois_coord", "pos", "hyp", "oprf", "pois_plus", "geom_plus"]
COMPARED = ["trig", "gerf", "pos", "oprf", "geom_plus"]
REGIMES = ["normal", "sphere", "heterogen", "mnist"]
FITS = ["set", "pair"]
PAPER = {"gerf": {"normal": 80, "heterogen": 125}, "oprf": {"normal": 75, "heterogen": 125},
         "geom_plus": {"normal": 75, "heterogen": 125}}  # nats below trig, or below pos
VARIANCE = "task=variance task.pairs=1000"

small = {
    "fig1": sweep("task=variance_by_length", features=["oprf"], **{"task.d": [16, 64, 128, 256]}),
    "fig2": sweep(VARIANCE, features=MAPS, **{"task.regime": REGIMES, "task.fit": FITS}),
    "fig2/mnist": sweep(f"{VARIANCE} task.regime=mnist task.fit=set", features=COMPARED, resize={
        name: f"task.resize={{mode:{name}}}" for name in ["bilinear", "nearest-exact", "area", "bicubic"]}),
}

page = Page(
    "crt_variance",
    title="CRT Figures 1 and 2: log variance of the mechanisms",
    finding="GERF and OPRF reach the paper's gains with parameters fitted to a whole set. GeomRF+ reaches them only "
            "with parameters fitted to each pair, which no user has.",
    small=small, full=small, reduced=False, data="MNIST for one panel",
    columns=["regime", "fit", "resize", "method", "d", "sum", "sigma"],
    metrics=["gain", "zero", "log_variance", "of_pairs"],
    measured=["Log variance of one projection, Gaussian kernel, closed forms; d = 64 and 1000 pairs in Figure 2.",
              "With m projections the variance of a map falls by log m. trig, gerf and hyp make two columns of a "
              "projection: at equal columns their log variance is 0.7 higher.",
              "Where the rate of most pairs is at the end of its range, the variance is that of the clamp, and no "
              "value is shown.",
              "mnist: test images resized to 8 x 8 (bilinear, antialiased), pixels in [0, sigma]. The paper does not "
              "state its resizing."])


def claims(rows: Rows) -> list[Claim]:
    at_100 = rows.values("gain", "oprf", d=64, sum=100).item()
    return [
        Claim("OPRF has a variance below e^-60 times that of PosRF at d = 64, |x + y|^2 = 100", {"": at_100}, below=-60,
              paper="more than e^60", power=True),
        *(Claim(f"the variance of {method} is far below that of {other}",
                {f"{regime}, fitted to the {fit}": rows.paired(other, method, "of_pairs", regime=regime, fit=fit,
                                                               resize="")
                 for fit in FITS for regime in wanted},
                above={f"{regime}, fitted to the {fit}": least for fit in FITS for regime, least in wanted.items()},
                paper=", ".join(f"e^{least} for {regime}" for regime, least in wanted.items()), power=True,
                reason="the gain needs parameters of each pair" if method == "geom_plus" else "")
          for method, wanted in PAPER.items() for other in ["trig" if method == "gerf" else "pos"]),
        Claim("the gains on mnist are e^10 for gerf and e^7 for oprf and geom_plus", paper="e^10, e^7",
              not_measured="the paper does not state the range of the pixels, which decides the gain")]


def tables(rows: Rows):
    def of(fit: str):
        return mean_table(rows, {regime: {"metric": "log_variance", "regime": regime, "fit": fit, "sigma": 1.0,
                                          "resize": ""} for regime in REGIMES}, spec=".1f")
    return {"Mean log variance at sigma = 1, parameters fitted to the set": of("set"),
            "Mean log variance at sigma = 1, parameters fitted to each pair": of("pair"),
            "mnist by the way it is resized": mean_table(
                rows, {name or "antialiased": {"metric": "log_variance", "regime": "mnist", "fit": "set", "sigma": 1.0,
                                               "resize": name}
                       for name in ["", "bilinear", "nearest-exact", "area", "bicubic"]}, COMPARED, spec=".1f")}


def figure(rows: Rows):
    fig, axes = panels(5)
    line_plot(axes[0], rows, "sum", "gain", ["oprf"], d=64)
    axes[0].set(title="Figure 1: OPRF less PosRF, d = 64", xlabel="|x + y|^2", ylabel="log variance, nats")
    for ax, regime in zip(axes[1:], REGIMES):
        line_plot(ax, rows, "sigma", "log_variance", MAPS, regime=regime, fit="set", resize="")
        ax.set(title=f"Figure 2: {regime}, fitted to the set", xlabel="sigma", ylabel="log variance, nats")
    fig.tight_layout()
    return fig
