"""Tokens that two vocabularies have in common: tokens of the same bytes, and special tokens of the same role.

Their share of a text decides whether a model may draft for a target with another vocabulary. The share is measured on
SAMPLE, because a draft is opened before the user's text is known. This module does not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import VocabularyMismatchError
from .tokenizer import Tokenizer

# A run of accepted draft tokens ends at the first token that is not shared. With a share s, its mean length is at most
# s / (1 - s). At s = 1/4 this is a third of a token, for which a draft seldom pays off.
LEAST_SHARE = 0.25

SAMPLE = """\
The committee met on Tuesday, 14 March 2023, and agreed that the report should be published before the end of the
year. "We don't know yet," she said, "whether 3.5 million people will be affected, but the first results look good."
Water boils at 100 °C; at higher altitudes it boils at lower temperatures because the pressure of the air is lower.

def mean(values: list[float], default: float = 0.0) -> float:
    \"\"\"The arithmetic mean of `values`.\"\"\"
    if not values:
        return default
    return sum(values) / len(values)

for (int i = 0; i < count; i++) { total += items[i].price * 1.19; }
SELECT name, COUNT(*) FROM users WHERE created_at > '2024-01-01' GROUP BY name;

1. **Install** the package: `pip install example`
2. Open <https://example.org/docs> and read *Getting started*.

Die Sitzung wurde verschoben, weil nicht genügend Mitglieder anwesend waren. Le musée est fermé le lundi, mais l'entrée
est gratuite. La biblioteca abrirá mañana a las nueve. Сегодня хорошая погода. 今天天气很好,我们去公园吧。
"""


@dataclass(frozen=True)
class SharedTokens:
    """The tokens that a target's and a draft's tokenizer share.

    to_draft: target id → draft id, one to one. share: the fraction of SAMPLE's tokens that is shared; the smaller of
    the target's and the draft's, because a draft of byte tokens predicts words badly, and vice versa. ratio: number of
    SAMPLE's tokens in the draft's vocabulary ÷ number in the target's.
    """

    to_draft: Mapping[int, int]
    share: float
    ratio: float

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> SharedTokens:
        """target_size, draft_size: numbers of ids of the models.

        Raises VocabularyMismatchError if they share too few tokens, or if the bytes of tokens are not known.
        """
        for tokenizer, role in ((target, "target"), (draft, "draft")):
            if tokenizer.token_bytes is None:
                raise VocabularyMismatchError(
                    "draft and target have different vocabularies, which is supported for byte-level BPE and "
                    f"sentencepiece only; the {role} {tokenizer.folder} has another kind of tokenizer; choose a draft "
                    "of the target's family, or `draft=lookup`"
                )
        their_ids = ids_by_bytes(draft, draft_size)
        pairs = {i: their_ids[text] for text, i in ids_by_bytes(target, target_size).items() if text in their_ids}
        ours, theirs = (tokenizer.encode(SAMPLE, add_special_tokens=False) for tokenizer in (target, draft))
        shared = {*pairs.values()}
        share = min(sum(i in pairs for i in ours) / len(ours), sum(i in shared for i in theirs) / len(theirs))
        if share < LEAST_SHARE:
            raise VocabularyMismatchError(
                f"the draft's vocabulary differs too much: {target.folder} and {draft.folder} share {share:.0%} of the "
                f"tokens of a sample text, and at least {LEAST_SHARE:.0%} are needed for a draft to pay off; choose a "
                "draft of the target's family, or `draft=lookup`"
            )
        roles = _equal_roles(target, draft).items()
        special = {i: other for i, other in roles if i < target_size and other < draft_size}
        return cls(pairs | special, share, len(theirs) / len(ours))


def ids_by_bytes(tokenizer: Tokenizer, size: int) -> dict[bytes, int]:
    """Ids below `size` by their bytes. Of several tokens with the same bytes, the one that occurs in texts.

    Sentencepiece has a byte token in addition to the token of each ASCII character. Needs `tokenizer.token_bytes`.
    """
    contents, ids = tokenizer.token_bytes, dict[bytes, int]()
    assert contents is not None
    is_for_bytes = {i for i in contents if tokenizer.byte_anchor is not None and tokenizer.token_text(i)[:3] == "<0x"}
    for token_id in sorted(filter(size.__gt__, contents), key=lambda i: (i in is_for_bytes, i)):
        ids.setdefault(contents[token_id], token_id)
    return ids


def _equal_roles(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Special tokens of the same name that end an answer in both models or in neither, and the two EOS tokens.

    Tokens that begin every text (BOS) are omitted, because the draft's text begins with its own.
    """
    pairs = dict[int, int]()
    ours, theirs = (tokenizer.special_ids - {*tokenizer.encode("")} for tokenizer in (target, draft))
    for token_id in sorted(ours):
        other = draft.token_id(target.token_text(token_id))
        if other in theirs and (token_id in target.eos_ids) == (other in draft.eos_ids):
            pairs[token_id] = other
    eos, other = target.eos_id, draft.eos_id
    if eos is not None and other is not None and eos not in pairs and other not in pairs.values():
        pairs[eos] = other
    return pairs
