"""Texts on which tokenizers differ: code, spaces, numbers, scripts, marks, symbols, special tokens."""

# ruff: noqa: RUF001

from __future__ import annotations

from itertools import product

_WORDS = [
    "",
    " ",
    "a",
    "Hello, world!",
    " leading space",
    "  two  spaces   between    words  ",
    "don't won't I'll you're they've he'd it's I'm",
    "DON'T WON'T I'LL YOU'RE THEY'VE HE'D IT'S I'M",
    "'s 't 're 've 'm 'll 'd 'S 'T",
    "camelCase PascalCase snake_case SCREAMING_SNAKE kebab-case",
    "HTTPServer XMLHttpRequest iPhone eBay McDonald",
    "an e-mail to someone@example.com about https://example.com/path?query=1&b=2#part",
    "a" * 300,
    "-" * 77,
    "!?!?...,,,;;;:::",
    "(()) [[]] {{}} <<>>",
    '"quoted" “curly” ‘single’ «guillemets» „low“',
    "$100 €50 £30 ¥1000 50% #1 @home & co * + = ^ ` ~ |",
    "1+1=2 2*3=6 10/4=2.5 7%3=1",
    "--flag --key=value -x -abc",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c\n<|im_end|>\n",
    "<s>text</s> <unk> <pad>",
    "<|endoftext|> and <|endoftext|>",
]
_CODE = [
    "def area(x: int) -> int:\n    return x * x  # square\n",
    "class A:\n\tdef __init__(self):\n\t\tself.x = None\n\n\n\tpass\n",
    "if (a && b || !c) {\r\n  return;\r\n}\r\n",
    '#include <stdio.h>\n\nint main(void) {\n        printf("%d\\n", 42);\n}\n',
    '{"key": [1, 2.5, -3e10, true, null], "nested": {"a": "b"}}',
    '<div class="a b"><p>text</p></div>\n<!-- comment -->',
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2",
    "```python\nprint('hi')\n```\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "a\n\nb\n\n\nc\n\n\n\nd",
    "a \n b \n\n c\t\n\td",
    "x = [\n    1,\n    2,\n]\n\n\n\n",
    "\t\t\tdeep\n\t\t\t\tdeeper\n",
]
_NUMBERS = [
    "0 1 12 123 1234 12345 123456 1234567 12345678 123456789 1234567890",
    "3.14159 2,718,281 1e-10 0xDEADBEEF 0b1010 1_000_000",
    "2024-01-31 23:59:59.999 +01:00",
    "½ ¼ ² ³ ① Ⅳ ⅷ",
    " 1 22 333 4444",
    "1234abc abc1234 12 345",
    "0.1 .5 5. 1.2.3",
]
_SCRIPTS = [
    "naïve café résumé über straße Ångström",
    "ÉCOLE École école ÀÉÎÕÜ àéîõü",
    "Привет, мир! Как дела? ЗДРАВСТВУЙ",
    "Ελληνικά κείμενο ΚΕΦΑΛΑΙΑ",
    "日本語のテキストです。漢字とカタカナ、ひらがな。",
    "中文文本，包含标点符号！“引号”和数字123。",
    "한국어 텍스트입니다. 안녕하세요!",
    "עברית שלום עולם",
    "العربية مرحبا بالعالم",
    "हिन्दी में पाठ नमस्ते दुनिया",
    "ภาษาไทยไม่มีช่องว่าง สวัสดี",
    "e\u0301cole cafe\u0301 a\u0308 o\u0308 u\u0308 n\u0303",
    "Z\u0351\u036b\u0343a\u0328\u0302l\u0334g\u0321o\u0337",
    "٠١٢٣٤٥٦٧٨٩ ०१२३४५६७८९",
    "ﬁ ﬂ ﬃ Ǆ ǅ ǆ ſ K Å",
    "ａｂｃ ＡＢＣ １２３ ！？",
    "ʻokina ʼ ˈstress ʰ ʷ",
    "𝒽𝑒𝓁𝓁𝑜 𝟙𝟚𝟛 𐐷 𠀀𠀁",
    "İstanbul ısı IĞDIR",
]
_SYMBOLS = [
    "😀😃😄 👍🏽 👩‍👩‍👧‍👦 🇩🇪🇯🇵 ❤️",
    "text😀text 😀 text",
    "→ ← ↑ ↓ ⇒ ∀x∈ℝ ∃y ≠ ≤ ≥ ± × ÷ √ ∞",
    "— – ‐ ‑ ― −",
    "\x00\x01\x02 \x1f\x7f",
    "\x0b\x0c\x85\xa0",
    "a\u200bb\u200cc\u200dd\ufeffe\u2060f",
    "a\u3000b\u2003c\u2028d\u2029e\u202ff\u1680g",
    "\ufffd \ue000 \U000f0000 \U0010ffff",
    "\r\r\n\n\r",
    "\u0378\u0379 \u2fe0",
    "▁ ▁▁ a▁b ▁the",
    "<0x0A> <0xFF> <0x41>",
    "¡Hola! ¿Qué tal?",
]
# Spaces, tabs and line ends of every length around a word, behind and before others.
_GAPS = [gap * times for gap, times in product((" ", "\n", "\t", " \n", "\n "), (1, 2, 3, 5, 17))]
_BETWEEN = [f"a{gap}b" for gap in _GAPS]
_ENDS = [f"x{gap}" for gap in _GAPS[:12]] + [f"{gap}x" for gap in _GAPS[:12]]
_REPEATED = [char * times for char in ("a", "0", ".", "é", "日", "😀", "\u0301") for times in (2, 3, 16)]

TEXTS = list(dict.fromkeys([*_WORDS, *_CODE, *_NUMBERS, *_SCRIPTS, *_SYMBOLS, *_BETWEEN, *_ENDS, *_REPEATED]))
