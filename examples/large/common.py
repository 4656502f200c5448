"""What the examples of large graphs share: their arguments, and where the graph comes from."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import joestar


def arguments(about: str, argv: list[str] | None, **defaults) -> argparse.Namespace:
    """The command line, with an example's own defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="converted folder; made from --source or --generate if it is not there")
    add("--source", help="what to convert: a folder of OGB, or ogb:NAME, which downloads it")
    add("--generate", metavar="SHAPE", help="a planted graph instead: tiny, mini or the dataset's shape")
    add("--scale", type=float, default=1.0, help="of the planted graph")
    add("--dtype", choices=("fp32", "fp16", "bf16"), help="of the features on disk")
    add("--memory", help="of the GPU, such as 24GiB: the graph stays in host memory, and is fed to the GPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", default="inductor", choices=("inductor", "eager"))
    add("--epochs", type=int)
    add("--batch-size", type=int, default=1000)
    add("--hidden", type=int)
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    args.data = args.data or Path("graphs") / (args.generate or args.name)
    return args


def load(args: argparse.Namespace) -> joestar.Graph:
    """The graph of ``--data``, which is converted or generated first if need be."""
    if not args.data.exists():
        if args.generate:
            joestar.data.generate(args.generate, args.data, scale=args.scale, dtype=args.dtype or "fp32")
        else:
            joestar.data.convert(args.source, args.data, dtype=args.dtype)
    graph = joestar.load(args.data)
    return graph if args.memory else graph.to(args.device)


def train(args: argparse.Namespace, graph: joestar.Graph, model: torch.nn.Module, fanouts: list[int]) -> joestar.Step:
    """Compiles, fits and evaluates on the nodes of validation."""
    model = model.to(args.device)
    sampler = joestar.NeighborSampler(graph, fanouts)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    limited = {"memory": args.memory, "batch_size": args.batch_size} if args.memory else {}
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend=args.backend, **limited)
    step.fit(graph.train_idx, graph.val_idx, epochs=args.epochs, batch_size=args.batch_size)
    held_out = graph.val_idx if graph.test_idx is None else graph.test_idx
    score = step.evaluate(held_out, batch_size=args.batch_size)["accuracy"]
    print(f"{graph.name}: {'validation' if graph.test_idx is None else 'test'} accuracy {score:.1%}")
    return step
