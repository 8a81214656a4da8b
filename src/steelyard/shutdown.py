"""How long an interrupted process may take to end: five seconds, and which step gets how much of them.

From the first signal a command ends within `INTERRUPT_SECONDS`, whatever the code that it runs is doing. The steps
below follow one another; each says what it waits for, and what happens when its time is up. `tests/test_shutdown.py`
adds them up: they fit into `reaper.BUDGET_SECONDS`, after which the reaper kills a process that did not end by itself.
"""

from __future__ import annotations

INTERRUPT_SECONDS = 5.0
"""From the first signal to the end of the process."""

SAME_SIGNAL_SECONDS = 0.2
"""A second signal this soon after the first is the same request: `timeout` sends two within microseconds."""

# The steps of an interrupted run on the command line, in this order.
CALLS_SECONDS = 2.5
"""Cancelled calls may take this long to end; then they are abandoned."""
CLOSE_SECONDS = 1.2
"""The run may take this long more to write its partial result; then its event loop counts as stuck."""
POLL_SECONDS = 0.1
"""How often that is checked."""
JOURNAL_SECONDS = 0.4
"""A partial result may take this long to read from the journal of a stuck run; then there is no summary."""
WRITE_SECONDS = 0.3
"""A message may take this long to be written after a signal: a full pipe that nobody reads must not block the exit."""
BLOCKED_WRITE_SECONDS = 0.05
"""The same for a stream on which an earlier message is still not written; then the new one is dropped."""

# Within CALLS_SECONDS: for all cancelled calls together, then for each program that one of them started.
READ_CUT_SECONDS = 1.0
"""How long the parts of answers that had arrived are read and kept; the rest of them are dropped."""
PROGRAM_GRACE_SECONDS = 0.5
"""From SIGTERM to SIGKILL."""
PROGRAM_REAP_SECONDS = 1.0
"""How long the kernel may take to end a killed program before it is given up."""
PROGRAM_DRAIN_SECONDS = 0.25
"""How long output may still come once a program has ended by itself."""

# Within CLOSE_SECONDS, for engines with other processes.
WORKER_REPORT_SECONDS = 1.0
"""Workers may take this long, after their calls have ended, to report their last records."""

# Within CLOSE_SECONDS, after the partial result is written.
HOOK_SECONDS = 0.15
"""Hooks may take this long to finish; then they are abandoned."""

WORKER_KILL_SECONDS = 0.05
"""Worker processes of an interrupted run may take this long to end by themselves; then they are killed."""
WORKER_EXIT_SECONDS = 2.0
"""The same after a run that was not interrupted: exit hooks of the suite's modules run there."""

# In Python, where no signal handler of ours counts the time.
ENGINE_GRACE_SECONDS = 4.0
"""Cancelled calls may take this long to end before an engine abandons them, unless it is given another time."""

# An ordinary exit, after a run that was not interrupted: Python waits for the suite's own threads and exit hooks.
EXIT_SECONDS = 5.0
"""How long that may take before the process ends without them."""
EXIT_MESSAGE_SECONDS = 0.5
"""How long the message about it may take to be written."""
