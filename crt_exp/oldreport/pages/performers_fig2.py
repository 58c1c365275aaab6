"""The page performers-fig2: where the estimate 0 has less error, and ratios by angle and length as pictures."""

import numpy as np

from crt_exp import drawing
from crt_exp.drawing import new_figure
from crt_exp.oldreport.page import Page

ZERO, LIMIT = "zero", 12.0  # nats: beyond, the colour saturates, for the ratio has poles at x = y and x = -y


def grid(page: Page, arm: str) -> np.ndarray:
    """Ratios by length and angle, nan where there is none."""
    frame = page.select("log_ratio", arm=arm)
    table = frame.pivot(index="setting", columns="x", values="value").astype(float)
    by_length = sorted(table.index, key=lambda name: float(name.split()[1]))
    return table.loc[by_length].reindex(columns=angles(page)).to_numpy()


def angles(page: Page) -> list[float]:
    return sorted({*page.draws["x"]})


def first_lines(page: Page) -> list[str]:
    """On which share of angles and lengths the control has less error."""
    zero = grid(page, ZERO)
    shares = {"trig": np.mean(zero[np.isfinite(zero)] > 0)}
    for arm in page.arms:
        both = np.isfinite(zero) & np.isfinite(grid(page, arm))
        shares[arm] = np.mean(zero[both] > grid(page, arm)[both])
    listed = ", ".join(f"{page.label(arm)} on {share:.0%}" for arm, share in shares.items() if arm != ZERO)
    return [f"**The estimate 0, a control, has less error than 64 projections** of {listed} of the angles and lengths "
            "shown, where the kernel is smaller than the errors of its estimates."]


def figure(page: Page):
    fig, axes = new_figure(1, 3, figsize=(12, 3.4))
    for ax, arm in zip(axes, ("pos", "oprf")):
        half = np.nan_to_num(grid(page, arm)).clip(-LIMIT, LIMIT)
        image = ax.imshow(np.concatenate([half[::-1], half]), origin="lower", extent=(-180, 180, -2, 2), aspect="auto",
                          cmap="RdBu_r", vmin=-LIMIT, vmax=LIMIT)
        ax.set(title=f"log MSE(trig) / MSE({page.label(arm)})", xlabel="angle, degrees", ylabel="length")
        ax.grid(False)
        fig.colorbar(image, ax=ax)
    ends = []
    for arm in page.arms:
        frame = page.select("log_ratio", "length 1", arm)
        shade = drawing.CONTROL if arm in page.controls else drawing.colour(arm)
        axes[2].plot(frame["x"], frame["value"], color=shade)
        last = frame[frame["x"] <= 150].iloc[-1]
        ends.append((page.label(arm), last["x"], last["value"], shade))
    axes[2].axhline(0, color="#444444", lw=0.8, ls=":")
    axes[2].set(title="at length 1", xlabel="angle, degrees", ylabel="log ratio, nats", ylim=(-LIMIT, LIMIT))
    for name, x, y, shade in ends:
        axes[2].annotate(name, (x, y), color=shade, fontsize=8)
    fig.tight_layout()
    return fig
