"""Joestar inside Lightning (pip install lightning): batches are seeds, the compiled step stands where forward would be.

Usage: python examples/lightning_cora.py
"""

import lightning
import torch
import torch.nn.functional as F

import joestar


class Papers(lightning.LightningModule):
    def __init__(self, graph, backend="inductor"):
        super().__init__()
        self.model, self.labels = joestar.nn.GraphSAGE(1433, 64, 2, 7, dropout=0.5), graph.ndata["y"]
        self.step = joestar.compile(self.model, joestar.NeighborSampler(graph, [10, 5]), backend=backend)

    def training_step(self, seeds, _):
        return F.cross_entropy(self.step(seeds), self.labels[seeds])

    def validation_step(self, seeds, _):
        hits = self.step(seeds).argmax(1) == self.labels[seeds]
        self.log("accuracy", hits.float().mean(), prog_bar=True, batch_size=len(seeds))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)


def main(epochs: int = 10, backend: str = "inductor") -> Papers:
    graph, load = joestar.load("cora"), torch.utils.data.DataLoader
    papers = Papers(graph, backend)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(papers, load(graph.train_idx, 70, shuffle=True), load(graph.val_idx, 500))
    return papers


if __name__ == "__main__":
    main()
