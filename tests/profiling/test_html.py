"""The page: whole, self-contained, escaped, with every number of the report."""

import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from joestar import fusion
from joestar.errors import ConfigError
from joestar.profile import numbers
from joestar.profile.charts import Box, LinearAxis, LogAxis, Mark, chart
from joestar.profile.files import as_json
from joestar.profile.findings import findings
from joestar.profile.ledger import CHOSEN, Counters, Expected, Report
from joestar.profile.phases import MEANING
from joestar.profile.places import merged, place
from joestar.profile.tree import rebuilt

from .full import LINE, report

VOID = {"meta", "br", "wbr", "link", "img", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects them, their attributes and the text."""

    def __init__(self, source: str):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "wbr":
            self.words.append("\0")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else, at {self.getpos()}"

    def handle_data(self, text):
        if not self.open or self.open[-1] != "style":
            self.words.append(text)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words).replace(" \0 ", ""))


@pytest.fixture(scope="module")
def source() -> str:
    return report().to_html()


@pytest.fixture(scope="module")
def page(source) -> Page:
    return Page(source)


def test_page_loads_nothing(source, page):
    assert "http" not in source
    assert "@import" not in source and "@font-face" not in source
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "action")}
        assert attributes.get("href", "#").startswith("#")
    assert set(re.findall(r"url\((.*?)\)", source)) == {"#hatch"}


def test_page_is_accessible(page):
    tags = page.tags
    assert ("html", {"lang": "en"}) in tags
    assert any(tag == "meta" and attributes.get("name") == "viewport" for tag, attributes in tags)
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in tags:
        if tag == "a":
            assert attributes["href"][1:] in ids
    charts = sum(tag == "svg" and attributes.get("role") == "img" for tag, attributes in tags)
    hidden = sum(tag == "svg" and attributes.get("aria-hidden") == "true" for tag, attributes in tags)
    assert charts + hidden == sum(tag == "svg" for tag, _ in tags)
    assert charts >= 30
    assert sum(tag == "title" for tag, _ in tags) >= charts + 1


def test_page_tells_the_headline(page):
    for text in (
        "Step 0.613 ms 0.609 to 0.620 in the middle of 200 steps",
        "Epoch 121 ms 197 steps at the median",
        "Share of the floor 40.8 % the step would take 0.250 ms if memory were the only limit",
        "Padded steps 98.93 % 1,200 of 1,213 ran as one static program",
        "Padding 4.5 % of a set on average, at most 4.7 %",
        "Fallbacks 7 batches redone exactly; 11 overflows",
        "Compiling 26.9 s once, no part of the steps; 3 recompilations",
        "Peak memory 640.0 MiB",
    ):
        assert text in page.text


def test_page_begins_with_what_to_do_next(page):
    text = page.text
    assert text.index("What to do next") < text.index("0.613 ms 0.609") and "rest" not in MEANING
    for found in findings(report()):
        assert f"{found.number} {found.text} {found.setting} {found.advice}" in text
    for phase in report().profile.phases:
        assert MEANING[phase] in text


def test_page_contains_every_number(page):
    text, full = page.text, report()
    wanted = [value for record in full.programs[0].sets for value in (record.minimum, record.mean, record.maximum)]
    wanted += [record.bound for record in full.programs[0].sets if record.bound is not None]
    shown = [numbers.count(value) for value in wanted]
    shown += [numbers.percent(record.waste) for record in full.programs[0].sets if record.waste is not None]
    shown += [numbers.digits(spent) for spent in full.profile.phases.values()]
    for kernel in full.profile.kernels:
        shown += [kernel.name, numbers.digits(kernel.microseconds)]
    for stage in full.profile.stages:
        shown += [stage.stage, numbers.digits(stage.milliseconds), numbers.human_bytes(stage.bytes)]
        shown.append(numbers.count(stage.kernels))
    shown += ["1.25 1.30 212", "-0.500 1.16 61", "8.78 58"]  # saved, speed-up, kernels
    shown += ["PyTorch eager, layers of PyG 2.8.0 12.2 ms", "20.0 times as fast as PyTorch eager, layers of PyG"]
    shown += ["411,000 415,500 421,000 not stored", "64x416 · 416x2872"]
    for row in full.programs[0].passes:
        shown += [row.name, numbers.count(row.nodes_before)]
    for row in full.tuning.candidates:
        shown += [f"{key} = {option}" for key, option in row.choices.items()]
    shown += ["4.88 0.662", "4.25 0.613 0.613 ms per step taken", "41.5 s", "9f2c77", "From the tuner"]
    shown += [site.key for site in full.programs[0].sites] + ["update-first (default), aggregate-first"]
    shown += [spot.detail for spot in full.programs[0].places] + ["me/project/model.py:45 in forward"]
    shown += ["4.20 TB/s", "1001.4 MiB", "0 B copied per step: what a step reads is resident", "16 B copied per step"]
    shown += ["masked loss 4", "compiled 2 times", "capture 1.50 s", "backend 22.8 s", "CUDA graphs captured 2"]
    shown += [
        "2.11.0",
        "3.12.1",
        "cuda (NVIDIA H200)",
        "AMD EPYC 9654, 64 processors",
        "96.0 GiB",
        full.graph,
        full.sampler,
        "relu-dropout off",
    ]
    shown += [full.programs[0].graph_before.split("\n")[1].strip(), full.programs[0].graph_after.split("\n")[1].strip()]
    shown += [full.command, full.date, "batch_size 1000", "lr 0.003", "dropout 0.5", "slack of “train” 1.2 %"]
    shown += ["compiling the forward pass 24.5", "compiling included 2.50", "forward 0.500 0.412"]  # once, per step
    for words in shown:
        assert re.sub(r"\s+", " ", words) in text, words


def test_everything_is_escaped(source, page):
    assert "<script" not in source
    assert "its <script>alert(1)</script> result is used twice" in page.text
    assert "GraphSAGE<b>" in page.text and "GraphSAGE<b>" not in source
    evil = '"><script>alert(1)</script>'
    full = report()
    full.model = full.sampler = full.graph = full.profile.source = full.profile.kernels[0].name = evil
    full.command = full.date = full.environment.cpu = full.profile.no_baseline = full.profile.baselines[0].stage = evil
    full.settings = {evil: evil}
    full.profile.kernels[1].layer = full.profile.kernels[1].shape = full.profile.kernels[1].source = evil
    full.profile.kernels[0].phase = full.profile.stages[0].stage = full.tuning.key = evil
    full.profile.phases, full.profile.bus, full.counters.seconds = {evil: 1.0}, {evil: 1}, {evil: 1.0}
    full.tuning.candidates[0].choices = {evil: evil}
    program = full.programs[0]
    program.kind = program.graph_before = program.sets[0].name = program.passes[0].name = evil
    program.rewrites, program.seconds = {evil: 1}, {evil: 1.0}
    program.sites[0] = replace(program.sites[0], key=evil, options=[evil], default=evil, taken=evil, source=evil)
    program.places[0] = replace(
        program.places[0], pattern=evil, node=evil, detail=evil, source=f"/{evil}:3 in f: {evil}", layer=evil
    )
    made = full.to_html()
    assert "<script" not in made
    assert made.count("script") > 40
    assert not {tag for tag, _ in Page(made).tags} & {"script"}


def test_without_data_the_page_says_how_to_get_it():
    full = report()
    bare = replace(full, programs=[], counters=Counters(), tuning=None, profile=None)
    text = Page(bare.to_html()).text
    assert text.count("joestar profile --html report.html") == 4
    assert "take a step first" in text and "This step was not tuned" in text
    assert "Padded steps -" in text
    program = replace(full.programs[0], sets=[], sites=[], places=[])
    profile = replace(full.profile, stages=[], kernels=[], bus={}, logical_bytes=None, peak_bytes=None)
    text = Page(replace(full, programs=[program], profile=profile).to_html()).text
    assert "No batch has been run yet" in text and "No pattern was looked at in this program" in text
    assert "has no floor here" in text and "none: graph, features and model are all in the host's memory" in text
    assert "Nothing is known yet" in Page(bare.to_html()).text
    host = replace(full, profile=None, counters=replace(full.counters, seconds={"forward": 1.0, "backward": 1.426}))
    assert "Step, host clock 2.00 ms mean of 1,213 steps" in Page(host.to_html()).text


def test_impossible_shapes_do_not_break_the_charts():
    full = report()
    full.programs[0].sets[0] = replace(full.programs[0].sets[0], minimum=0, mean=0.0, maximum=0, bound=16, waste=1.0)
    full.profile = replace(full.profile, milliseconds=0.1, logical_bytes=10**12, phases={"forward": 0.0})
    full.profile.stages = [replace(full.profile.stages[0], milliseconds=0.0)]
    Page(full.to_html())


def test_chart_places_in_percent():
    made = chart(
        "a & b", [Box(0.25, 0.5, "main", "x < y"), Box(-1, 2, "rest")], [Mark(0.125, "bound")], height=20, inset=4
    )
    assert '<svg role="img" width="100%" height="20"><title>a &amp; b</title>' in made
    assert '<rect class="main" x="25%" y="4" width="25%" height="12"><title>x &lt; y</title></rect>' in made
    assert '<rect class="rest" x="0%" y="4" width="100%" height="12"></rect>' in made
    assert '<line class="bound" x1="12.5%" x2="12.5%" y1="0" y2="20"></line>' in made


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (3, 500_000, [10, 100, 1000, 10_000, 100_000]),
        (150, 1100, [200, 500, 1000]),
        (260, 368, [250, 275, 300, 325, 350, 375, 400]),
    ],
)
def test_axis_has_round_ticks(low, high, values):
    axis = LogAxis(low, high)
    assert [value for _, value in axis.ticks()] == pytest.approx(values)
    assert 0 < axis.at(low) < axis.at(high) < 1
    middle = (low * high) ** 0.5
    assert axis.at(middle) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("largest", "values"), [(9.72, [0, 2, 4, 6, 8, 10]), (1664, [0, 500, 1000, 1500]), (0.61, [0, 0.2, 0.4, 0.6])]
)
def test_linear_axis_begins_at_zero(largest, values):
    axis = LinearAxis(largest)
    assert [value for _, value in axis.ticks()] == pytest.approx(values)
    assert axis.at(0) == 0 and 0.9 < axis.at(largest) < 1
    assert axis.at(largest / 2) == pytest.approx(axis.at(largest) / 2)
    assert [text for _, text in axis.labels()][:2] == ["0", numbers.short(values[1])]


def test_places_of_the_same_text_are_one_row():
    rows = merged(report().programs[0].places)
    assert [(row.place.pattern, row.times, row.place.verdict) for row in rows] == [
        ("extract-select", 2, "fired"), ("order", 2, "chosen"), ("sample-gather-aggregate", 1, "refused"),
    ]  # fmt: skip
    assert rows[1].layers == ["convs.0", "convs.1"] and rows[0].nodes == ["rowwise_sample", "rowwise_sample_1"]


def test_every_chosen_alternative_is_worded_so_that_it_is_told_from_a_refusal():
    """``PlaceSummary.verdict`` reads the wording: no pass may speak of a choice in other words."""
    texts = []
    for path in Path(fusion.__file__).parent.rglob("*.py"):
        texts += re.findall(r"Reject\(\s*f?\"([^\"]*)\"", path.read_text())
    assert len(texts) > 90
    spoken = [text for text in texts if re.search(r"cho(?:se|ice|ose)", text)]
    assert len(spoken) >= 8 and all(CHOSEN.search(text) for text in spoken)


def test_chosen_and_idle_do_not_look_like_trouble(source):
    assert source.count('class="badge refused">refused') == 2  # the legend, and the one that was
    assert source.count('class="badge chosen">chosen') == 2
    idle = re.search(r"<details><summary>(\d+) passes found nothing to do(.*?)</details>", source, re.DOTALL)
    assert idle[1] == "1" and "hoist" in idle[2] and "extract-select" not in idle[2]


def test_place_takes_a_source_line_apart():
    assert place(LINE) == {
        "where": "me/project/model.py:45",
        "function": "forward",
        "code": "h = self.lin(block.pull(fn.copy_u(x), 'mean')) if a < b & c else x",
        "full": "/home/me/project/model.py:45",
    }
    assert place("no line")["where"] == "no line"


def test_numbers():
    assert [numbers.digits(value) for value in (0, 0.00123, 0.0617, 0.617, 6.171, 61.71, 617.1, 12345.6, -0.5)] == [
        "0", "0.0012", "0.0617", "0.617", "6.17", "61.7", "617", "12,346", "-0.500",
    ]  # fmt: skip
    assert numbers.seconds(0.0123) == "12.3 ms" and numbers.seconds(1.5) == "1.50 s"
    assert numbers.human_rate(4.2e12) == "4.20 TB/s" and numbers.human_rate(5.5e10) == "55.0 GB/s"
    assert [numbers.short(value) for value in (250, 15_000, 1.5e6, 2e9)] == ["250", "15k", "1.5M", "2G"]
    assert numbers.count(2.5) == "2.5" and numbers.count(120606.75) == "120,607"
    assert numbers.plural(1, "step") == "1 step" and numbers.plural(1200, "step") == "1,200 steps"


def test_json_comes_back(tmp_path):
    full = report()
    full.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == full.to_dict()
    assert Report.load(tmp_path / "report.json") == full
    bare = replace(full, tuning=None, profile=None, programs=[])
    bare.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == bare


def test_figures_that_are_none_come_back_as_nan():
    """JSON has no word for them but ``null``."""
    found = rebuilt(Expected, json.loads(as_json(asdict(Expected("peak", 1.0, math.nan)))))
    assert (found.what, found.planned) == ("peak", 1.0) and math.isnan(found.measured)


def test_json_of_an_older_version_is_read(tmp_path):
    """What has come since is empty, the date above all: it is none of today."""
    content = report().to_dict()
    for name in ("date", "command", "settings"):
        del content[name]
    del content["programs"][0]["slack"], content["programs"][0]["sets"][0]["stored"], content["environment"]["cpu"]
    del content["profile"]["kernels"][0]["layer"], content["programs"][0]["places"][0]["layer"]
    (tmp_path / "report.json").write_text(json.dumps(content))
    found = Report.load(tmp_path / "report.json")
    assert (found.date, found.command, found.settings, found.environment.cpu) == ("", "", {}, "")
    Page(found.to_html())


def test_files_are_whole_and_checked(tmp_path):
    full = report()
    full.save(str(tmp_path / "report.HTML"))
    assert (tmp_path / "report.HTML").read_text() == full.to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["report.HTML"]
    with pytest.raises(ConfigError, match=r"saved as \.html or \.json; got suffix '\.txt'"):
        full.save(tmp_path / "report.txt")
    with pytest.raises(ConfigError, match="cannot be written"):
        full.save(tmp_path / "none" / "report.html")
    for content in ("{", "[]", '{"settings": {}}', json.dumps({**full.to_dict(), "counters": {"steps": "many"}})):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ConfigError, match="expected the JSON of a report"):
            Report.load(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="expected the JSON of a report"):
        Report.load(tmp_path / "missing.json")


def test_terminal_shows_profile_tuning_and_choices():
    shown = str(report())
    for text in (
        "A step takes 0.613 ms (p20 0.609, p80 0.620, 200 steps); an epoch, 197 steps, 121 ms",
        "floor 0.250 ms: 1001.4 MiB at 4.20 TB/s, 40.8 % of the step",
        "peak memory 640.0 MiB; bus: host to device 0 B/step, device to host 16 B/step",
        "_sample_aggregate_kernel",
        "and 13 more",
        "Tuner: 3 candidates, from its cache",
        "once: tracing, passes, choosing bounds",
        "1 more passes found nothing to do",
        "What to do next",
        "PyTorch eager, layers of PyG 2.8.0",
        "[train] fired   extract-select: fanout 15 (2 times)",
        "[train] chosen  order: aggregating first is chosen, by cost (2 times)\n    at /home/me/project/model.py:45 in "
        "forward (convs.0, convs.1)\n        h = self.lin(block.pull(fn.copy_u(x), 'mean')) if a < b & c else x\n",
        "[train] refused sample-gather-aggregate: its <script>",
    ):
        assert text in shown
    assert re.search(r"hop 1 source nodes +117,071 +120,607 +122,999 +- +-", shown)
    assert re.search(r"\+ CUDA graph +0\.613 +8\.78 +58 +640\.0 MiB", shown)
    code = LINE.partition("forward: ")[2]
    loose = [line for line in shown.split("\n") if len(line) > 80 and not line.startswith("    ")]
    assert len(loose) <= 3, loose  # the head, and sentences that a terminal may break
    assert shown.count("        " + code) == 3
    assert "A step takes" not in str(replace(report(), profile=None))
