"""300 texts that tokenizers cut in different ways: digits, blanks, scripts, code, tokens."""

from __future__ import annotations

import random

_WORDS = (
    "the quick brown fox Hello WORLD don't I'M we'll they'RE you'd it's x'S naïve café"
    " Zürich Straße coöperate ﬁnance Ⅷ ½ e\u0301tude A\u030angstro\u0308m ñandú İstanbul"
    " ΑΒΓ αβγ Привет мир שלום עולם مرحبا بالعالم हिन्दी नमस्ते বাংলা தமிழ் ไทยภาษา ភាសាខ្មែរ"
    " မြန်မာ 你好世界 中文字符 こんにちは カタカナ ﾊﾝｶｸ 한국어 조선말 ქართული Հայերեն አማርኛ"
    " ᏣᎳᎩ 𝕳𝖊𝖑𝖑𝖔 😀 👩‍👩‍👧 🇩🇪 🏳️‍🌈 ☃ → ∑ ≠ € ₹ § ¿ « » … — “x” ‘y’ foo_bar fooBar"
    " FOO2BAR __init__ #include x+=1; a->b; ${HOME} C:\\dir\\f.txt http://a.b/c?d=e&f=1"
    " user@example.com 0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 -42 0x1F 1e-10"
    " ١٢٣ १२३ ²³ ① v1.2.3 50% $9.99 (a) [b] {c} <d> </d> ### *** ___ --- ... !!! ?? ;; ::"
    " // \\\\ || && @@ ~~ ^^ ``"
).split(" ")
_FIXED = [
    "",
    " ",
    "  ",
    "   a",
    "\n",
    "\n\n",
    "\n\n\n\na",
    "\r\n",
    "\r\n\r\nx",
    "\t",
    "\t\tx\t",
    " \n ",
    " \n  \n   x",
    "a \n b",
    "a\n\n  b",
    "x   \n",
    "end   ",
    "\u00a0x\u00a0\u00a0y",
    "\u2003em\u2003\u2003space",
    "\u3000全角\u3000空白",
    "\u200bzero\u200bwidth",
    "\ufeffbom",
    "\u0085nel\u2028line\u2029para",
    "\v\fx\x1c\x1d",
    "\x00\x01\x02nul"[1:],
    "\x7f\x80\x9f",
    "\ue000\uf8ff\U000f0000",
    "\U0010ffff",
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'VE 'M 'LL 'D",
    "I'm you're HE'LL she’s",
    "''''''''''",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 70,
    "-" * 33,
    " " * 33 + "x",
    "\n" * 40,
    "\t" * 20,
    "1" * 30,
    "12 345 6789 01234",
    "a1b22c333d4444",
    "３４５６",
    "٣٤٥٦٧٨",
    "<s>x</s>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n",
    "<unk> <pad> <mask>",
    "<|user|>\nhi<|end|>\n<|assistant|>\n",
    "<｜begin▁of▁sentence｜>hi",
    "<0x0A><0xFF>",
    "▁a▁▁b",
    "Ġa Ċ ĉ",
    "<|im_start|",
    "im_start|>",
    "def f(x):\n    if x > 10:\n        return x ** 2\n    return [i for i in range(x)]\n",
    '{"a": [1, 2.5, null, true], "b": {"c": "d\\n"}}',
    "SELECT * FROM t WHERE id = 42 AND name LIKE '%x%';",
    "for (int i = 0; i < n; ++i) { sum += a[i]; } // done",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "# Title\n\n- item\n  - sub\n\n```py\nprint('x')\n```\n",
    "Ünïcödé ÀÉÎÕÜ àéîõü ÆØÅ æøå ŁŃŚŹ łńśź",
    "e\u0301e\u0300e\u0308 a\u0328 o\u0302\u0301",
    "क्षत्रिय ज्ञान श्री",
    "นี่คือข้อความภาษาไทย",
    "日本語の文章です。漢字、ひらがな、カタカナ。",
    "中文，标点符号！？（测试）",
    "한글 문장입니다. 띄어쓰기 있음.",
    "العربية: ١٢٣٤، نص.",
    "👨‍👩‍👧‍👦👍🏽🇫🇷",
]


def _mixed(number: int) -> str:
    random_ = random.Random(number)
    parts = []
    for _ in range(random_.randint(1, 12)):
        parts.append(random_.choice(_WORDS))
        parts.append(random_.choice((" ", " ", " ", "", "  ", "\n", ", ", ". ", "   ", "\t")))
    return "".join(parts)


TEXTS = [*_FIXED, *(_mixed(number) for number in range(300 - len(_FIXED)))]
