"""make fig1: Figure 1 (right) of Chefs' Random Tables, the gain of OPRF over PosRF against |x + y|^2."""

import torch

from crt_exp.features import OPRF, PosRF
from crt_exp.report.evidence import Claim, exactly, judged
from crt_exp.report.writing import markdown, new_figure, write_report
from crt_exp.studies.variance import log_variances

DIMENSIONS = (16, 64, 128, 256)
LENGTHS = torch.linspace(0, 100, 201, dtype=torch.float64)


def main(size: str) -> None:
    curves = {d: utility(d) for d in DIMENSIONS}
    rows = [{"d": d, "sq_norm_sum": s.item(), "log_variance_ratio": v.item()}
            for d, c in curves.items() for s, v in zip(LENGTHS, c)]
    gain = -curves[64][-1].item()
    text = "OPRF has more than e^60 less variance than PosRF at d = 64, |x + y|^2 = 100"
    verdict = judged([Claim(text, exactly(gain - 60), "nats")])[0]
    said = f"{verdict}\n\nHere: e^{gain:.2f}, by the closed forms."
    body = said + "\n\n" + markdown(["\\|x + y\\|^2", *(f"d = {d}" for d in DIMENSIONS)], [
        [f"{LENGTHS[i]:.0f}", *(f"{curves[d][i]:.2f}" for d in DIMENSIONS)] for i in range(0, len(LENGTHS), 40)])
    facts = ("Closed forms, the same for the Gaussian and the softmax kernel; A fitted to each |x + y|^2; no data, no "
             "sampling.")
    path = write_report("fig1", "CRT Figure 1: log variance of OPRF less that of PosRF, nats", body,
                        [*rows, verdict.row()], figure(curves), facts)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def utility(d: int) -> torch.Tensor:
    """log Var OPRF - log Var PosRF at each |x + y|^2; its limit -log 1 = 0 where both vanish."""
    x = torch.zeros(len(LENGTHS), d, dtype=torch.float64)
    x[:, 0] = LENGTHS.sqrt() / 2
    return torch.where(LENGTHS == 0, 0.0, log_variances(OPRF(), x, x) - log_variances(PosRF(), x, x))


def figure(curves):
    fig, ax = new_figure(figsize=(5, 3.6))
    for (d, curve), colour in zip(curves.items(), ("#56B4E9", "#D55E00", "#009E73", "#CC79A7")):
        ax.plot(LENGTHS, curve, label=f"d = {d}", color=colour, lw=1.8)
    ax.axhline(-60, color="#444444", lw=0.8, ls=":")
    ax.annotate("e^-60", (2, -58), fontsize=8, color="#444444")
    ax.set(xlabel="|x + y|^2", ylabel="log (Var OPRF / Var PosRF), nats")
    ax.legend()
    return fig
