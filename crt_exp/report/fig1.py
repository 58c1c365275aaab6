"""make fig1: Figure 1 (right) of Chefs' Random Tables, the gain of OPRF over PosRF against |x + y|^2."""

import torch

from crt_exp.features import OPRF, PosRF
from crt_exp.report import palette
from crt_exp.report.evidence import Claim, exactly, judged, won_by
from crt_exp.report.writing import markdown, new_figure, write_report
from crt_exp.studies.variance import log_variances

DIMENSIONS = (16, 64, 128, 256)
LENGTHS = torch.linspace(0, 100, 201, dtype=torch.float64)
ROWS = range(0, len(LENGTHS), 40)  # of LENGTHS, in the table


def main(size: str) -> None:
    curves, zero = {d: utility(d) for d in DIMENSIONS}, control()
    rows = [{"d": d, "sq_norm_sum": s.item(), "log_variance_ratio": v.item(), "log_zero_ratio": z.item()}
            for d, c in curves.items() for s, v, z in zip(LENGTHS, c, zero)]
    gain = -curves[64][-1].item()
    text = "OPRF has more than e^60 less variance than PosRF at d = 64, |x + y|^2 = 100"
    verdict = judged([Claim(text, exactly(gain - 60), "nats")])[0]
    said = f"{controls_that_win(curves, zero)}\n\n{verdict}\n\nHere: e^{gain:.2f}, by the closed forms."
    body = said + "\n\n" + markdown(["\\|x + y\\|^2", *(f"d = {d}" for d in DIMENSIONS), "the estimate 0"], [
        [f"{LENGTHS[i]:.0f}", *(f"{curves[d][i]:.2f}" for d in DIMENSIONS), f"{zero[i]:.2f}"] for i in ROWS])
    facts = ("Closed forms, the same for the Gaussian and the softmax kernel; A fitted to each |x + y|^2; no data, no "
             "sampling. The estimate 0 errs by the kernel itself: its square over the variance of one projection of "
             "PosRF, as the other columns; m projections have an m-th of their variance.")
    path = write_report("fig1", "CRT Figure 1: log variance of OPRF less that of PosRF, nats", body,
                        [*rows, verdict.row()], figure(curves, zero), facts)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def utility(d: int) -> torch.Tensor:
    """log Var OPRF - log Var PosRF at each |x + y|^2; its limit -log 1 = 0 where both vanish."""
    x = torch.zeros(len(LENGTHS), d, dtype=torch.float64)
    x[:, 0] = LENGTHS.sqrt() / 2
    return torch.where(LENGTHS == 0, 0.0, log_variances(OPRF(), x, x) - log_variances(PosRF(), x, x))


def control() -> torch.Tensor:
    """log of the squared error of the estimate 0 - log Var PosRF at each |x + y|^2, whatever d is."""
    x = LENGTHS.sqrt().unsqueeze(-1) / 2
    return 2 * x.square().sum(-1) - log_variances(PosRF(), x, x)


def controls_that_win(curves: dict[int, torch.Tensor], zero: torch.Tensor) -> str:
    """Where one projection of OPRF errs by more than the kernel."""
    beaten = {f"d = {d}": [f"|x + y|^2 = {LENGTHS[i]:.0f}" for i in ROWS if zero[i] < curve[i]]
              for d, curve in curves.items()}
    return won_by("the estimate 0 beside one projection of OPRF", beaten, len(ROWS) * len(curves))


def figure(curves, zero):
    fig, ax = new_figure(figsize=(5, 3.6))
    for (d, curve), colour in zip(curves.items(), ("#56B4E9", "#D55E00", "#009E73", "#CC79A7")):
        ax.plot(LENGTHS, curve, label=f"d = {d}", color=colour, lw=1.8)
    ax.plot(LENGTHS[1:], zero[1:], label="the estimate 0", color=palette.CONTROL, lw=1.4)
    ax.axhline(-60, color="#444444", lw=0.8, ls=":")
    ax.annotate("e^-60", (2, -58), fontsize=8, color="#444444")
    ax.set(xlabel="|x + y|^2", ylabel="log (Var OPRF / Var PosRF), nats")
    ax.legend()
    return fig
