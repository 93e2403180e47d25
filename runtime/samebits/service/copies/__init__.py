"""Copies of a rank's newest point on another host: who sends, who keeps, and the writer that does both."""
