"""What a program says it will do, read before it runs: files outside its folder, and the bench's own names.

Read on the text after macros are expanded, since `$fopen` can be pasted together from two halves. Comments go, strings stay (a file name is
one), and an escaped identifier counts as the plain one that it equals.
"""

from __future__ import annotations

import posixpath
import re

_STRING = r'"(?:\\.|[^"\\\n])*"'
_LEXEMES = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/|/\*.*\Z|\\\S+", re.S)
# Every task of Icarus Verilog's system.vpi that takes a file name; a mismatch with the first-argument rule below only makes it stricter.
_FILE_TASKS = (
    "fopen|fopenr|fopenw|fopena|readmemb|readmemh|readmempath|writememb|writememh|dumpfile|dumpports|input|key|log|sdf_annotate|table_model|"
    "save|restart|incsave"
)
_STRING_OR_FILE_TASK = re.compile(rf"{_STRING}|\$(?:{_FILE_TASKS})\b")
_FIRST_LITERAL = re.compile(r'\s*\(\s*"([^"]*)"\s*[,)]')
_SHELL_TASK = re.compile(r"\$(?:system|shell|popen|exec)\b")
_INCLUDE = re.compile(r"`include\b[ \t]*(\S*)")
_MODULE = re.compile(r"\b(?:module|macromodule|program|interface|package)\s+(?:automatic\s+|static\s+)?(\w+)")


def without_comments(code: str) -> str:
    """The code with comments removed, strings kept, and escaped identifiers written plainly."""
    return _LEXEMES.sub(_plain, code)


def _plain(match: re.Match[str]) -> str:
    text = match.group()
    if text.startswith("/"):
        return "\n" if text.startswith("//") else " "
    return f"{text[1:]} " if text.startswith("\\") and re.fullmatch(r"\\\w+", text) else " " if text.startswith("\\") else text


def has_open_comment(code: str) -> bool:
    """Whether a block comment is left open, which would swallow the head of the file that is compiled next."""
    return any(m.startswith("/*") and (len(m) < 4 or not m.endswith("*/")) for m in _LEXEMES.findall(code))


def without_strings(text: str) -> str:
    """Comment-free code with every string emptied."""
    return re.sub(_STRING, '""', text)


def outside_include(code: str) -> str | None:
    """An `include of a file outside the program's own folder, or whose name is a macro; asked before the preprocessor opens it."""
    for name in _INCLUDE.findall(without_comments(code)):
        path = name[1:-1] if len(name) > 1 and name[0] in '"<' else None
        if path is None or not _inside(path):
            return f"`include {name} reaches outside the program's folder"
    return None


def outside_file(text: str, bench: str) -> str | None:
    """A file task in comment-free, expanded code that may reach outside its folder: any name but a plain relative literal.

    Opening the file that the bench dumps its waves to counts too: the reference's outputs are in it.
    """
    waves = set(re.findall(r'\$dumpfile\s*\(\s*"([^"]*)"', bench))
    shell = _SHELL_TASK.search(without_strings(text))
    if shell:
        return f"{shell.group()} would start another program"
    for task in _STRING_OR_FILE_TASK.finditer(text):
        if task.group().startswith('"'):
            continue
        name = _FIRST_LITERAL.match(text, task.end())
        if name is None:
            return f"{task.group()} with a computed file name"
        if not _inside(name.group(1)):
            return f'{task.group()}("{name.group(1)}") reaches outside the program\'s folder'
        if task.group() != "$dumpfile" and posixpath.normpath(name.group(1)) in waves:
            return f'{task.group()}("{name.group(1)}") is the bench\'s own file'
    return None


def _inside(path: str) -> bool:
    return bool(path) and path[0] not in "/~" and "\\" not in path and ".." not in path.split("/")


def reaches_into_bench(text: str, bench: str, reference: str, top: str) -> str | None:
    """A use of the bench's or the reference's own scopes in comment-free, expanded code: `tb.errors`, an instance of `RefModule`.

    Such a program can read the expected outputs or write the counters; no solution needs it.
    """
    bare = without_strings(text)
    modules = (set(_MODULE.findall(without_comments(bench))) | set(_MODULE.findall(without_comments(reference)))) - {top}
    own = set(_MODULE.findall(bare))
    scopes = {"$root"}
    for module in modules:
        instances = re.findall(rf"\b{module}\s+(?:#\s*\([^;]*?\)\s*)?(\w+)\s*\(", without_comments(bench))
        scopes.update([module, *instances])
        if module in own or re.search(rf"(?<![\w.$]){module}\s+(?:#\s*\(.*?\)\s*)?\w+\s*\(", bare, re.S):
            return f"it uses the bench's module {module}"
    for scope in scopes:
        if re.search(rf"(?<![\w.$]){re.escape(scope)}\s*\.", bare):
            return f"it reaches into the bench through {scope}"
    return None
