"""The snippets of README and of every page of the documentation run as they are printed.

All ``python`` blocks run, those of a page one after the other with the same names; those marked ``needs NAME`` where
the module is installed, and are parsed elsewhere. ``sh run`` runs commands of ``joestar``; commands in other blocks for
a shell are checked: they exist and have those flags. ``toml NAME`` and ``csv NAME`` are written to that file first.
Programs run on the eager backend unless a snippet says otherwise.
"""

import ast
import re

import pytest

from tests.docs.pages import DOCS, FENCE, PAGES, ROOT, SHELLS, blocks, check_command, run_page, text_of

LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")
ELSEWHERE = ("from-pyg", "from-dgl", "from-a-plain-loop", "tutorial", "faq")
"""Pages that run in other files of this folder, which look at what they print."""
LONG = ("profiling", "training", "pyg")
"""Pages whose snippets run in ``make fuzz``."""
CAPTURED = ("README", "index", "write-your-own-model", "write-your-own-sampler")
"""Pages whose programs go through the real capture in ``make test`` already; others do in ``make fuzz``."""
LANGUAGES = {"python", "toml", "csv", "text", "json", *SHELLS}


by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def anchors(page) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def as_test(page):
    """A page as a parameter of tests, with the marks of when and how it runs."""
    marks = [pytest.mark.fuzz] * (page.stem in LONG) + [pytest.mark.quick] * (page.stem not in CAPTURED)
    return pytest.param(page, id=page.stem, marks=marks)


@pytest.mark.every(2)
@pytest.mark.parametrize("page", [as_test(page) for page in PAGES if page.stem not in ELSEWHERE])
def test_snippets_run(page, tmp_path, request):
    if page.stem not in CAPTURED:
        request.getfixturevalue("cheapest_captures")
    run_page(page, tmp_path)


@by_page
def test_blocks_say_what_they_are(page):
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: a block is one of {', '.join(sorted(LANGUAGES))}"
        if block.language == "python":
            assert block.mark in ("", "run") or block.needs, f"{where}: python blocks run; what cannot run is text"


def test_commands_that_do_not_exist_are_found():
    check_command(["train", "cora", "--epochs", "3"])
    for wrong in (["trian", "cora"], ["train", "cora", "--epoch", "3"], ["train", "cora", "--epochs", "many"]):
        with pytest.raises(AssertionError, match=f"joestar {' '.join(wrong)}"):
            check_command(wrong)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in LINK.finditer(text_of(page)):
        target = page if not link["file"] else (page.parent / link["file"]).resolve()
        assert target.exists(), f"{page.name} links to {link['file']}, which is not there"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{page.name} links to #{link['anchor']} of {target.name}"


@by_page
def test_contents_name_every_section(page):
    text = text_of(page)
    contents = re.findall(r"^- \[(.+)\]\(#.*\)$", text.partition("\n## ")[0], re.MULTILINE)
    assert contents in ([], re.findall(r"^## (.+)$", text, re.MULTILINE))


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.name for page in DOCS.glob("*.md")} | {"changelog.md", "examples/index.md"}


def test_the_site_asks_no_other_host():
    text = (ROOT / "mkdocs.yml").read_text() + (DOCS / "site.css").read_text()
    assert "font: false" in text
    assert "http" not in text and "analytics" not in text


def test_hooks_of_the_site_parse():
    ast.parse((DOCS / "site_hooks.py").read_text())  # they run in `make docs`
