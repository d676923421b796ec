"""Tests start many a JVM for a short time: they compile quickly rather than well."""

import os

os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
