r"""Rules by which byte-level tokenizers split a text into words before merging, by the name in `tokenizer.ggml.pre`.

GGUF files name these rules but do not contain them. The expressions are those of the models' own tokenizer.json, as
llama.cpp quotes them (src/llama-vocab.cpp), or llama.cpp's own if it quotes none. llama.cpp's regex engine is coarser:
it has no letter case beyond ASCII, treats combining marks as punctuation in the expressions of gpt-4o and tekken, and
matches only ASCII digits with `\d`. Each expression splits the parts that the one before it left. Matches and the text
between them are both kept (llama.cpp, unicode_regex_split).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WordRules:
    """splits: regular expressions in Oniguruma's syntax, applied in order. adds_bos: the default for the file."""

    splits: tuple[str, ...]
    ignores_merges: bool = False  # a word that is a token becomes that token, without merging
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER_NOT_HAN, _LOWER_NOT_HAN = f"[{_UPPER[1:-1]}&&[^\\p{{Han}}]]", f"[{_LOWER[1:-1]}&&[^\\p{{Han}}]]"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


def _one_of(ranges: str) -> str:
    """One or more characters of these ranges, "first-last" in hexadecimal."""
    return "[" + "".join("-".join(f"\\x{{{code}}}" for code in part.split("-")) for part in ranges.split()) + "]+"


def _cased(ending: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Words of upper-case, then lower-case letters."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS))
_QWEN35 = "|".join(
    (_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES)
)
_GPT4O = "|".join((_cased(_CONTRACTIONS + "?"), r"\p{N}{1,3}", _SYMBOLS_SLASH))
_TEKKEN = "|".join((_cased(""), r"\p{N}", _SYMBOLS_SLASH))
_KIMI = "|".join((r"\p{Han}+", _cased(_CONTRACTIONS + "?", _UPPER_NOT_HAN, _LOWER_NOT_HAN), r"\p{N}{1,3}", _SYMBOLS))
_SEED = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES))
_DEEPSEEK3 = "|".join(
    (_ASCII_PUNCTUATION + "[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _LINES)
)
_SPARK = "|".join(
    (
        *(_ASCII_PUNCTUATION + "[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+", r"[\r\n]"),
        _SPACES,
    )
)
_MINICPM5 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}+", _SYMBOLS))
_UFAKZEKA = "|".join((_WORD, r"\p{N}", _SYMBOLS))
_YOUTU_LETTERS = "|".join(
    (
        _one_of("ac00-d7a3 3131-318e"),
        _one_of("ff01 2026 201c 201d 2018 2019 2014 ff1a ff1b ff0c 3001-303f fe30-fe4f"),
        *(_one_of("3105-312f"), _one_of("4e00-9fa5 3040-309f 30a0-30ff")),
    )
)
_YOUTU = "|".join((_cased(_CONTRACTIONS + "?"), r"\p{N}", _SYMBOLS_SLASH))
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CJK, _KANJI_KANA = _one_of("4e00-9fa5 0800-4e00 ac00-d7ff"), _one_of("4e00-9fa5 3040-309f 30a0-30ff")
_THREE_DIGITS = "[0-9][0-9][0-9]"
_DEEPSEEK_LETTERS = _one_of(  # letters with a case, in the Unicode version of the tokenizer's time
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f "
    "104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_SIGNS = _one_of("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_DEEPSEEK_LLM = (*("[\r\n]", r"\s?" + _DEEPSEEK_LETTERS, r"\s?" + _DEEPSEEK_SIGNS, r"\s+$", _CJK, r"\p{N}+"),)

_RULES: dict[WordRules, str] = {
    WordRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)): "default",
    WordRules((_GPT2,)): (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es "
        "jina-v2-de modern-bert"
    ),
    WordRules((r"\p{N}", _GPT2)): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    WordRules((_LLAMA3,), ignores_merges=True, adds_bos=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    WordRules((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    WordRules((r"\p{N}{1,3}", _MINICPM5), ignores_merges=True): "minicpm5",
    WordRules((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open",
    WordRules((r"[^\n]+|[\n]+", _QWEN2)): "laguna",
    WordRules((_QWEN35,)): "qwen35",
    WordRules((_UFAKZEKA,)): "ufakzeka",
    WordRules(_DEEPSEEK_LLM): "deepseek-llm",
    WordRules(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): "deepseek-coder",
    WordRules((r"\p{N}{1,3}", _KANJI_KANA, _DEEPSEEK3)): "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    WordRules((r"\p{N}{1,3}", _KANJI_KANA, _SPARK, r"\p{N}")): "spark2_5",
    WordRules((_YOUTU_LETTERS, _YOUTU), ignores_merges=True): "youtu",
    WordRules((_TEKKEN,), ignores_merges=True, adds_bos=True): "tekken",
    WordRules((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    WordRules((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)): "tiny_aya cohere2moe",
    WordRules((_KIMI,)): "kimi-k2",
    WordRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): "superbpe",
    WordRules((_SEED,)): "seed-coder",
    WordRules((_BLOOM, r"\p{N}")): "viking",
}
WORD_RULES = {name: rules for rules, names in _RULES.items() for name in names.split()}
