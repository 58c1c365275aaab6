"""The first lines of `table2`: controls that win by the loss after the swap, and on the tasks of GLUE."""

from crt_exp.report.page import Page

WHERE = ({"main": "loss", "at": 0.0}, {"main": "accuracy", "at": None, "table": "test"},
         {"main": "spearman", "at": None, "table": "test"})


class Plain(Page):
    """Without a module of its own."""

    code = None


def first_lines(page: Page) -> list[str]:
    parts = [Plain(page.name, page.folder, page.spec | where, page.draws) for where in WHERE]
    return [line for part in parts for line in part.first_lines()]
