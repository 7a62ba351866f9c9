"""The line with which 'hpctk work' ends, for tests that compare everything else."""

import re

CLOSING = re.compile(r"^.*: [\d,]+ (of [\d,]+ )?items? (done|failed|left|of an).*\n", re.MULTILINE)
