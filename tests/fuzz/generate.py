"""Random programs: a graph, a sampler, a model and a loss, as source text that depends on one integer."""

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from joestar.fusion import PASSES

from . import additions
from .code import Code, Hop, Rows
from .graphs import FORMS, IGNORED
from .layers import some_layer
from .motifs import MOTIFS, NOT_IN_FLOAT16, Motif, motifs_of
from .rows import LAYER_NORM, filled, some_rows
from .samplers import sampler

PER_PACK = 5
"""Programs with the same graph and sampler, which are captured together."""
PER_SHARD = 100
AUTOCAST = 0.08
"""Share of the packs that run under autocast."""
KNOWN = 0.15
"""Share of the packs whose nodes are known by other numbers than their positions."""
PER_PASS = 2
"""Programs of a shard that are steered to a pass."""

FLOAT32 = ", floats=torch.float32"
SHORT = 0.5
"""Share of those with additions whose features have the dtype of autocast, too."""

IMPORTS = """import torch
import torch.nn.functional as F
from fuzz.graphs import random_graph
from torch import nn

import joestar.nn as jnn
from joestar import LayerDependentSampler, NeighborSampler, fn
"""


@dataclass(frozen=True)
class Written:
    """A program.

    Attributes:
        number: what it is made from; steered: name of a pass that fires in it, or nothing.
        head: source of graph and sampler; body: of model and loss; target: which of the graph's labels are ``y``.
        choices: kind -> option under which the pass fires, if it needs choices.
        autocast: name of the dtype under which it runs, or nothing: the model is float32 then, else float64.
    """

    number: int
    steered: str
    head: str
    body: str
    target: str
    choices: Mapping[str, str]
    autocast: str

    @property
    def file(self) -> str:
        """The name under which tracebacks cite it."""
        return f"fuzz_program_{self.number}.py"

    @property
    def source(self) -> str:
        """The program as a file."""
        return self.head + self.body

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"program {self.number}" + (f" (steered to {self.steered})" if self.steered else "")


@dataclass(frozen=True)
class Setting:
    """What the programs of a pack share.

    Attributes:
        head: source of graph and sampler; edata: per block, whether its edges have data; autocast: as in ``Written``.
    """

    head: str
    nodes: int
    features: int
    classes: int
    edata: tuple[bool, ...]
    autocast: str


def steering(pack: int) -> list[str]:
    """Names of the passes to which the programs of a pack are steered; empty for a pack that is left to chance.

    A pass without motifs is left to chance as well (``test_every_pass_has_a_motif`` says so).
    """
    names = [spec.name for spec in PASSES if spec.name in MOTIFS]
    packs = PER_SHARD // PER_PACK
    slots = [names[i % len(names)] for i in range(len(names) * PER_PASS)]
    if len(slots) > PER_SHARD * 9 // 10:
        raise ValueError(f"{len(names)} passes, {PER_PASS} programs each, leave none to chance in {PER_SHARD}.")
    first = pack % packs * PER_PACK
    return slots[first : first + PER_PACK]


def in_short(autocast: str) -> str:
    """What converts features to the dtype of autocast."""
    return f".to(torch.{autocast})"


@functools.lru_cache(8)
def setting(pack: int) -> Setting:
    """Graph and sampler of a pack."""
    rng = random.Random(f"setting {pack}")
    steered = bool(steering(pack))
    hops = rng.choice((2, 2, 2, 3)) if steered else rng.choice((1, 1, 2, 2, 3))
    features, classes = rng.choice((1, 3, 6, 6, 33)), rng.choice((2, 4, 4))
    nodes = rng.randint(20, 60)
    autocast = rng.choice(("bfloat16", "float16")) if rng.random() < AUTOCAST else ""
    if autocast == "float16" and NOT_IN_FLOAT16.intersection(steering(pack)):
        autocast = "bfloat16"
    floats = FLOAT32 if autocast else ""
    graph = (
        f"graph = random_graph(seed={pack}, nodes={nodes}, edges={rng.randint(nodes, 4 * nodes)}, features={features}, "
        f'classes={classes}, form="{rng.choice(FORMS)}", ids=torch.{rng.choice(("int32", "int32", "int64"))}{floats})\n'
    )
    definition, expression, edata = sampler(rng, hops, uniform=steered)
    if rng.random() < KNOWN:
        graph = graph.replace(")\n", ", known=True)\n")
    separate = f"\n\n{definition}\n\n" if definition else ""
    if autocast and pack * PER_PACK >= additions.EXTENDED and random.Random(f"short {pack}").random() < SHORT:
        graph += f'graph.ndata["x"] = graph.ndata["x"]{in_short(autocast)}\n'
    head = f"{IMPORTS}\n{graph}{separate}sampler = {expression}\n"
    return Setting(head, nodes, features, classes, tuple(edata), autocast)


def write(number: int) -> Written:
    """The program of this number."""
    pack = number // PER_PACK
    shared = setting(pack)
    rng = random.Random(f"program {number}")
    names = steering(pack)
    steered = names[number % PER_PACK] if number % PER_PACK < len(names) else ""
    motif = rng.choice(motifs_of(steered)) if steered else None
    code = Code(rng, shared.nodes, shared.features, extended=number >= additions.EXTENDED)
    loss = rng.choice(LOSSES)
    if code.extended and code.chance(0.4):
        loss = Loss(code.pick(*additions.LOSSES))
    body, unpack = _model(code, shared, motif, loss.columns(shared.classes))
    target = loss.target
    labels = "" if target == "y" else f'\n\ngraph.ndata["y"] = graph.ndata["{target}"]\n'
    choices = motif.choices if motif else {}
    text = f"\n\n{body}\n\n{loss.source(shared.classes, unpack)}{labels}"
    return Written(number, steered, shared.head, text, target, choices, shared.autocast)


def _model(code: Code, shared: Setting, motif: Motif | None, columns: int) -> tuple[str, str]:
    """(source of the class, line of the loss that takes outputs apart)."""
    unpack = _forward(code, shared, motif, columns)
    init = "".join(f"        {line}\n" for line in ["super().__init__()", *code.init])
    body = "".join(f"        {line}\n" for line in code.body)
    return (
        f"class Model(nn.Module):\n    def __init__(self):\n{init}\n    def forward(self, blocks, x):\n{body}",
        unpack,
    )


def _forward(code: Code, shared: Setting, motif: Motif | None, columns: int) -> str:
    hops = len(shared.edata)
    first = code.rng.randrange(hops) if motif is None and code.chance(0.15) else 0  # blocks left unused
    h = Rows("x", shared.features)
    if first:
        h = code.rows(f"x[: blocks[{first}].num_src]", h.width)
    seen = []
    for place in range(first, hops):
        here = motif if motif is not None and place == (hops - 1 if motif.inner else 0) else None
        hop = Hop(code.let(f"blocks[{place}]"), shared.edata[place])
        h = _layer(code, h, hop, here, f"{hop.name}.num_src")
        h = some_rows(code, h, f"{hop.name}.num_dst", 1 if place < hops - 1 else 0)
        if code.extended:
            h = additions.some_added(code, h, f"{hop.name}.num_dst")
        seen.append(h)
    h = _jump(code, seen) if len(seen) > 1 and code.chance(0.2) else h
    if code.chance(0.15) and not (motif and motif.alone):
        h = code.rows(f"torch.cat([{h}, x[: blocks[-1].num_dst]], 1)", h.width + shared.features)
    h = some_rows(code, h, "blocks[-1].num_dst", 1)
    if code.chance(0.7):
        form = code.pick("{h}.tanh()", "{h} / (1 + {h}.abs())", LAYER_NORM)
        h = code.rows(filled(form, h), h.width)
    z = code.linear(h, columns)
    value, unpack = additions.returned(code, h, z) if code.extended else (str(z), "")
    code.body.append(f"return {value}")
    return unpack


def _layer(code: Code, h: Rows, hop: Hop, motif: Motif | None, n: str) -> Rows:
    source = h
    if motif is None or not motif.bare:
        h = some_rows(code, h, n, 1)
    if motif is not None and motif.before is not None:
        h = motif.before(code, h, n)
    if code.extended and motif is None and code.chance(0.5):
        h = additions.some_added(code, h, n)
    layer = some_layer if motif is None or motif.layer is None else motif.layer
    if code.extended and layer is some_layer and code.chance(0.22):
        layer = code.pick(
            additions.scaled_messages, additions.rooted_sums, additions.sized, additions.steep, additions.named_rows
        )
    out = layer(code, h, hop)
    if motif is None and code.chance(0.15):
        own = code.rows(f"{source}[: {hop.name}.num_dst]", source.width)
        own = own if own.width == out.width else code.linear(own, out.width)
        out = code.rows(f"{out} + {own}", out.width)
    return out


def _jump(code: Code, seen: list[Rows]) -> Rows:
    """Rows of the seeds of every layer, put together."""
    own = [code.rows(f"{h}[: blocks[-1].num_dst]", h.width) for h in seen]
    names = ", ".join(map(str, own))
    if len({h.width for h in own}) == 1 and code.chance(0.5):
        form = code.pick("torch.stack([{}]).amax(0)", "torch.stack([{}], 1).sum(1)", "torch.stack([{}], 1).mean(1)")
        return code.rows(form.format(names), own[0].width)
    return code.rows(f"torch.cat([{names}], 1)", sum(h.width for h in own))


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
        form: expression of the outputs ``z`` and the labels ``y``; ``{c}`` is the number of classes.
        target: which of the graph's labels it takes; extra: columns of ``z`` behind those of the classes.
    """

    form: str
    target: str = "y"
    extra: int = 0

    def columns(self, classes: int) -> int:
        """Columns of the outputs."""
        return classes + self.extra

    def source(self, classes: int, unpack: str = "") -> str:
        """The function's text; ``unpack`` takes outputs apart into ``z`` and ``other``."""
        first, more = (f"    {unpack}\n", " + 0.1 * other.square().mean()") if unpack else ("", "")
        return f"def loss(z, y):\n{first}    return {self.form.format(c=classes)}{more}\n"


IGNORING = f"ignore_index={IGNORED}"
LOSSES = (
    *map(Loss, (
        "F.cross_entropy(z, y)", 'F.cross_entropy(z, y, reduction="sum")', f"F.cross_entropy(z, y, {IGNORING})",
        f'F.cross_entropy(z, y, {IGNORING}, label_smoothing=0.1, reduction="sum")',
        "F.cross_entropy(z, y, label_smoothing=0.2)", "F.nll_loss(z.log_softmax(1), y)",
        f"F.nll_loss(F.log_softmax(z, dim=-1), y, {IGNORING})",
        'F.cross_entropy(z, y, reduction="none")', "F.multi_margin_loss(z, y)",
        "F.cross_entropy(z, y) + 0.01 * z.square().mean()",
        "F.cross_entropy(z, y) + 0.5 * F.mse_loss(z.softmax(1), F.one_hot(y, {c}).to(z.dtype))",
        f"F.cross_entropy(z, y, {IGNORING}) * 0.7 + F.multi_margin_loss(z, y) * 0.3",
        'F.cross_entropy(z, y, reduction="sum") + F.cross_entropy(z, y)',
    )),
    Loss("F.cross_entropy(z[:, :{c}], y) + 0.4 * F.cross_entropy(z[:, {c}:], y % 2)", "y", 2),
    Loss("F.cross_entropy(z[:, 3:], y) + F.nll_loss(z[:, :3].log_softmax(1), y.clamp(max=2))", "y", 3),
    Loss("F.cross_entropy(z[:, :{c}], y) + F.binary_cross_entropy_with_logits(z[:, {c}], (y > 0).to(z.dtype))", "y", 1),
    *(Loss(form, "t") for form in (
        "F.cross_entropy(z, F.softmax(y, 1))", "F.binary_cross_entropy_with_logits(z, y)",
        'F.binary_cross_entropy_with_logits(z, y, reduction="sum")', "F.binary_cross_entropy(z.sigmoid(), y)",
        "F.mse_loss(z, y)", 'F.mse_loss(z, y, reduction="sum")', "F.smooth_l1_loss(z, y)",
        'F.huber_loss(z, y, reduction="sum")', "((z - y) ** 2).mean()", "((z - y) ** 2).sum(1)",
        "(z - y).abs().sum() / len(y)", "(F.softplus(z) - z * y).sum(1).mean()",
        "F.mse_loss(z, y) + z.abs().mean() * 0.1",
    )),
)  # fmt: skip


def seeds_of(number: int | str, nodes: int, dtype: torch.dtype) -> torch.Tensor:
    """A batch: 3 to 9 nodes, the first even (its class is never ignored), sometimes one twice; seldom one node."""
    rng = random.Random(f"seeds {number}")
    if rng.random() < 0.04:
        return torch.tensor([2 * rng.randrange(nodes // 2)], dtype=dtype)
    chosen = [2 * rng.randrange(nodes // 2), *rng.sample(range(nodes), rng.randint(2, 7))]
    if rng.random() < 0.3:
        chosen.append(rng.choice(chosen))
    return torch.tensor(chosen, dtype=dtype)
