"""What the exit code of a command means; git's bisect skips a commit at 125 and stops at 128 and above."""

MATCH = 0
DIVERGE = 1
CANNOT_JUDGE = 125
MISUSE = 129
INTERRUPTED = 130
