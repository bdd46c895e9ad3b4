"""Published evidence: each study can be run again and writes its own results."""
