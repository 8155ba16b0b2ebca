"""Runs of words and of Verilog tokens as 64-bit numbers: what duplicates and leaks are recognised by.

    words     lower case, punctuation left out              a run: WORD_RUN words
    tokens    comments and white space gone; a name is      a run: TOKEN_RUN tokens
              how far back it last stood in the module

A text shorter than a run is one run. A word is known by the polynomial of its bytes, and a run by that of its words, so the numbers are the
same on every machine. There is no loop over words in Python: a text of some kilobytes takes some ten microseconds.
"""

from __future__ import annotations

import re
import string

import numpy as np

WORD_RUN = 13
"""As in Brown et al. 2020 (arXiv 2005.14165), appendix C."""
TOKEN_RUN = 24
SHINGLE = 8
"""Tokens of the model's of a run that near duplicates are compared by."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
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

_BYTES = np.arange(256)
_ALPHANUMERIC = (string.ascii_letters + string.digits).encode()
_IN_WORD = (_BYTES >= 0x80) | np.isin(_BYTES, np.frombuffer(_ALPHANUMERIC, np.uint8))
_IN_TOKEN = _IN_WORD | np.isin(_BYTES, np.frombuffer(b"_$'`", np.uint8))
_IS_SPACE = np.isin(_BYTES, np.frombuffer(b" \t\r\n\f\v", np.uint8))
_STARTS_NAME = _IN_WORD & ~np.isin(_BYTES, np.frombuffer(b"0123456789", np.uint8)) | (ord("_") == _BYTES)

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


def modules(text: str) -> str:
    """The Verilog modules of an answer: those in its fences, or where no fence holds one, in all of it."""
    fenced = [found for body in _FENCE.findall(text) for found in _MODULE.findall(body)]
    return "\n".join(fenced or _MODULE.findall(text))


def without_comments(text: str) -> str:
    """Verilog without its comments, in which a module may seem to end."""
    return _COMMENT.sub(" ", text)


def word_runs(text: str, size: int = WORD_RUN) -> np.ndarray:
    """Every run of `size` words of a text as a number, [runs] uint64, in order; none for no words."""
    data = np.frombuffer(text.lower().encode(), np.uint8)
    inside = _IN_WORD[data]
    starts, ends = _edges(inside)
    return runs(_polynomials(data, starts, ends), size)


def token_runs(verilog: str, size: int = TOKEN_RUN) -> np.ndarray:
    """The same of Verilog tokens, where a name is known by how far back it last stood in the module, so that renaming changes nothing."""
    data = np.frombuffer(without_comments(verilog).encode(), np.uint8)
    inside = _IN_TOKEN[data]
    starts, ends = _edges(inside)
    marks = np.flatnonzero(~inside & ~_IS_SPACE[data])
    codes, starts = _polynomials(data, np.r_[starts, marks], np.r_[ends, marks + 1]), np.r_[starts, marks]
    order = np.argsort(starts, kind="stable")
    codes, starts = codes[order], starts[order]
    keywords = _KEYWORD_CODES[np.minimum(np.searchsorted(_KEYWORD_CODES, codes), len(_KEYWORD_CODES) - 1)] == codes
    names = _STARTS_NAME[data[starts]] & ~keywords
    back = _distance_back(codes + np.cumsum(codes == _MODULE_CODE).astype(np.uint64))  # names of another module are other names
    known = np.where(back < size, back, 0).astype(np.uint64)
    return runs(np.where(names, known, codes), size)


def runs(codes: np.ndarray, size: int) -> np.ndarray:
    """Every run of `size` numbers as a number, [runs] uint64, in order; one run for fewer numbers than that, none for none."""
    last = len(codes) - min(size, len(codes)) + (1 if len(codes) else 0)
    starts = np.arange(last)
    return _mixed(_polynomials(codes, starts, starts + min(size, len(codes))))


def _edges(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where stretches of true begin and end."""
    change = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    return change[::2], change[1::2]


def _polynomials(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A number for each stretch of numbers, the same for the same ones: the difference of prefix sums, shifted to the stretch's start."""
    powers, inverses = _powers(len(data) + 1)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers[: len(data)], out=sums[1:])
    return (sums[ends] - sums[starts]) * inverses[starts]


_tables: list[np.ndarray] = [np.ones(1, np.uint64), np.ones(1, np.uint64)]


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first powers of the base and of its inverse, modulo 2^64; kept, and made longer when a text is."""
    if len(_tables[0]) < count:
        length = 1 << count.bit_length()
        for i, base in enumerate((_BASE, _INVERSE)):
            factors = np.full(length, base, np.uint64)
            factors[0] = 1
            _tables[i] = np.cumprod(factors)
    return _tables[0], _tables[1]


def _distance_back(codes: np.ndarray) -> np.ndarray:
    """How many places before it each number last stood, 0 where it had not."""
    order = np.argsort(codes, kind="stable")
    same = codes[order][1:] == codes[order][:-1]
    back = np.zeros(len(codes), np.int64)
    back[order[1:][same]] = np.diff(order)[same]
    return back


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spread over 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _code(word: str) -> np.uint64:
    return _polynomials(np.frombuffer(word.encode(), np.uint8), np.array([0]), np.array([len(word)]))[0]


_KEYWORD_CODES = np.sort(np.array([_code(word) for word in KEYWORDS]))
_MODULE_CODE = _code("module")

SIGNATURE = 64
"""Numbers of a MinHash signature: the standard error of a similarity is at most 0.0625."""

_MULTIPLIERS = (_mixed(np.arange(1, SIGNATURE + 1, dtype=np.uint64)) | np.uint64(1)).astype(np.uint32)


def signature(found: np.ndarray) -> np.ndarray:
    """MinHash of a set of runs, [SIGNATURE] uint32: the share of equal numbers in two signatures estimates the Jaccard similarity of the
    sets (Broder 1997). Zeros for no runs."""
    if not len(found):
        return np.zeros(SIGNATURE, np.uint32)
    return np.multiply.outer(_MULTIPLIERS, (found >> np.uint64(32)).astype(np.uint32)).min(axis=1)
