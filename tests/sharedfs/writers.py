"""The package's own writers and readers of files that are rewritten in place, on one host each.

    python -m tests.sharedfs.writers beats DIRECTORY NUMBER
    python -m tests.sharedfs.writers heads DIRECTORY NUMBER
    python -m tests.sharedfs.writers watch DIRECTORY

``beats`` and ``heads`` make their files, say ``ready``, and for each line of their input rewrite
one more file three times as fast as they can; each then says when, and which content is the last.
``watch`` reads, for each line (a kind, a number and the last content), that file until it sees the
content or the time is over, and says when it did. All times are epoch seconds of the one clock that
the guests share.
"""

from __future__ import annotations
