"""How long to draft and how much to verify: costs and acceptance, learnt at run time."""
