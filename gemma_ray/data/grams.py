"""Runs of words and of Verilog tokens as 64-bit numbers: what duplicates and leaks are recognised by.

    words     lower case, punctuation apart                    a run: WORD_RUN words
    tokens    comments and white space gone; a run does not    a run: TOKEN_RUN tokens
              know names, only which of them are the same

A text shorter than a run is one run. Numbers come from CRC-32 and a polynomial, so they are the same on every machine.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

WORD_RUN = 13
"""As in Brown et al. 2020 (arXiv 2005.14165), appendix C."""
TOKEN_RUN = 24
SHINGLE = 5
"""Words of a run that near duplicates are compared by."""

_WORD = re.compile(r"\w+|[^\w\s]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(r"`?[A-Za-z_$][\w$]*|\\\S+|\d*'[sS]?[bodhBODH][\w?]+|\d[\w.]*|\"[^\"\n]*\"|<<<|>>>|===|!==|[<>=!]=|&&|\|\||<<|>>|\S")
_MODULE = re.compile(r"\bmodule\b.*?\bendmodule\b", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)

_KEYWORDS = """
always always_comb always_ff always_latch and assign automatic begin bit buf byte case casex casez default defparam else end
endcase endfunction endgenerate endmodule endtask enum for forever function generate genvar if initial inout input int integer
localparam logic longint modport module nand negedge nor not or output packed parameter posedge priority reg repeat return
shortint signed struct task tri typedef unique unsigned wait while wire xnor xor
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Words of SystemVerilog that are no names (IEEE 1800-2017, annex B); of those, what synthesisable modules use."""

_BASE = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """Words and punctuation marks of a text."""
    return _WORD.findall(text.lower())


def modules(text: str) -> str:
    """The Verilog modules of an answer: those in its fences, or where no fence holds one, in all of it."""
    fenced = [found for body in _FENCE.findall(text) for found in _MODULE.findall(body)]
    return "\n".join(fenced or _MODULE.findall(text))


def runs(tokens: Sequence[str], size: int) -> np.ndarray:
    """Every run of `size` tokens as a number, [runs] uint64, sorted and each once; none for no tokens."""
    return _distinct(_windows(_codes(tokens), size))


def word_runs(text: str, size: int = WORD_RUN) -> np.ndarray:
    """`runs` of a text's words."""
    return runs([word for word in words(text) if word[0].isalnum()], size)


def token_runs(verilog: str, size: int = TOKEN_RUN) -> np.ndarray:
    """Runs of tokens in which a name is known by how far back it last stood in the same run, so that renaming changes nothing."""
    tokens = _TOKEN.findall(_COMMENT.sub(" ", verilog))
    last: dict[str, int] = {}
    back = np.zeros(len(tokens), np.int64)
    fixed: list[str] = []
    for i, token in enumerate(tokens):
        is_name = (token[0].isalpha() or token[0] in "_\\") and token not in KEYWORDS
        fixed.append("" if is_name else token)
        if is_name:
            back[i] = i - last[token] if token in last else 0
            last[token] = i
    names = np.array([not token for token in fixed], bool)
    windows, reach = _windows(_codes(fixed), size), _windows(back, size)
    reach = np.where(reach > np.arange(reach.shape[1]), 0, reach)
    return _distinct(np.where(_windows(names, size), reach.astype(np.uint64) + np.uint64(1), windows))


def _codes(tokens: Sequence[str]) -> np.ndarray:
    return np.fromiter((zlib.crc32(token.encode()) for token in tokens), np.uint64, len(tokens))


def _windows(values: np.ndarray, size: int) -> np.ndarray:
    """[runs, size], one run for fewer values than that."""
    if not len(values):
        return values.reshape(0, size)
    return np.lib.stride_tricks.sliding_window_view(values, min(size, len(values)))


def _distinct(windows: np.ndarray) -> np.ndarray:
    weights = np.power(_BASE, np.arange(1, windows.shape[1] + 1, dtype=np.uint64))
    return np.unique(_mixed((windows + np.uint64(1)) @ weights))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spread over 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


SIGNATURE = 64
"""Numbers of a MinHash signature: the standard error of a similarity is at most 0.0625."""

_MULTIPLIERS = _mixed(np.arange(1, SIGNATURE + 1, dtype=np.uint64)) | np.uint64(1)


def signature(found: np.ndarray) -> np.ndarray:
    """MinHash of a set of runs, [SIGNATURE] uint32: the share of equal numbers in two signatures estimates the Jaccard similarity of the
    sets (Broder 1997). Zeros for no runs."""
    if not len(found):
        return np.zeros(SIGNATURE, np.uint32)
    mixed = found[:, None] * _MULTIPLIERS[None, :]
    return ((mixed ^ (mixed >> np.uint64(32))) & np.uint64(0xFFFFFFFF)).min(axis=0).astype(np.uint32)
