"""Tests start many a JVM for a short time: they compile quickly rather than well."""

import os
import signal

os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A shell that starts `make test` in the background has SIGINT ignored, and every process would inherit that: the tests
# of Ctrl-C would wait for ever. Python's own handler is what a process at a prompt has.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
