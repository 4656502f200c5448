"""The phases of a step: their names, and what each is, in words for people."""

BOOKKEEPING = "bookkeeping"
SET_UP = "set-up of the epoch"
IDLE = "idle"
MEANING = {
    "sampling": "drawing neighbours and relabelling them, as far as that is apart from aggregating",
    "forward": "features, layers and loss; also kernels that sample and aggregate in one",
    "backward": "gradients, and freeing the old ones",
    "optimizer": "clipping and the update of the parameters",
    BOOKKEEPING: "the host's work around a step: checks that nothing changed, reading whether the batch fitted its "
    "bounds, noting sizes, the loss",
    SET_UP: "shuffling the seeds and checks at the beginning of an epoch, spread over its steps",
    IDLE: "time in which the GPU runs no kernel of the step",
}
