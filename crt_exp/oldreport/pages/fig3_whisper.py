"""The first lines of `fig3-whisper`: what the nearest arm of each kind costs, and which arms a control beats."""

from crt_exp.oldreport.page import Page

KINDS = {"near-far": "nearfar", "FAVOR#": "favorsharp", "FAVOR+": "favorp ", "FAVOR++": "favorpp", "hybrids": "hrf"}


class Plain(Page):
    """Without a module of its own."""

    code = None


def first_lines(page: Page) -> list[str]:
    means = {arm: page.values(page.main, arm=arm).mean() for arm in page.arms}
    best = {kind: min((arm for arm in means if arm.startswith(begins)), key=means.get, default=None)
            for kind, begins in KINDS.items()}
    said = ", ".join(f"{kind} {means[arm]:.3g} ({page.label(arm)})" for kind, arm in best.items() if arm)
    return [f"**Directly after the swap uniform attention costs {means['uniform']:.3g} nats a token of what exact "
            f"attention writes.** The nearest of each kind: {said}.",
            *Plain(page.name, page.folder, page.spec, page.draws).first_lines()]
