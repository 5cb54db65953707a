"""The documents agree with the code: settings and their defaults, links, commands, and the README's example.

`python tests/test_docs.py` writes the tables of settings into docs/api.md, and the examples into docs/frameworks.md and
docs/data.md.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import typer
from pydantic import BaseModel

import p2p_diloco
from p2p_diloco.cli.app import app
from p2p_diloco.config import PeerConfig, RunConfig, bare_type, is_optional, meanings
from p2p_diloco.errors import shown

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
API = ROOT / "docs" / "api.md"
FRAMEWORKS = ROOT / "docs" / "frameworks.md"
DATA = ROOT / "docs" / "data.md"
FAQ = ROOT / "docs" / "faq.md"
DEPLOYED = sorted(
    file
    for folder in ("bootstrap", "examples/deploy")
    for file in (ROOT / folder).iterdir()
    if file.is_file() and file.suffix not in (".md", ".txt")
)
"""Files that start us: in containers, as services, in a batch system."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bootstrap/*.md")])

MODELS: tuple[type[BaseModel], ...] = (RunConfig, PeerConfig)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- settings


def table(model: type[BaseModel]) -> str:
    """The settings of a model as Markdown."""
    rows = [f"| `{key}` | {_default(model, key)} | {_meaning(model, key)} |" for key in model.model_fields]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def _default(model: type[BaseModel], key: str) -> str:
    default = model.model_fields[key].get_default(call_default_factory=True)
    return "–" if default in ((), {}) else f"`{shown(default)}`" if default is not None else "unset"


def _meaning(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    choices = _choices(field.annotation)
    allowed = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if len(choices) > 1 else ""
    return f"{meanings(model)[key]}{allowed}".replace("|", "\\|")


def _choices(annotation: Any) -> list[str]:
    if is_optional(annotation):
        return _choices(next(part for part in get_args(annotation) if part is not type(None)))
    return [str(choice) for choice in get_args(annotation)] if bare_type(annotation) is Literal else []


def with_tables(text: str) -> str:
    """The page with the tables written from the models."""
    for model in MODELS:
        marks = re.compile(rf"(<!-- {model.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marks.search(text), f"docs/api.md has no place for {model.__name__}"
        text = marks.sub(lambda found, model=model: f"{found[1]}\n{table(model)}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


def test_every_setting_is_documented_with_its_default() -> None:
    """The tables of docs/api.md are those that the models give; `python tests/test_docs.py` writes them."""
    assert API.read_text() == with_tables(API.read_text())


def test_everything_public_is_documented() -> None:
    """Every public name, every public attribute of Peer and every counter is in docs/api.md."""
    from p2p_diloco.peer.metrics import Metrics

    text = API.read_text()
    public = {name for name in vars(p2p_diloco.Peer) if not name.startswith("_")}
    public |= {field.name for field in dataclasses.fields(Metrics)} | set(p2p_diloco.__all__) - {"__version__"}
    assert {name for name in public if not re.search(rf"\b{name}\b", text)} == set()


# -- examples


def with_examples(text: str) -> str:
    """The page, with each marked block of code replaced by the example that it names."""
    blocks = r"(<!-- (examples/\S+) -->\n```python\n).*?(```\n)"
    return re.sub(blocks, lambda found: found[1] + (ROOT / found[2]).read_text() + found[3], text, flags=re.DOTALL)


def test_pages_show_the_examples() -> None:
    """Each block of code on the page about frameworks is an example, of 60 lines at most; `python tests/test_docs.py`
    writes them. `tests/real/test_data_nodes.py` runs the one about data nodes."""
    for page in (FRAMEWORKS, DATA):
        assert page.read_text() == with_examples(page.read_text())
    assert "<!-- examples/data_node.py -->" in DATA.read_text()
    text = FRAMEWORKS.read_text()
    shown_there = re.findall(r"<!-- (examples/\S+) -->\n```python", text)
    assert len(shown_there) == 3
    assert text.count("```python") == 4  # and the few lines on shared data, which tests/integrations have
    assert all(len((ROOT / name).read_text().splitlines()) <= 60 for name in shown_there)


# -- links


def links() -> Iterator[tuple[Path, str]]:
    """The relative links of all pages."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
            if not re.match(r"[a-z]+:", target):
                yield page, target


def test_every_link_leads_somewhere() -> None:
    """A relative link names an existing file, and, after a #, one of its headings."""
    for page, target in links():
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {target}, which isn't there"
        assert not heading or heading in _headings(there), f"{name_of(page)}: no heading {target}"


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# -- commands


def lines_of_code(page: Path) -> Iterator[str]:
    """What a page shows as code, line by line: in blocks of both kinds, and in running text."""
    text = page.read_text().replace("\\\n", " ")
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", _without_code(text))


def commands(page: Path) -> Iterator[list[str]]:
    """Our command lines on a page."""
    for line in lines_of_code(page):
        if line.startswith("p2p-diloco ") and "|" not in line:
            yield shlex.split(re.split(" [#>]", line)[0])[1:]


def scripts(page: Path) -> Iterator[tuple[list[Path], list[str]]]:
    """The programs of this checkout that a page starts with Python: their files, and the flags that it gives them."""
    for line in lines_of_code(page):
        found = re.match(r"python (?:-m ((?:examples|tests)[\w.]*)|((?:examples|tests)/[\w/]+\.py))(.*)", line)
        if found:
            path = ROOT / (found[2] or found[1].replace(".", "/"))
            files = [path] if path.suffix else [path.with_suffix(".py")]
            yield sorted(path.glob("*.py")) if path.is_dir() else files, re.findall(r"(--[a-z][\w-]*)", found[3])


def parse(name: str, arguments: list[str], shown_in: Path) -> None:
    """Parse a command as the command line does; fails if there is no such command or flag."""
    known: Any = typer.main.get_command(app)
    assert name in known.commands, f"{name_of(shown_in)} shows p2p-diloco {name}"
    known.commands[name].make_context(name, arguments)


def test_every_command_shown_can_be_parsed() -> None:
    """The command exists and accepts each of its flags. The changelog also names commands that have moved."""
    for page in PAGES:
        for name, *arguments in commands(page):
            if not name.startswith("-") and not (page.name == "CHANGELOG.md" and name in ("bench", "simulate")):
                parse(name, arguments, page)


def test_every_script_shown_is_there_and_has_its_flags() -> None:
    """A flag's name stands in the script, or in one beside it that it imports."""
    pages = [page for page in PAGES if page.parent.name != "decisions"]
    for where, files, flags in [(page, *script) for page in pages for script in scripts(page)]:
        text = "".join(file.read_text() for file in files)
        beside = [files[0].parent / f"{name}.py" for name in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
        text += "".join(file.read_text() for file in beside if file.exists())
        assert not [flag for flag in flags if f'"{flag}"' not in text], (where, files[0].name)


def test_pages_show_commands() -> None:
    """Checks the tests above: if they found no commands, they would pass."""
    assert {name for name, *_ in commands(README)} >= {"bootstrap", "join", "status"}
    assert {name for name, *_ in commands(FAQ)} >= {"join", "plan", "doctor"}
    assert {name for page in PAGES for name, *_ in commands(page)} >= {"replay", "revoke", "save"}
    assert sum(1 for page in PAGES for _ in scripts(page)) > 20


def started(file: Path) -> Iterator[list[str]]:
    """Our command lines in a file of `DEPLOYED`: those of shells and units, and the image's entrypoint with each list
    of arguments that it gets from its own file, from compose or from Kubernetes."""
    text = re.sub(r"^ *#.*$", "", file.read_text(), flags=re.MULTILINE)
    for line in re.findall(r"^(?:exec |ExecStart=\S*/)p2p-diloco (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE):
        yield shlex.split(line)
    for given in re.findall(r"^ *(?:CMD|command:|args:) (\[.*\])$", text, flags=re.MULTILINE):
        (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (file.parent / "Dockerfile").read_text(), flags=re.MULTILINE)
        program, *fixed = json.loads(entry)
        assert program == "p2p-diloco"
        yield [*fixed, *json.loads(given)]


def test_every_command_that_is_deployed_can_be_parsed() -> None:
    """Each of these files starts us once, with a command and flags that exist."""
    for file in DEPLOYED:
        ((name, *arguments),) = started(file)
        parse(name, arguments, file)


def test_peers_that_are_deployed_come_back() -> None:
    """Each starts again as the same peer with its checkpoints, and reads its invitation from a file."""
    of_peers = [file for file in DEPLOYED if file.parent.name == "deploy"]
    assert len(of_peers) == 5
    for file in of_peers:
        ((name, *arguments),) = started(file)
        assert name == "join"
        assert {"--identity-path", "--checkpoint-dir"} <= set(arguments), name_of(file)
        assert arguments[arguments.index("--invite") + 1].endswith("main.invite"), name_of(file)


def test_targets_shown_are_in_the_makefile() -> None:
    """`make demo` and the like name existing targets."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)) <= targets, page


# -- the example


def test_the_reading_path_is_short() -> None:
    """It goes through both processes in 25 files at most, and what it names in them exists and has 2,200 lines at
    most."""
    page = (ROOT / "docs/reading.md").read_text()
    rows = re.findall(r"^\| \d+ \| `(\S+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert {"peer", "node", "core", "tensors"} == {name.split("/")[0] for name, _ in rows}
    assert 10 < len(rows) <= 25
    lines = 0
    for name, parts in rows:
        text = (ROOT / "p2p_diloco" / name).read_text()
        tree, named = ast.parse(text), re.findall(r"`(\S+?)`", parts)
        spans = {"": (1, len(text.splitlines()))}
        for outer, one in [("", tree), *((f"{one.name}.", one) for one in tree.body if isinstance(one, ast.ClassDef))]:
            spans |= {outer + it.name: (it.lineno, it.end_lineno) for it in one.body if hasattr(it, "name")}
        lines += sum(spans[part][1] - spans[part][0] + 1 for part in named or [""])
    assert lines <= 2200
    assert round(lines, -2) == int(re.findall(r"([\d,]+) lines", page)[0].replace(",", ""))


@pytest.mark.real
def test_the_readmes_example_runs() -> None:
    """As it stands, it founds a run, trains to its end and prints the right result."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    weights = re.search(r"'weight'[,:] tensor\(\[\[(\S+), (\S+)\]\]\)", done.stdout)
    assert weights is not None, done.stdout
    assert [float(weight) for weight in weights.groups()] == pytest.approx([1.0, 1.0], abs=0.02)


if __name__ == "__main__":
    API.write_text(with_tables(API.read_text()))
    for page in (FRAMEWORKS, DATA):
        page.write_text(with_examples(page.read_text()))
