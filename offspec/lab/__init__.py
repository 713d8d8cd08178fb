"""The laboratory: research that nobody needs to run a model, and published methods kept for comparison.

METHODS is all that the core sees of it (`offspec.extensions`). This module imports nothing, so that `--help` is fast.
"""

METHODS: dict[str, dict[str, str]] = {
    "draft that learns": {"learn": "offspec.lab.learning:learning_draft"},
    "lossy acceptance": {
        **dict.fromkeys(("cascade", "contrastive", "mix", "relaxed"), "offspec.lab.blend:BlendDrafter"),
        "bild": "offspec.lab.bild:BildDrafter",
    },
    "shape of a tree": {
        "sequoia": "offspec.lab.sequoia:sequoia_drafter",
        "opt-tree": "offspec.lab.opt_tree:opt_tree_drafter",
    },
    "kind of head": {
        "recurrent": "offspec.lab.own_heads:RECURRENT",
        "clover": "offspec.lab.own_heads:CLOVER",
        "amphista": "offspec.lab.own_heads:AMPHISTA",
    },
    "tensor of a head": {"clover_head_mlp_rnn.q.weight": "offspec.lab.clover2:CLOVER2"},
    "head to train": {
        name: f"offspec.lab.head_structures:{name.replace('-', '_')}"
        for name in (
            "medusa",
            "medusa-shared",
            "hydra",
            "recurrent",
            "mlp",
            "clover",
            "clover2",
            "koala",
            "amphista",
            "fspad",
            "mtp",
            "dflash",
        )
    },
}
