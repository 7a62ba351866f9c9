"""Texts that break careless programs, and odd texts that are valid paths."""

from __future__ import annotations

HOSTILE: tuple[str, ...] = (
    # Several lines, and characters that do not print.
    *("\n#SBATCH --evil=1", "x\n#SBATCH --evil=1\n", "x\ntouch canary\n", "\r", "a\r\n", "\0"),
    *("\x1b[2J", "\t", "\x7f", "\x85", "\u2028", "\u2029"),
    # Texts that a shell runs or expands.
    *("$(touch canary)", "`touch canary`", "${IFS}", "$HOME", "$((1/0))", "<(touch canary)"),
    *("'; touch canary; '", '"; touch canary; "', "'$(touch canary)'", "$'\\ntouch canary'"),
    *("; touch canary", "& touch canary &", "| touch canary", "&& touch canary", "> canary"),
    *("a;b", "a|b", "a&b", "a<b", "a>b", "{a,b}", "~", "~root", "*", "?", "[a-z]", "!", "!!"),
    # Quotes, and characters that end a word, an option or a line.
    *("'", '"', "''", '""', "it's", "a'b\"c", "\\", "a\\", "\\'", '\\"', "\\\\", "\\n"),
    *(
        "",
        " ",
        "  ",
        " lead",
        "trail ",
        "a b",
        "#",
        "# x",
        "a #b",
        "a#b",
        "=",
        "--",
        "-x",
        "--evil",
    ),
    *("--wrap=id", "-", "EOF", "'EOF'"),
    # Placeholders of templates and of Slurm.
    *("{{ 7*7 }}", "{% raw %}", "{# x", "<#--", "%", "%%", "%j", "%x-%A_%a", "%q", "50%", "%5j"),
    *("hetjob", "packjob", "#SBATCH --evil", "SBATCH", ":", ",", "@", "a,b:c@d"),
    # Letters outside ASCII: confusable, invisible or changing direction.
    *(
        "\u00fc",
        "u\u0308",
        "\u540d\u524d",
        "\U0001f600",
        "\u202e",
        "\u202eevil",
        "\u200b",
        "a\u200bb",
    ),
    *("\u05d0\u05d1", "\u0430ccount", "\xa0", "\ufeff", "\ud800", "\uff08", "\u2215"),
    # Texts that are far too long, and paths outside the directory.
    *("x" * 300, "x" * 5000, "a/" * 3000, "9" * 400, "../../etc/passwd", "/dev/null", "."),
)
"""Texts that a careless renderer would pass on to sbatch, bash or Jinja."""

ODD_BUT_FINE: tuple[str, ...] = (
    *(
        "a b",
        " lead",
        "trail ",
        "two  spaces",
        "it's",
        'say "x"',
        "a'b\"c",
        "$HOME",
        "$(touch canary)",
    ),
    *(
        "`touch canary`",
        "a;b",
        "a&b",
        "a|b",
        "a<b>c",
        "*",
        "[x]",
        "{a,b}",
        "a#b",
        "# x",
        "~x",
        "!!",
    ),
    *(
        "50% done",
        "(1)",
        "a=b",
        "a,b",
        "a:b",
        "{{ 7*7 }}",
        "%",
        "caf\u00e9",
        "u\u0308",
        "\u540d\u524d",
    ),
    *("\u05d0\u05d1", "\U0001f600", "--evil", "-x", "hetJo", "x" * 200),
)
"""Valid names of a directory, which every script must handle."""
