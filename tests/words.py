"""Print words that have a better term, and long sentences, as `file:line: word`; `python tests/words.py`.

Words are searched in README.md, CHANGELOG.md, docs/, the pages of results, docstrings and comments. Sentences of more
than 30 words are searched in README.md, CHANGELOG.md and docs/.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORDS = re.compile(r"""\b(?:
    [Aa]rms? | [Pp]eers? | [Gg]ates? | (?:own|the)\ bars? | [Cc]ells? | (?:heavy|opened|read|asked)\ keys
    | (?:a|the|one|each|of)\ looks? | claims?\ (?:holds?|fails?) | cannot\ tell | conflicts? | said\ again | plain\ text
    | [Ll]aws? | (?:the|a|its|random)\ noise | (?<!in\ )(?<!into\ )places? | [Nn]earer | [Ff]arther
    | (?:above|better\ than)\ exact | (?:directly|right)\ after\ the\ swap | [Uu]ptrain(?:ed|ing) | taught | transferred
    | as\ it\ is\ published | shared\ out | [Bb]esides? | press(?:es)? | [Rr]ooms? | [Tt]wins? | [Ll]egends?
    | says? | said | tells? | told | (?:an?|one|each|every|another|other)\ text(?!\ \w) | [Tt]exts | so\ many
    | (?:a|one|the|each|last|of)\ draws?(?!\ from)
    )\b""", re.X)
EXCEPTIONS = re.compile("|".join([  # of "path: line"
    r"evolution/|hrf_robotics\.md|sweep\.yaml",  # arms of robots, places on the ground
    r"Zipf's law|noise variance|LSTM.*cells",  # terms of the field
    r"crt_vit_mae_uptrain|ptraining: task\.init|The paper, uptrained|\"able to|when uptrained",  # quotes of CRT
    r"tabular\.py|drawing\.py: .*bars in cells",  # cells of tables
    r"draw\), so that|tensors of one draw",  # a counter of projections, named draw
    r"outputs/(uptrained|taught|transferred)|adapt\.py: .*\"transferred|said \(\.\.\., J\)",  # names in code
]))


def prose(text):
    """Text with blanks for blocks, names of arguments and targets of links, and x for inline code; lines stay."""
    for pattern, letter in ((r"^( *)```[\s\S]*?^\1```$", " "), (r"\]\([^)]*\)|(?:^ *|\. )\w+(?=: )", " "),
                            (r"`[^`]+`", "x")):
        text = re.sub(pattern, lambda found: re.sub(".", letter, found[0]), text, flags=re.M)  # noqa: B023
    return text


def parts():
    """(path, number of the first line, text) of all that is read."""
    for path in [*DOCS, *sorted((ROOT / "outputs" / "report").glob("*.md"))]:
        yield path, 1, path.read_text()
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        yield path, 1, "\n".join(line.partition("#")[2] for line in path.read_text().splitlines())
    for path in sorted((ROOT / "crt_exp").rglob("*.py")):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        yield from ((path, each.start[0], each.string) for each in tokens if each.type == tokenize.COMMENT)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                yield path, node.body[0].lineno, node.body[0].value.value


def hits():
    for path, first, text in parts():
        name = path.relative_to(ROOT)
        for number, line in enumerate(prose(text).splitlines(), first):
            if not EXCEPTIONS.search(f"{name}: {text.splitlines()[number - first]}"):
                yield from (f"{name}:{number}: {word}" for word in WORDS.findall(line))
        for number, count in long_sentences(prose(text)) if path in DOCS else ():
            yield f"{name}:{number}: {count} words"


def long_sentences(text):
    """(number of the paragraph's line, number of words) of sentences over 30 words, without tables and headings."""
    start = 0
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)", text):
        start = text.index(paragraph, start)
        for sentence in re.split(r"(?<=[.!?])[*_)\"]*\s", "" if paragraph.lstrip()[:1] in ("|", "#") else paragraph):
            if (count := len(re.findall(r"\S*\w\S*", sentence))) > 30:
                yield text.count("\n", 0, start) + 1, count


if __name__ == "__main__":
    found = "".join(f"{hit}\n" for hit in hits())
    print(found, end="")
    sys.exit(bool(found))
