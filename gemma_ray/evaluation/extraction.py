"""The program in a model's answer.

What models write around a program, tried in this order on the answer without its reasoning:

    <answer> … </answer>          the last such block, then the rules below inside it
    [BEGIN] … [DONE]              the markers that VerilogEval's own prompt asks for
    ```verilog … ```              of the closed fences the last that declares TopModule, else the last that holds a module, else the last
    ```verilog …                  a fence cut off by the token limit, or left open
    module … endmodule            bare, from the first header to the last `endmodule`
    … endmodule                   a body alone (the code-completion task); its header is put before it when it is graded

VerilogEval's `sv-generate` takes the first fence. Models that correct themselves, or show the interface first, have the program in a later
one, so the module's name decides here; with a single fence the two agree.
"""

from __future__ import annotations

import re

TOP = "TopModule"

_THINKING = [
    (re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.S), ""),
    (re.compile(r"<\|channel>.*?<channel\|>", re.S), ""),
    # The chat template may have opened the block in the prompt; and a block that never closes has no answer after it.
    (re.compile(r"\A.*</think(?:ing)?>|\A.*<channel\|>", re.S), ""),
    (re.compile(r"(?:<think(?:ing)?>|<\|channel>).*\Z", re.S), ""),
]
_ANSWER = re.compile(r"<answer>(?!.*<answer>)(.*?)(?:</answer>|\Z)", re.S | re.I)
_BEGIN_DONE = re.compile(r"^[ \t]*\[BEGIN\](.*?)\[DONE\][ \t]*$", re.S | re.M)
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.M)
_CODE_LANGUAGES = {"", "verilog", "systemverilog", "sv", "v", "vlog", "code"}
_HEADER = re.compile(
    r"^[ \t]*(?:\(\*.*?\*\)\s*)?(?:module|macromodule)\s+(?:automatic\s+|static\s+)?\\?[A-Za-z_]\w*\s*(?:[#(;]|import\b)", re.M
)
_TOP_HEADER = re.compile(rf"\bmodule\s+(?:automatic\s+|static\s+)?{TOP}\b")
_END = re.compile(r"\bendmodule\b(?:[ \t]*:[ \t]*\w+)?")


def extract_code(completion: str) -> str | None:
    """The Verilog in `completion`, or None when there is none (verdict `no_code`).

    A program cut off in the middle is returned as it stands: that is a syntax error of the model's, not a missing program.
    """
    text = completion
    for pattern, replacement in _THINKING:
        text = pattern.sub(replacement, text)
    answer = _ANSWER.search(text)
    if answer:
        text = answer.group(1)
    marked = _BEGIN_DONE.search(text)
    if marked:
        text = marked.group(1)
    code = _fenced(text)
    if code is None:
        code = _bare(text)
    if code is None and marked:
        code = text
    return code.strip("\n") + "\n" if code and code.strip() else None


def declares_top(code: str) -> bool:
    """Whether `code` declares TopModule itself, rather than being the body that goes under a given header."""
    return bool(_TOP_HEADER.search(code))


def _fenced(text: str) -> str | None:
    """The program among the text's code fences; the part before the end of the text counts when the last fence is left open."""
    closed, opened = [], None
    for mark in _FENCE.finditer(text):
        language = mark.group(1).strip().lower()
        if opened is None or language:  # a second opening: the first was never closed
            opened = (mark.end(), language)
        else:
            start, language = opened
            if language in _CODE_LANGUAGES:
                closed.append(text[start : mark.start()])
            opened = None
    for wanted in (_TOP_HEADER, _HEADER):
        fitting = [block for block in closed if wanted.search(block)]
        if fitting:
            return fitting[-1]
    if opened is not None and opened[1] in _CODE_LANGUAGES:
        rest = text[opened[0] :]
        return _bare(rest) or rest
    return closed[-1] if closed else None


def _bare(text: str) -> str | None:
    header = _HEADER.search(text)
    ends = [m.end() for m in _END.finditer(text)]
    if header:
        last = ends[-1] if ends and ends[-1] > header.start() else len(text)
        return text[header.start() : last]
    return text[: ends[-1]] if ends else None
