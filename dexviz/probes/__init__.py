"""Captures in, answers with their labels out (ProbeResult)."""
