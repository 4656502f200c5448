"""The page fits a phone and a desk: what can be told from its source, and what a browser says if there is one."""

import html
import json
import re
import shutil
import subprocess

import pytest

from joestar.profile.html import FOLDER

from .full import report
from .test_html import VOID, Page

PHONE, DESK = 390, 1200
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LONG = "a_model_with_a_very_long_name.its_third_convolution.its_second_linear_layer_of_many_more"


class Tree(Page):
    """The page with, for every element, its attributes, those around it, and the text within."""

    def __init__(self, source: str):
        self.stack, self.elements = [], []
        super().__init__(source)

    def handle_starttag(self, tag, attributes):
        super().handle_starttag(tag, attributes)
        element = {"tag": tag, **dict(attributes), "around": list(self.stack), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_endtag(self, tag):
        super().handle_endtag(tag)
        self.stack.pop()

    def handle_data(self, text):
        super().handle_data(text)
        for element in self.stack:
            element["text"] += text

    def find(self, tag, name=""):
        return [e for e in self.elements if e["tag"] == tag and name in [*e.get("class", "").split(), ""]]


@pytest.fixture(scope="module")
def tree():
    return Tree(report().to_html())


def test_nothing_has_a_fixed_width_beyond_a_phone():
    style = (FOLDER / "report.css").read_text()
    rules = re.sub(r"@media[^{]*\{", "", style)
    for name, value in re.findall(r"([\w-]*width)\s*:\s*(\d+)px", rules):
        assert name == "max-width" or int(value) <= PHONE, f"{name}: {value}px"
    for least in re.findall(r"minmax\((\d+)px", rules):
        assert int(least) <= PHONE // 1.5
    for least in re.findall(r"min-width\s*:\s*(\d+)em", rules):
        assert int(least) * 15 <= PHONE


def test_every_table_scrolls_or_becomes_cards(tree):
    tables = tree.find("table")
    assert len(tables) >= 10
    for table in tables:
        assert any("scroll" in outer.get("class", "").split() for outer in table["around"])
        rows = [e for e in tree.elements if e["tag"] == "tr" and table in e["around"]]
        columns = max(sum(e["tag"] in ("td", "th") and e["around"][-1] is row for e in tree.elements) for row in rows)
        if columns < 4:
            continue
        assert "stack" in table["class"].split(), table
        cells = [e for e in tree.elements if e["tag"] == "td" and table in e["around"]]
        bare = [c for c in cells if c["text"].strip() and "data-label" not in c and "text" not in c.get("class", "")]
        assert not [cell for cell in bare if "optional" not in cell["class"]], "a number without its name on a phone"


def test_every_axis_says_what_it_measures_and_where_it_begins(tree):
    axes = tree.find("div", "axis")
    assert len(axes) >= 4
    for axis in axes:
        label = tree.elements[tree.elements.index(axis) + 1 :]
        label = next(element for element in label if element["tag"] == "div")
        assert label.get("class") == "axis-label"
        assert re.search(r"from 0|logarithmic", label["text"]), label["text"]
        assert re.search(r"milliseconds|nodes or edges", label["text"]), label["text"]


def test_sizes_far_apart_say_that_their_axis_is_logarithmic():
    full = report()
    assert "nodes or edges per batch, logarithmic" in Page(full.to_html()).text
    del full.programs[0].sets[2:]
    assert "nodes or edges per batch, from 0" in Page(full.to_html()).text


def test_every_hop_is_on_the_chart(tree):
    names = [element["text"] for element in tree.find("div", "name")]
    for row in report().programs[0].sets:
        assert row.name in names


# --- in a browser ---

MEASURE = """
onload = () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement, width = %d, found = [];
  for (const e of page.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !e.closest("pre")) found.push("cut: " + e.outerHTML.slice(0, 90));
  }
  for (const e of page.querySelectorAll(".scroll"))
    if (e.scrollWidth > e.clientWidth + 1) found.push("must be scrolled: " + e.innerText.slice(0, 60));
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest("pre, style, title, svg")) continue;
    for (const word of node.data.matchAll(/[^\\s-]+-?/g)) {
      const range = page.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) found.push("broken: " + word[0]);
    }
  }
  document.getElementById("out").textContent = JSON.stringify({width: root.scrollWidth, found: found});
}
"""


def browser():
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_browser_finds_nothing_cut_or_broken(width, tmp_path):
    if browser() is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    full = report()
    full.profile.kernels[0].layer = LONG
    full.programs[0].places[0].layer = LONG
    page = html.escape(re.sub("<details>", "<details open>", full.to_html()))
    frame = f'<iframe style="border:0" scrolling="no" width="{width}" height="30000" srcdoc="{page}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<!DOCTYPE html><meta charset="utf-8">{frame}<pre id="out"></pre><script>{MEASURE % width}</script>'
    )
    shown = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", outer.as_uri()], capture_output=True,
        text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    found = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', shown, re.DOTALL)[1]))
    assert found["width"] <= width
    assert found["found"] == []
