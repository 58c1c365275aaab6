"""Print words that have a better term, and sentences of more than 30 words, as `file:line: word`.

`python tests/words.py` reads README.md, CHANGELOG.md and docs/.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORDS = re.compile(
    r"""\b(?:
    [Aa]rms? | [Pp]eers? | [Gg]ates? | (?:own|the)\ bars? | [Cc]ells? | (?:heavy|opened|read|asked)\ keys
    | (?:a|the|one|each|of)\ looks? | claims?\ (?:holds?|fails?) | cannot\ tell | conflicts? | said\ again | plain\ text
    | [Ll]aws? | (?:the|a|its|random)\ noise | (?<!in\ )(?<!into\ )places? | [Nn]earer | [Ff]arther
    | (?:above|better\ than)\ exact | (?:directly|right)\ after\ the\ swap | [Uu]ptrain(?:ed|ing) | taught | transferred
    | as\ it\ is\ published | shared\ out | [Bb]esides? | press(?:es)? | [Rr]ooms? | [Tt]wins? | [Ll]egends?
    | says? | said | tells? | told | (?:an?|one|each|every|another|other)\ text(?!\ \w) | [Tt]exts | so\ many
    | (?:a|one|the|each|last|of)\ draws?(?!\ from)
    )\b""",
    re.X,
)
EXCEPTIONS = re.compile(
    "Zipf's law|noise variance|LSTM.*cells|\"able to|when uptrained|outputs/(uptr|taught|transf)"
)


def prose(text):
    """Text with blanks for blocks, names of arguments and targets of links, and x for inline code; lines stay."""
    cases = [
        (r"^( *)```[\s\S]*?^\1```$", " "),
        (r"\]\([^)]*\)|(?:^ *|\. )\w+(?=: )", " "),
        (r"`[^`]+`", "x"),
    ]
    for pattern, letter in cases:
        text = re.sub(pattern, lambda found: re.sub(".", letter, found[0]), text, flags=re.M)  # noqa: B023
    return text


def hits():
    for path in DOCS:
        text = path.read_text()
        name = path.relative_to(ROOT)
        for number, (line, whole) in enumerate(zip(prose(text).splitlines(), text.splitlines()), 1):
            if not EXCEPTIONS.search(whole):
                yield from (f"{name}:{number}: {word}" for word in WORDS.findall(line))
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)", prose(text)):
            for sentence in re.split(r"(?<=[.!?])[*_)\"]*\s", paragraph):
                count = len(re.findall(r"\S*\w\S*", sentence))
                if count > 30 and paragraph.lstrip()[0] not in "|#":
                    yield f"{name}: {count} words: {' '.join(sentence.split())}"


if __name__ == "__main__":
    found = "".join(f"{hit}\n" for hit in hits())
    print(found, end="")
    sys.exit(bool(found))
