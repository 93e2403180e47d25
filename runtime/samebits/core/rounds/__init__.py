"""Rounds: when members meet, the point at which a generation starts, and what ended the last one."""
