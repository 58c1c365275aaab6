"""The picture of adapt: loss against the CPU seconds of adaptation, by transfer and then LoRA, and by LoRA alone."""

from crt_exp.drawing import label_ends, new_figure
from crt_exp.oldreport.figures import HEIGHT, WIDTH, colour
from crt_exp.oldreport.page import Page

WAYS = {"-": ("swapped", "transferred", "transfer, LoRA"), ":": ("swapped", "LoRA")}


def figure(page: Page):
    fig, axes = new_figure(1, len(page.settings), figsize=(WIDTH * len(page.settings), HEIGHT), squeeze=False)
    for ax, setting in zip(axes[0], page.settings):
        panel(ax, page, setting)
    fig.tight_layout()
    return fig


def panel(ax, page: Page, setting: str) -> None:
    ends = []
    for arm in page.arms:
        shade = colour(page, arm)
        for style, places in WAYS.items():
            points = [(seconds, loss) for seconds, loss in (mean_of(page, setting, arm, x) for x in places)
                      if loss == loss]
            if points:
                ax.plot(*zip(*points), ls=style, color=shade, marker="o", ms=3, lw=1.5)
                ends += [(page.label(arm), *points[-1], shade)] if style == "-" else []
    ax.set(xlabel="CPU seconds of adaptation (dotted: LoRA alone)", ylabel="loss, nats", title=setting)
    label_ends(ax, ends)


def mean_of(page: Page, setting: str, arm: str, place: str) -> tuple[float, float]:
    seconds, loss = (page.values(metric, setting, arm, x=place).mean() for metric in ("seconds", "loss"))
    return float(seconds), float(loss)
