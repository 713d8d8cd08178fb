"""The decoder against transformers, trees against plain chains of their paths, and what must be refused."""

from __future__ import annotations

import pytest
import torch
from ..fakes import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_x(tiny_model, family):
    m = tiny_model(family)
    d = m.decoder()
    t = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(1))
    c = d.new_cache()
    mine = d.logits(d.forward(t, torch.arange(40), c))
    with torch.no_grad():
        ref = m.reference(t[None]).logits[0]
    out = m.reference.generate(t[None, :8], do_sample=False, max_new_tokens=64)[0, 8:]
    print(family, (mine - ref).abs().max().item(), ref.std().item(), len(set(out.tolist())))
