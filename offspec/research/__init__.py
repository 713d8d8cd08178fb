"""Research that nobody needs to run a model: training, and published methods kept for comparison.

METHODS is all that the core sees of it (`offspec.extensions`). This module imports nothing, so that `--help` is fast.
"""

METHODS: dict[str, dict[str, str]] = {
    "draft that learns": {"learn": "offspec.research.learning:learning_draft"},
    "lossy acceptance": {
        **dict.fromkeys(("cascade", "contrastive", "mix", "relaxed"), "offspec.research.blend:BlendDrafter"),
        "bild": "offspec.research.bild:BildDrafter",
    },
    "shape of a tree": {
        "sequoia": "offspec.research.sequoia:sequoia_drafter",
        "opt-tree": "offspec.research.opt_tree:opt_tree_drafter",
    },
    "kind of head": {
        "recurrent": "offspec.research.own_heads:RECURRENT",
        "clover": "offspec.research.own_heads:CLOVER",
        "amphista": "offspec.research.own_heads:AMPHISTA",
    },
    "tensor of a head": {"clover_head_mlp_rnn.q.weight": "offspec.research.clover2:CLOVER2"},
}
