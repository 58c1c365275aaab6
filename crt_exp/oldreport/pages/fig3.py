"""The first lines of fig3: in which settings attention matters, and which arms a control beats there."""

from crt_exp.oldreport.evidence import won_by
from crt_exp.oldreport.page import Page

FRAMES, ONE = "directly after the swap, convolutions of 15 frames", "directly after the swap"


def first_lines(page: Page) -> list[str]:
    cost = {setting: gate for setting, gate in page.gates}
    lines = [f"**FAVOR++ beats FAVOR+ only with convolutions of one frame.** There uniform attention costs "
             f"{cost[ONE].value:.3g} nats an utterance; with 15 frames, as recognisers have them, it costs "
             f"{cost[FRAMES].value:.3g}, and nothing is judged."] if {ONE, FRAMES} <= {*cost} else []
    beaten = {setting: [page.label(arm) for arm in dict.fromkeys(
        arm for control in page.controls for arm in page.beaten_by(control, setting))] for setting in page.settings}
    return [*lines, won_by("attention to no query and no key", beaten, page._compared())]
